"""The checker that asks a language model, against transformers' logits of the same prompts."""

import numpy as np
import pytest
import torch
import transformers

from selfrag_jax.metrics import check_hallucination
from selfrag_jax.retrieval.entailment import NOTHING, Entailment
from tests.retrieval.test_lm_retrieval import folder  # noqa: F401

PASSAGE, CLAIM = "the river and the harbor", "a town of the river"


@pytest.fixture
def judge(folder):  # noqa: F811
  return Entailment.load(folder, dtype="float32")


def log_odds(folder, tokenizer, claim, passage):  # noqa: F811
  model = transformers.LlamaForCausalLM.from_pretrained(folder)
  asked = f"Passage: {passage}\n\nClaim: {claim}\n\nDoes the passage say that the claim is true? Answer Yes or No."
  sums = []
  for end in (" Yes", " No"):
    prompt, said = tokenizer.encode(f"{asked}\n\nAnswer:"), tokenizer.encode(end)
    with torch.no_grad():
      logits = model(torch.tensor([[*prompt, *said]])).logits[0].log_softmax(dim=-1)
    sums.append(sum(float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(said)))
  return sums[0] - sums[1]


def test_the_odds_are_those_of_transformers_beside_the_odds_without_a_passage(folder, judge):  # noqa: F811
  beside, without = (log_odds(folder, judge.tokenizer, CLAIM, passage) for passage in (PASSAGE, NOTHING))
  expected = 1 / (1 + np.exp(without - beside))
  assert abs(expected - 0.5) > 0.01
  assert judge.score(CLAIM, [PASSAGE]) == pytest.approx(expected, abs=1e-4)
  alone = [judge.score(CLAIM, [passage]) for passage in (PASSAGE, "zebra")]
  assert alone[0] != alone[1]
  assert judge.score(CLAIM, [PASSAGE, "zebra"]) == judge.score(CLAIM, ["zebra", PASSAGE]) == max(alone)
  assert judge.score(CLAIM, []) == 0.0


def test_no_more_is_read_than_max_tokens(judge):
  judge.max_tokens = 8
  assert judge.score(CLAIM, [PASSAGE * 50]) == judge.score(CLAIM, [PASSAGE * 60]) != judge.score(CLAIM, ["zebra"])


def test_claims_are_checked_by_it(judge):
  claims = ["The river is a town.", "The harbor is a forest.", "Zebra."]
  scores = [judge.score(claim, [PASSAGE]) for claim in claims]
  report = check_hallucination(" ".join(claims), [PASSAGE], judge)
  assert report["total_facts"] == 3
  assert report["verified_facts"] == sum(score >= 0.5 for score in scores)

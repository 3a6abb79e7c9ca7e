"""The default checker of claims: how well it tells supported claims about SQuAD's passages from three kinds of others.

  python benchmarks/hallucination.py --data=FOLDER --split=test
  python benchmarks/hallucination.py --data=FOLDER --split=test --model=smollm2-135m    also a model's judgement

FOLDER holds `dev-v2.0.json` of SQuAD 2.0. `benchmarks/hallucination_claims.py` makes the claims: supported ones, of
which more than half hold a negation or are paraphrased by a rule, and negated, swapped and shuffled ones. The checker
was written and its numbers were chosen on the articles with an even index (`--split=tune`); the others are the test.

Prints, for each kind, the area under the ROC curve (AUC) of supported against unsupported claims, with a bootstrap
interval over passages, and the share of claims that are called supported. Beside the checker stand rules that know
less: the share of the claim's words that the passage has, the share of its pairs of neighbouring words, and whether
the claim has no negation.

The makers of claims share no code and no list with the checker, but they can still coincide. Both know "not", "never",
"no" and "without", for English has few negations. Both take a capital for the sign of a name. Most paraphrases keep the
order of words within a clause, which the checker relies on, and one person wrote both sides. So the figures say that
the checker sees these three errors in sentences that are close to the passage; they say nothing of free paraphrases, of
errors in common words, or of conclusions.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.hallucination_claims import HAS_NEGATION, KINDS, Claim, make_claims
from selfrag_jax.metrics.rule_checker import THRESHOLD, RuleChecker
from selfrag_jax.metrics.statistics import bootstrap_interval
from selfrag_jax.retrieval.entailment import Entailment

DATA = flags.DEFINE_string("data", None, "Folder with dev-v2.0.json.", required=True)
SPLIT = flags.DEFINE_enum("split", "tune", ["tune", "test"], "Articles with an even index, or the others.")
MODEL = flags.DEFINE_string("model", None, "A language model that is asked whether a passage says so.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the claims.")
MOST = flags.DEFINE_integer("most", 150, "Most claims of a kind.")


def overlap(claim: Claim) -> float:
  """Return the share of the claim's words that the passage has."""
  return shared(words(claim.text), words(claim.passage))


def pairs(claim: Claim) -> float:
  """Return the share of the claim's pairs of neighbouring words that the passage has."""
  return shared(list(pairwise(words(claim.text))), list(pairwise(words(claim.passage))))


def no_negation(claim: Claim) -> float:
  """Return 1 for a claim without a negation, else 0."""
  return float(not HAS_NEGATION.search(claim.text))


def checker(claim: Claim) -> float:
  """Return the score of the default checker."""
  return RuleChecker().score(claim.text, [claim.passage])


RULES: dict[str, Callable[[Claim], float]] = {
  "checker": checker, "words in passage": overlap, "pairs in passage": pairs, "no negation": no_negation
}  # fmt: skip


def words(text: str) -> list[str]:
  """Return the words in small letters."""
  return re.findall(r"\w+", text.lower())


def shared(parts: Sequence, others: Sequence) -> float:
  """Return the share of the parts that are among the others."""
  return float(np.mean([part in set(others) for part in parts]))


def area(positive: np.ndarray, negative: np.ndarray) -> float:
  """Return the probability that a positive scores above a negative; ties count half."""
  above = np.searchsorted(np.sort(negative), positive, side="left")
  upto = np.searchsorted(np.sort(negative), positive, side="right")
  return float(np.mean(above + upto) / (2 * len(negative)))


def area_over_passages(claims: Sequence[Claim], scores: np.ndarray, kind: str) -> str:
  """Return the area of supported claims over a kind, with its interval over passages, as text."""
  numbers, kinds = np.array([claim.number for claim in claims]), np.array([claim.kind for claim in claims])
  rows = [np.flatnonzero(numbers == number) for number in np.unique(numbers)]

  def statistic(drawn: np.ndarray) -> float:
    found = np.concatenate([rows[i] for i in drawn])
    return area(scores[found][kinds[found] == "supported"], scores[found][kinds[found] == kind])

  every = np.arange(len(rows))
  low, high = bootstrap_interval(every, statistic, resamples=1000)
  return f"{statistic(every):.3f} ({low:.3f} to {high:.3f})"


def main(_: list[str]) -> None:
  """Make the claims of a split and print the table."""
  articles = json.loads((Path(DATA.value) / "dev-v2.0.json").read_text("utf-8"))["data"]
  mine = articles[SPLIT.value == "test" :: 2]
  passages = [paragraph["context"] for article in mine for paragraph in article["paragraphs"]]
  claims = make_claims(passages, MOST.value, SEED.value)
  supported = [claim for claim in claims if claim.kind == "supported"]
  hard = sum(claim.base != "copy" or no_negation(claim) == 0 for claim in supported)
  counts = ", ".join(f"{sum(claim.kind == kind for claim in claims)} {kind}" for kind in KINDS)
  print(f"{SPLIT.value}: {len(mine)} articles, {len(passages)} passages, {len(claims)} claims: {counts}")
  print(f"{hard} of the supported claims are paraphrased or hold a negation")
  print(f"{'AUC':20}" + "".join(f"{kind:>26}" for kind in KINDS[1:]))
  rules = dict(RULES)
  if MODEL.value:
    judge = Entailment.load(MODEL.value)
    rules[MODEL.value] = lambda claim: judge.score(claim.text, [claim.passage])
  for name, rule in rules.items():
    scores = np.array([rule(claim) for claim in claims])
    print(f"{name:20}" + "".join(f"{area_over_passages(claims, scores, kind):>26}" for kind in KINDS[1:]), flush=True)
  share = lambda kind: np.mean([checker(claim) >= THRESHOLD for claim in claims if claim.kind == kind])
  print("called supported: " + ", ".join(f"{kind} {share(kind):.3f}" for kind in KINDS))


if __name__ == "__main__":
  app.run(main)

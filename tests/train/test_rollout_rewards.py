"""Rewards of rollouts: the weighted terms, from scores and from texts, and a reward model in place of the F1."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from selfrag_jax.generate.transcript import Transcript
from selfrag_jax.tasks.rewards import RAGRewardWeights, RewardConfig, compute_rag_reward, search_reward
from selfrag_jax.text.tokenizer import ByteTokenizer
from selfrag_jax.train import rewards
from selfrag_jax.train.phases.refrag import RLConfig
from selfrag_jax.train.rewards import RolloutRewards
from selfrag_jax.train.rollouts import Episodes, Scores

TOKENIZER = ByteTokenizer()
DOCUMENTS = ["The river Iller flows to Illertissen.", "Reiner Knizia was born in Illertissen."]
ANSWERS = ["Illertissen", "Corvane", "Reiner Knizia was born in Illertissen [2].", None]
SLOTS = np.array([[[1], [0]], [[1], [0]], [[0], [1]], [[-1], [-1]]])
SCORES = Scores(*np.array([[1, 0, 0, 0], [1, 0, 0.4, 0], [1, 1, 0, 0], [0.5, 0.5, 1, 0], [0, 0, 1, 0],
                           [2, 2, 2, 1], [1, 1, 0, 0]], np.float32))  # fmt: skip


@pytest.fixture
def episodes():
  rows = [TOKENIZER.encode(document) for document in DOCUMENTS]
  width = max(map(len, rows))
  corpus = SimpleNamespace(
    tokens=np.array([row + [0] * (width - len(row)) for row in rows]), lengths=np.array(list(map(len, rows)))
  )
  said = [None if answer is None else tuple(TOKENIZER.encode(answer)) for answer in ANSWERS]
  transcripts = [Transcript((), answer, answer is not None) for answer in said]
  host = SimpleNamespace(slots=SLOTS, searches=SCORES.searches, tokens=np.arange(8).reshape(4, 2), lengths=[2] * 4)
  return Episodes(host, host, transcripts, SimpleNamespace(corpus=corpus), 4)  # type: ignore[arg-type]


def make(max_searches=4, **options) -> RolloutRewards:
  runner = SimpleNamespace(task=SimpleNamespace(tokenizer=TOKENIZER), mesh=None)
  return RolloutRewards(runner, RewardConfig(**options), max_searches)  # type: ignore[arg-type]


def test_a_right_answer_earns_one_unless_terms_are_weighted(episodes):
  columns = SCORES.exact_match, SCORES.f1, SCORES.gold_recall, SCORES.valid
  np.testing.assert_array_equal(make()(episodes, SCORES), search_reward(RewardConfig(), *columns))
  got = make(terms="weighted")(episodes, SCORES)
  np.testing.assert_allclose(got, 0.6 * SCORES.f1 + 0.3 * SCORES.gold_recall + 0.1 * (1 - SCORES.searches / 4))
  assert got.dtype == np.float32
  formatted = make(terms="weighted", weights=RAGRewardWeights(0, 0, 0, format=1))(episodes, SCORES)
  np.testing.assert_array_equal(formatted, SCORES.valid)


def test_terms_of_texts_are_about_what_was_found(episodes):
  grounded = make(terms="weighted", weights=RAGRewardWeights(0, 0, 0, grounding=1))(episodes, SCORES)
  np.testing.assert_array_equal(grounded, [1, 0, 1, 0])
  # the second document that was shown is the second of the corpus; only one answer cites
  cited = make(terms="weighted", weights=RAGRewardWeights(0, 0, 0, citations=1))
  np.testing.assert_array_equal(cited(episodes, SCORES), [0, 0, 1, 0])
  episodes.host.slots = SLOTS[:, ::-1]  # now the first that was shown
  np.testing.assert_array_equal(cited(episodes, SCORES), [0, 0, 0, 0])


def test_a_reward_model_scores_the_answers(episodes, monkeypatch):
  seen = {}

  def load(workdir, **options):
    seen.update(options, workdir=workdir)
    return lambda tokens, lengths: jnp.float32([0.9, 0.2, 0.5, 0.1]) * (tokens[:, 0] >= 0)

  monkeypatch.setattr(rewards, "load_reward_model", load)
  got = make(terms="weighted", model="runs/reward")(episodes, SCORES)
  judged = np.array([0.9, 0.2, 0.5, 0.1])
  np.testing.assert_allclose(got, compute_rag_reward(judged, SCORES.gold_recall, SCORES.searches, 4), rtol=1e-6)
  assert seen == {"workdir": "runs/reward", "tokenizer": TOKENIZER, "mesh": None}


def test_rewards_that_cannot_be_are_refused(tmp_path):
  with pytest.raises(ValueError, match=r"set reward\.terms = weighted, too"):
    RewardConfig(model="runs/reward")
  with pytest.raises(ValueError, match=r"reward\.model sees the question's own"):
    RLConfig(control="permuted", reward=RewardConfig(terms="weighted", model="runs/reward"))
  with pytest.raises(FileNotFoundError, match="has no intact checkpoint: train one"):
    make(terms="weighted", model=str(tmp_path))

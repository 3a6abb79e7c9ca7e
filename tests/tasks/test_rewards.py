"""Rewards: a right answer earns 1, any other a part of it; the permuted control wants another question's answer."""

import numpy as np
import pytest

from selfrag_jax.tasks.rewards import RAGRewardWeights, RewardConfig, compute_rag_reward, search_reward
from selfrag_jax.tasks.search_task import SearchBatch, permuted

GREEDY = RewardConfig(f1_weight=0.8, retrieval_weight=0.6)


@pytest.mark.parametrize(
  ("config", "exact", "f1", "gold_recall", "valid", "reward"),
  [
    (RewardConfig(), 1, 1, 0.0, 1, 1.0),
    (RewardConfig(), 1, 1, 1.0, 1, 1.0),  # what was found adds nothing to a right answer
    (RewardConfig(), 1, 1, 1.0, 0, 0.5),
    (RewardConfig(), 0, 0, 0.0, 1, 0.0),
    (RewardConfig(), 0, 0, 0.5, 1, 0.15),
    (RewardConfig(), 0, 0, 0.5, 0, 0.075),
    (RewardConfig(), 0, 0.5, 1.0, 1, 0.3),  # no weight, no F1
    (RewardConfig(f1_weight=0.5), 0, 0.5, 1.0, 1, 0.55),
    (RewardConfig(f1_weight=0.5, retrieval_weight=0.0), 0, 0.5, 1.0, 1, 0.25),
    (RewardConfig(invalid_factor=0.0), 1, 1, 1.0, 0, 0.0),
    (GREEDY, 0, 1.0, 1.0, 1, 1.0),  # a wrong answer earns at most what a right one does
    (GREEDY, 0, 1.0, 1.0, 0, 0.5),
  ],
)
def test_rewards_are_those_of_the_table(config, exact, f1, gold_recall, valid, reward):
  columns = (np.array([value], np.float32) for value in (exact, f1, gold_recall, valid))
  got = search_reward(config, *columns)
  assert got.dtype == np.float32
  np.testing.assert_allclose(got, [reward], rtol=1e-6)


def test_rewards_lie_between_0_and_1_and_grow_with_everything_that_is_good():
  grid = np.meshgrid([0, 1], [0, 0.4, 1], [0, 0.5, 1], [0, 1], indexing="ij")
  for config in (RewardConfig(), RewardConfig(f1_weight=0.5), GREEDY):
    reward = search_reward(config, *grid)
    assert reward.shape == (2, 3, 3, 2)
    assert reward.min() >= 0
    assert reward.max() == 1
    assert all((np.diff(reward, axis=axis) >= 0).all() for axis in range(4))


@pytest.mark.parametrize(
  ("answer", "relevance", "searches", "further", "reward"),
  [
    (1, 1, 0, {}, 1.0),
    (1, 1, 4, {}, 0.9),
    (1, 0, 2, {}, 0.65),
    (0, 1, 1, {}, 0.375),
    (0.5, 0.5, 2, {}, 0.5),
    (0, 0, 4, {}, 0.0),
    (1, 1, 0, {"citations": 0, "grounding": 0, "format": 0}, 1.0),  # without a weight they do not count
  ],
)
def test_the_reward_of_an_answer_its_documents_and_its_searches(answer, relevance, searches, further, reward):
  np.testing.assert_allclose(compute_rag_reward(answer, relevance, searches, 4, **further), reward, rtol=1e-6)


def test_further_terms_count_by_their_weights():
  weights = RAGRewardWeights(answer=2, relevance=1, efficiency=0, citations=1, grounding=3, format=1)
  terms = {"citations": 0.5, "grounding": 1.0, "format": 0.0}
  np.testing.assert_allclose(compute_rag_reward(0.5, 1.0, 4, 4, weights, **terms), (1 + 1 + 0.5 + 3) / 8)


def test_the_weighted_reward_is_monotone_in_every_term():
  weights = RAGRewardWeights(0.3, 0.2, 0.2, 0.1, 0.1, 0.1)
  names = ("answer", "relevance", "searches", "citations", "grounding", "format")
  grid = dict(zip(names, np.meshgrid(*[[0, 0.5, 1]] * 6, indexing="ij"), strict=True))
  reward = compute_rag_reward(**{**grid, "searches": 4 * (1 - grid["searches"])}, max_searches=4, weights=weights)
  assert reward.dtype == np.float32
  assert (reward.min(), reward.max()) == (0, 1)
  assert all((np.diff(reward, axis=axis) > 0).all() for axis in range(6))


@pytest.mark.parametrize(
  ("arguments", "error"),
  [
    ((1.5, 0, 0, 1), r"answer must lie in \[0, 1\], got 1\.5 to 1\.5"),
    ((1, float("nan"), 0, 1), "relevance must lie in"),
    ((1, 0, [0, 3], 2), r"searches must lie in \[0, 2\]"),
    ((1, 0, 0, 0), "max_searches = 0 must be at least 1"),
  ],
)
def test_terms_outside_their_range_are_refused(arguments, error):
  with pytest.raises(ValueError, match=error):
    compute_rag_reward(*arguments)
  with pytest.raises(ValueError, match="all weights of the reward are 0"):
    RAGRewardWeights(0, 0, 0)


def questions(gold, first_slots):
  n = len(gold)
  return SearchBatch(
    indices=np.arange(n), prompts=np.arange(n)[:, None], lengths=np.ones(n, np.int32), questions=np.arange(n)[:, None],
    question_lengths=np.ones(n, np.int32), gold=np.array(gold, np.int32),
    group_ids=np.arange(n, dtype=np.int32), answers=[(f"answer {i}",) for i in range(n)], first_slots=first_slots,
    corpus=None,
  )  # fmt: skip


def test_permuted_questions_want_the_things_of_others_within_their_own_documents():
  # three knowledge bases of 10, 10 and 20 documents
  asked = questions([[1, 9], [13, -1], [20, 25]], first_slots=np.array([0, 10, 20]))
  got = permuted(asked, np.array([2, 0, 1]))
  np.testing.assert_array_equal(got.gold, [[0, 5], [11, 19], [23, -1]])
  assert got.answers == [("answer 2",), ("answer 0",), ("answer 1",)]
  for name in ("prompts", "lengths", "group_ids", "first_slots"):
    np.testing.assert_array_equal(getattr(got, name), getattr(asked, name), err_msg=name)


def test_permuted_questions_over_one_corpus_keep_its_slots():
  got = permuted(questions([[3, 7], [5, -1]], first_slots=np.zeros(2, np.int32)), np.array([1, 0]))
  np.testing.assert_array_equal(got.gold, [[5, -1], [3, 7]])
  assert got.answers == [("answer 1",), ("answer 0",)]

"""Retrieval scores: those of trec_eval on random rankings, and known values on small ones."""

import random

import pytest
import pytrec_eval

from selfrag_jax.metrics.retrieval import (
  all_found,
  compute_retrieval_precision,
  compute_retrieval_recall,
  ndcg,
  reciprocal_rank,
)

IDS = [f"d{i}" for i in range(30)]


def assert_those_of_trec_eval(ranking, grades, run):
  """Compare our scores of a ranking with those that trec_eval has for the run `{id: score}`."""
  measures = {"recall.5,10", "P.5,10", "recip_rank", "ndcg", "ndcg_cut.5,10"}
  expected = pytrec_eval.RelevanceEvaluator({"q": grades}, measures).evaluate({"q": run})["q"]
  for k in (5, 10):
    assert compute_retrieval_recall(ranking, grades, k) == pytest.approx(expected[f"recall_{k}"])
    assert compute_retrieval_precision(ranking, grades, k) == pytest.approx(expected[f"P_{k}"])
    assert ndcg(ranking, grades, k) == pytest.approx(expected[f"ndcg_cut_{k}"])
  assert ndcg(ranking, grades) == pytest.approx(expected["ndcg"])
  assert reciprocal_rank(ranking, grades) == pytest.approx(expected["recip_rank"])


def draw_grades(rng, graded):
  grades = {id: rng.randint(0, 3) if graded else rng.randint(0, 1) for id in rng.sample(IDS, rng.randint(1, 12))}
  grades[rng.choice(IDS)] = 1
  return grades


@pytest.mark.parametrize("graded", [False, True])
def test_scores_are_those_of_trec_eval(graded):
  rng = random.Random(0)
  for _ in range(500):
    grades, ranking = draw_grades(rng, graded), rng.sample(IDS, rng.randint(1, 20))
    assert_those_of_trec_eval(ranking, grades, {id: float(len(ranking) - i) for i, id in enumerate(ranking)})


@pytest.mark.parametrize("graded", [False, True])
def test_of_equal_scores_trec_eval_ranks_the_last_id_first(graded):
  """And 1 and 1 + 1e-8 are equal to it, which computes in float32: rankings of runs must be sorted like this."""
  rng = random.Random(0)
  for _ in range(500):
    grades = draw_grades(rng, graded)
    levels = {id: rng.randint(1, 4) for id in rng.sample(IDS, rng.randint(8, 20))}
    ranking = sorted(levels, key=lambda id: (levels[id], id), reverse=True)
    assert_those_of_trec_eval(ranking, grades, {id: level + 1e-8 * rng.random() for id, level in levels.items()})


def test_all_hops_must_be_found():
  assert all_found(["a", "x", "b"], ["a", "b"], 3) == 1
  assert all_found(["a", "x", "b"], ["a", "b"], 2) == 0
  assert all_found([], ["a"]) == 0


def test_an_id_counts_once():
  assert compute_retrieval_precision(["a", "a", "b", "b"], ["a"]) == 0.5
  assert ndcg(["x", "a", "a"], ["a"]) == ndcg(["x", "a"], ["a"])


def test_short_rankings_and_cut_offs():
  assert reciprocal_rank(["x", "y", "a"], ["a"], 2) == 0
  assert compute_retrieval_precision([], ["a"]) == 0
  assert compute_retrieval_recall(["a"], ["a", "b"], 10) == 0.5


@pytest.mark.parametrize(
  "score", [all_found, compute_retrieval_precision, compute_retrieval_recall, ndcg, reciprocal_rank]
)
def test_what_has_no_score_is_refused(score):
  for relevant in ([], {"a": 0}):
    with pytest.raises(ValueError, match="no document is relevant"):
      score(["a"], relevant)
  with pytest.raises(ValueError, match="k = 0"):
    score(["a"], ["a"], 0)

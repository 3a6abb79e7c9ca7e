"""Curves over depth with known shapes: each number has its known value, and intervals cover at their rate."""

import numpy as np
import pytest
from scipy import stats

from selfrag_jax.metrics.position import compare, describe, homogeneity, shape, spread, u_shape


def draw(accuracy, n, seed=0):
  """Answers of n questions at each depth, right with the given probability."""
  return np.random.default_rng(seed).random((n, len(accuracy))) < np.asarray(accuracy)


@pytest.mark.parametrize(
  ("accuracy", "expected"),
  [
    ([0.7] * 16, 0.0),
    ([1, 1, *[0] * 12, 1, 1], 1.0),
    ([0, 0, *[1] * 12, 0, 0], -1.0),
    (np.linspace(0, 1, 16), 0.0),  # a slope is no U
    ([1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 1], 0.5),
    ([1, 0, 0, 0.5], 0.75),
  ],
)
def test_u_is_edges_minus_middle(accuracy, expected):
  assert u_shape(accuracy) == pytest.approx(expected)


@pytest.mark.parametrize(
  ("accuracy", "interval", "name"),
  [
    ([0.9, 0.9, *[0.5] * 12, 0.8, 0.8], (0.2, 0.4), "a U"),
    ([*[0.0] * 14, 1.0, 1.0], (0.3, 0.6), "no U, the last facts alone"),
    ([1.0, 1.0, *[0.1] * 14], (0.3, 0.6), "no U, the first facts alone"),
    ([0.9, 0.9, *[0.8] * 12, 0.9, 0.9], (-0.1, 0.3), "no U that is certain"),
    ([0.5, 0.5, *[0.9] * 12, 0.5, 0.5], (-0.5, -0.3), "no U"),
  ],
)
def test_only_a_curve_with_both_edges_above_the_middle_is_a_u(accuracy, interval, name):
  assert shape(accuracy, interval) == name


def test_a_flat_curve_is_called_flat_only_with_enough_questions():
  accuracy = [0.97] * 16
  many, few = describe(draw(accuracy, 2000)), describe(draw(accuracy, 20))
  assert many["flat"]
  assert not few["flat"]
  assert many["chi2_p"] > 0.01
  assert abs(many["u"]) < 0.02
  assert many["worst"] > 0.95
  assert many["n"] == 2000


def test_a_cliff_is_seen():
  curve = describe(draw([1.0] * 2 + [0.02] * 12 + [1.0] * 2, 200))
  assert curve["u"] > 0.9
  assert curve["u_interval"][0] > 0.9
  assert curve["range"] > 0.9
  assert curve["range_upper"] >= curve["range"]
  assert curve["chi2_p"] < 1e-100
  assert not curve["flat"]
  for (low, high), accuracy in zip(curve["interval_by_depth"], curve["accuracy_by_depth"], strict=True):
    assert low <= accuracy <= high


def test_numbers_of_a_table_worked_by_hand():
  hits = np.array([[1, 1, 0, 1], [1, 0, 0, 1], [1, 0, 0, 1], [1, 0, 0, 0]], bool)
  curve = describe(hits)
  assert curve["accuracy_by_depth"] == [1.0, 0.25, 0.0, 0.75]
  assert spread(hits) == 1.0
  assert curve["u"] == (1.0 + 0.75) / 2 - (0.25 + 0.0) / 2
  # expected counts are 2 right and 2 wrong at each depth: sum of (observed - 2)^2 / 2
  statistic = sum((count - 2) ** 2 / 2 for count in (4, 1, 0, 3, 0, 3, 4, 1))
  assert curve["chi2_p"] == pytest.approx(stats.chi2.sf(statistic, 3))


def test_where_all_answers_agree_nothing_differs():
  for hits in (np.ones((5, 4)), np.zeros((5, 4))):
    assert homogeneity(hits) == 1.0
    assert describe(hits)["range_upper"] == 0.0


def test_the_upper_bound_covers_the_range_of_repeated_experiments():
  accuracy = np.linspace(0.5, 0.9, 8)
  covered = [describe(draw(accuracy, 100, seed), resamples=200)["range_upper"] >= 0.4 for seed in range(100)]
  assert np.mean(covered) > 0.94


def test_pairs_are_compared_as_pairs():
  hits = np.zeros((10, 4), bool)
  hits[:6] = True
  others = np.zeros((10, 4), bool)
  others[6] = True
  result = compare(hits, others)
  assert result["difference"] == 0.5
  assert result["interval"][0] < 0.5 < result["interval"][1]
  assert result["mcnemar_p"] == pytest.approx(2 * stats.binom.cdf(4, 28, 0.5))
  assert result["n"] == 40
  with pytest.raises(ValueError, match="one shape"):
    compare(hits, others[:5])


def test_too_few_depths_are_refused():
  with pytest.raises(ValueError, match="at least 4 depths, got 3"):
    u_shape([1, 0, 1])

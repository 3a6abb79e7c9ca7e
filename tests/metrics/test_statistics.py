"""Intervals and paired tests: they agree with scipy, and intervals have the coverage that they promise."""

import numpy as np
import pytest
from scipy import stats

from selfrag_jax.metrics.statistics import (
  bootstrap_difference,
  bootstrap_interval,
  crossed_interval,
  mcnemar,
  wilson_interval,
)


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (0, 50), (50, 50), (1, 7), (33, 100), (9_731, 10_000)])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_wilson_equals_scipy(successes, n, confidence):
  expected = stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
  interval = wilson_interval(successes, n, confidence)
  np.testing.assert_allclose(interval, (expected.low, expected.high), rtol=1e-12, atol=1e-15)
  assert 0 <= interval.low < interval.high <= 1


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_impossible_counts(successes, n):
  with pytest.raises(ValueError, match=f"successes={successes}, n={n}"):
    wilson_interval(successes, n)


def test_bootstrap_equals_scipy():
  values = np.random.default_rng(0).exponential(size=400)
  for statistic in (np.mean, np.median):
    expected = stats.bootstrap((values,), statistic, n_resamples=4000, method="percentile", rng=1).confidence_interval
    interval = bootstrap_interval(values, statistic, resamples=4000)
    # two Monte Carlo estimates of the same two quantiles
    np.testing.assert_allclose(interval, expected, atol=0.1 * (expected.high - expected.low))


def test_bootstrap_covers_the_mean_as_often_as_it_promises():
  rng = np.random.default_rng(0)
  intervals = [bootstrap_interval(rng.normal(size=60), confidence=0.8, resamples=200, seed=i) for i in range(300)]
  covered = sum(low <= 0 <= high for low, high in intervals)
  assert stats.binomtest(covered, 300, 0.8).pvalue > 1e-3


def test_bootstrap_is_a_function_of_its_seed():
  values = np.arange(20.0)
  assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)


def test_bootstrap_keeps_rows_whole():
  column = np.random.default_rng(0).normal(size=(50, 1))
  rows = np.concatenate([column, column + 1], axis=1)  # the difference of the columns is 1 in every row
  interval = bootstrap_interval(rows, lambda sample: np.ptp(sample.mean(axis=0)))
  np.testing.assert_allclose(interval, (1, 1), atol=1e-12)


def test_crossed_is_the_bootstrap_of_questions_for_runs_that_agree_and_of_runs_for_questions_that_agree():
  values = np.random.default_rng(0).normal(size=60)
  for crossed, plain in (
    (crossed_interval(np.tile(values, (5, 1)), resamples=8000), bootstrap_interval(values, resamples=8000)),
    (crossed_interval(np.tile(values, (5, 1)).T, resamples=8000), bootstrap_interval(values, resamples=8000)),
  ):
    np.testing.assert_allclose(crossed, plain, atol=0.02)


def test_crossed_covers_the_mean_at_least_as_often_as_it_promises_where_questions_alone_do_not():
  rng, crossed, alone = np.random.default_rng(0), 0, 0
  for _ in range(200):
    values = rng.normal(size=(8, 1)) + rng.normal(size=(1, 40)) + rng.normal(size=(8, 40))  # the mean is 0
    low, high = crossed_interval(values, resamples=300)
    crossed += low <= 0 <= high
    low, high = bootstrap_interval(values.T, resamples=300)
    alone += low <= 0 <= high
  assert crossed >= 180
  assert alone < 140


def test_crossed_refuses_what_it_cannot_resample():
  for values in (np.zeros(3), np.zeros((0, 4)), np.zeros((2, 0))):
    with pytest.raises(ValueError, match=r"values \[runs, questions\], got shape"):
      crossed_interval(values)


def test_pairing_sees_a_difference_that_separate_intervals_hide():
  rng = np.random.default_rng(0)
  difficulty = rng.normal(size=100)
  a, b = difficulty + 0.1 + 0.05 * rng.normal(size=100), difficulty
  assert bootstrap_interval(a).low < bootstrap_interval(b).high
  low, high = bootstrap_difference(a, b)
  assert 0 < low < np.mean(a - b) < high
  np.testing.assert_allclose(bootstrap_difference(b, a), (-high, -low), atol=1e-12)
  # for the mean, resampling pairs is resampling differences
  np.testing.assert_allclose((low, high), bootstrap_interval(a - b), atol=1e-12)


def test_bootstrap_refuses_what_it_cannot_resample():
  with pytest.raises(ValueError, match="at least one row"):
    bootstrap_interval([])
  with pytest.raises(ValueError, match=r"\(3,\) and \(2,\)"):
    bootstrap_difference([1, 2, 3], [1, 2])
  with pytest.raises(ValueError, match="at least one row"):
    bootstrap_difference(1.0, 2.0)


@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 1), (5, 0), (3, 3), (3, 4), (2, 11), (100, 140), (1000, 900)])
def test_mcnemar_equals_the_exact_binomial_test(b, c):
  expected = stats.binomtest(b, b + c).pvalue if b + c else 1.0
  np.testing.assert_allclose(mcnemar(b, c), expected, rtol=1e-10)
  assert mcnemar(b, c) == mcnemar(c, b)


def test_mcnemar_refuses_negative_counts():
  with pytest.raises(ValueError, match="b=-1, c=4"):
    mcnemar(-1, 4)

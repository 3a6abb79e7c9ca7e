"""Confidence intervals and paired tests for rates and differences, in numpy, deterministic given the seed."""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Interval(NamedTuple):
  """A confidence interval; both ends belong to it."""

  low: float
  high: float


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> Interval:
  """Bound the rate behind `successes` out of `n` trials (Wilson 1927, score interval without continuity correction).

  Unlike rate +- 2 standard errors it stays in [0, 1] and keeps a width at 0 and at n successes, where evaluations often
  land.
  Raises ValueError unless 0 <= successes <= n and n >= 1.
  """
  if not 0 <= successes <= n or n < 1:
    raise ValueError(f"wilson_interval needs 0 <= successes <= n and n >= 1, got successes={successes}, n={n}")
  z = NormalDist().inv_cdf((1 + confidence) / 2)
  rate = successes / n
  centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
  half_width = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
  # at 0 and n successes one end is exactly 0 or 1; rounding may leave it outside by an ulp
  return Interval(max(0.0, centre - half_width), min(1.0, centre + half_width))


def bootstrap_interval(
  values: ArrayLike,
  statistic: Callable[[np.ndarray], float] = np.mean,
  *,
  confidence: float = 0.95,
  resamples: int = 2000,
  seed: int = 0,
) -> Interval:
  """Bound `statistic(values)` by the percentiles of the statistic over resampled rows (Efron 1979).

  `values` is [n, ...]: rows are drawn with replacement and stay whole, so that measurements of one example stay paired.
  Raises ValueError if there are no rows.
  """
  values = np.asarray(values)
  if not values.ndim or not len(values):
    raise ValueError(f"bootstrap_interval needs an array of at least one row, got shape {values.shape}")
  rng = np.random.default_rng(seed)
  draws = [statistic(values[rng.integers(len(values), size=len(values))]) for _ in range(resamples)]
  low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
  return Interval(float(low), float(high))


def bootstrap_difference(
  a: ArrayLike,
  b: ArrayLike,
  statistic: Callable[[np.ndarray], float] = np.mean,
  *,
  confidence: float = 0.95,
  resamples: int = 2000,
  seed: int = 0,
) -> Interval:
  """Bound `statistic(a) - statistic(b)` of two systems scored on the same examples; rows are resampled together.

  `a` and `b` are [n, ...] of one shape, row i of both from example i. Pairing removes the spread between easy and hard
  examples, which two separate intervals would count twice. Raises ValueError if the shapes differ.
  """
  a, b = np.asarray(a), np.asarray(b)
  if a.shape != b.shape:
    raise ValueError(f"paired scores need one row for each example in both, got shapes {a.shape} and {b.shape}")
  return bootstrap_interval(
    np.stack([a, b], axis=1) if a.ndim else a,
    lambda pairs: statistic(pairs[:, 0]) - statistic(pairs[:, 1]),
    confidence=confidence,
    resamples=resamples,
    seed=seed,
  )


def crossed_interval(
  values_SxN: ArrayLike, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
  """Bound the mean of the values of S runs on the same N questions, over other runs and other questions.

  Runs and questions are resampled independently of each other (Owen 2007, arXiv 0711.3002, "pigeonhole bootstrap"). The
  interval errs on the wide side; resampling questions alone would ignore that other runs differ. Raises ValueError for
  another shape.
  """
  values = np.asarray(values_SxN)
  if values.ndim != 2 or not values.size:
    raise ValueError(f"crossed_interval needs values [runs, questions], got shape {values.shape}")
  rng, (runs, questions) = np.random.default_rng(seed), values.shape
  draw = lambda n: rng.multinomial(n, np.full(n, 1 / n)) / n
  draws = [draw(runs) @ values @ draw(questions) for _ in range(resamples)]
  low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
  return Interval(float(low), float(high))


def mcnemar(b: int, c: int) -> float:
  """Return the exact two-sided p-value of the hypothesis that two systems are right equally often (McNemar 1947).

  Only the first system got `b` examples right, only the second `c`; examples on which both agree do not count. Under
  the null hypothesis b ~ Binomial(b + c, 1/2). No disagreement: 1.0. Raises ValueError for negative counts.
  """
  if b < 0 or c < 0:
    raise ValueError(f"mcnemar counts disagreements, which cannot be negative, got b={b}, c={c}")
  n = b + c
  tail = sum(math.comb(n, i) for i in range(min(b, c) + 1))
  # integers of any size: only the last division rounds; at b == c the two tails share the middle term, hence the min
  return min(1.0, 2 * tail / 2**n)

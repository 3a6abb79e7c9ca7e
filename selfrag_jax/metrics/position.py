"""Statistics of accuracy by the depth of the needed fact: the shape of the curve, with intervals and tests."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from selfrag_jax.metrics.statistics import bootstrap_interval, mcnemar, wilson_interval

FLAT = 0.10  # a curve is called flat only if the upper bound of its range is below this


def parts(accuracy_by_depth: ArrayLike) -> tuple[float, float, float]:
  """Return the mean accuracy of the first eighth of the depths, of the middle half, and of the last eighth.

  Raises ValueError for fewer than 4 depths.
  """
  accuracy = np.asarray(accuracy_by_depth, float)
  n = len(accuracy)
  if n < 4:
    raise ValueError(f"edges and middle take at least 4 depths, got {n}")
  edge, quarter = max(n // 8, 1), n // 4
  first, middle, last = accuracy[:edge].mean(), accuracy[quarter : n - quarter].mean(), accuracy[-edge:].mean()
  return float(first), float(middle), float(last)


def u_shape(accuracy_by_depth: ArrayLike) -> float:
  """Return the mean accuracy of the edges (an eighth of the depths on either side) minus that of the middle half.

  Positive: the middle is lost (Liu et al. 2023, arXiv 2307.03172), or only one edge is good, which `shape` tells apart;
  0 for a flat or a straight line. Raises ValueError for fewer than 4 depths.
  """
  first, middle, last = parts(accuracy_by_depth)
  return (first + last) / 2 - middle


def shape(accuracy_by_depth: ArrayLike, u_interval: Sequence[float]) -> str:
  """Name the shape of a curve by its parts and the interval of its `u_shape`; a U has both edges above the middle."""
  first, middle, last = parts(accuracy_by_depth)
  low, high = u_interval
  if low <= 0:
    return "no U" if high < 0 else "no U that is certain"
  if min(first, last) > middle:
    return "a U"
  return "no U, the last facts alone" if last > first else "no U, the first facts alone"


def spread(hits_NxB: ArrayLike) -> float:
  """Return the range of the accuracy over depths: the best minus the worst."""
  accuracy = np.asarray(hits_NxB, float).mean(axis=0)
  return float(accuracy.max() - accuracy.min())


def homogeneity(hits_NxB: ArrayLike) -> float:
  """Return the p-value of Pearson's chi-square test that all depths are equally accurate; 1.0 if all answers agree."""
  hits = np.asarray(hits_NxB, bool)
  table = np.stack([hits.sum(axis=0), (~hits).sum(axis=0)])
  if (table.sum(axis=1) == 0).any():
    return 1.0
  from scipy import stats  # imports slowly; every launcher imports this module

  return float(stats.chi2_contingency(table, correction=False).pvalue)


def describe(hits_NxB: ArrayLike, *, resamples: int = 2000, seed: int = 0) -> dict[str, Any]:
  """Describe the accuracy curve of N paired questions over B depths; `hits_NxB`, bool [N, B], marks right answers.

  `range_upper` and `u_interval` come from a bootstrap over questions. Rows stay whole, since only the depth of the fact
  differs within a row. `flat` says that `range_upper` is below 0.10.
  """
  hits = np.asarray(hits_NxB, bool)
  n, accuracy = len(hits), hits.mean(axis=0)
  bound = lambda statistic: bootstrap_interval(hits, statistic, resamples=resamples, seed=seed)
  upper = bound(spread).high
  return {
    "accuracy": float(accuracy.mean()),
    "accuracy_by_depth": accuracy.tolist(),
    "interval_by_depth": [list(wilson_interval(int(column.sum()), n)) for column in hits.T],
    "worst": float(accuracy.min()),
    "u": u_shape(accuracy),
    "u_interval": list(bound(lambda rows: u_shape(rows.mean(axis=0)))),
    "range": spread(hits),
    "range_upper": upper,
    "flat": upper < FLAT,
    "chi2_p": homogeneity(hits),
    "n": n,
  }


def compare(hits_NxB: ArrayLike, others_NxB: ArrayLike, *, seed: int = 0) -> dict[str, Any]:
  """Compare two conditions on the same questions: the paired difference with its interval, and McNemar's p-value."""
  a, b = np.asarray(hits_NxB, bool), np.asarray(others_NxB, bool)
  if a.shape != b.shape:
    raise ValueError(f"paired answers need one shape, got {a.shape} and {b.shape}")
  difference = a.astype(float) - b
  return {
    "difference": float(difference.mean()),
    "interval": list(bootstrap_interval(difference, seed=seed)),
    "mcnemar_p": mcnemar(int((a & ~b).sum()), int((b & ~a).sum())),
    "n": a.size,
  }

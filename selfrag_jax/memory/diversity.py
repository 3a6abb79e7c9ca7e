"""Maximal marginal relevance: an order of results by relevance and diversity."""

import numpy as np


def diverse_order(relevance: np.ndarray, redundancy: np.ndarray, k: int) -> list[int]:
  """Choose up to k of N candidates, one at a time, and return their indices (Carbonell & Goldstein 1998).

  relevance [N] and the pairwise redundancy [N, N] come multiplied by their weights. The next candidate is the one with
  the largest difference between its relevance and its largest redundancy to any chosen candidate; ties go to the first.
  """
  order: list[int] = []
  nearest = np.zeros_like(relevance)
  for _ in range(min(k, len(relevance))):
    gain = relevance - nearest
    gain[order] = -np.inf
    best = int(gain.argmax())
    # similarities may be negative, so the first choice sets the bound instead of raising a bound of 0
    nearest = np.maximum(nearest, redundancy[best]) if order else redundancy[best]
    order.append(best)
  return order

"""Maximal marginal relevance: an order of results that are relevant and say different things."""

import numpy as np


def diverse_order(relevance: np.ndarray, redundancy: np.ndarray, k: int) -> list[int]:
  """Choose up to k of N candidates, one at a time, and return their indices (Carbonell & Goldstein 1998).

  relevance [N] and redundancy [N, N], that of each to each, come with their weights. The next one is that whose
  relevance is most above its largest redundancy to one that was chosen before; among equals the first.
  """
  order: list[int] = []
  nearest = np.zeros_like(relevance)
  for _ in range(min(k, len(relevance))):
    gain = relevance - nearest
    gain[order] = -np.inf
    best = int(gain.argmax())
    # similarities may be negative: what is chosen first is the first bound
    nearest = np.maximum(nearest, redundancy[best]) if order else redundancy[best]
    order.append(best)
  return order

"""The NumPy backend for small indices: matrix products find candidates, which are then scored exactly; no JAX."""

import numpy as np

from selfrag_jax.memory.index import VectorIndex
from selfrag_jax.memory.scoring import OVERSAMPLING, Metric, SearchResult, cosine, mask_scores, norm, ordered_dot, pad

_SCORES = 1 << 24  # most scores of one matrix product, and most numbers in its candidate rows: 64 MiB


class NumpyBackend:
  """A backend that scores all valid rows by matrix products."""

  def search(self, index, queries, k, *, allowed, bias, metric) -> SearchResult:
    return search_product(index, queries, k, index.valid if allowed is None else index.valid & allowed, bias, metric)


def search_product(
  index: VectorIndex, queries: np.ndarray, k: int, allowed: np.ndarray, bias: np.ndarray | None, metric: Metric
) -> SearchResult:
  """Score the `allowed` bool[C] rows by matrix products, then rescore the best candidates exactly."""
  slots = np.flatnonzero(allowed)
  if not len(slots):
    return pad(SearchResult(np.zeros((len(queries), 0), np.float32), np.zeros((len(queries), 0), np.int32)), k, np)
  is_head = slots[-1] == len(slots) - 1  # the first rows without a gap: a view instead of a copy
  rows = index.embeddings[: len(slots)] if is_head else index.embeddings[slots]
  count = min(OVERSAMPLING * k, len(slots))
  block = max(_SCORES // max(len(slots), count * rows.shape[1]), 1)  # candidates are whole rows
  results = []
  for start in range(0, len(queries), block):
    part = queries[start : start + block]
    scores = _product(prepared(part, metric), rows)
    if metric == "cosine":
      scores = cosine(scores, index.norms[slots][None, :], np)
    if bias is not None:
      scores += bias[slots][None, :]
    candidates = slots[_largest(scores, count)]
    results.append(rescore(index, candidates, part, k, bias, metric))
  return SearchResult(*(np.concatenate(field) for field in zip(*results, strict=True)))


def prepared(vectors: np.ndarray, metric: Metric) -> np.ndarray:
  """Return vectors f32[N, D] whose inner products are the similarities: for cosine, scaled to norm 1."""
  if metric == "dot":
    return vectors.astype(np.float32)
  norms = norm(np.einsum("nd,nd->n", vectors, vectors))[:, None]
  return vectors / np.where(norms == 0, 1, norms)


def rescore(
  index: VectorIndex, slots: np.ndarray, queries: np.ndarray, k: int, bias: np.ndarray | None, metric: Metric
) -> SearchResult:
  """Score candidate slots int[B, N] (-1 for none) as `search_numpy` does, and return the best k."""
  candidates = index.embeddings[slots]
  scores = ordered_dot(candidates, queries[:, None, :], np)
  if metric == "cosine":
    query_norms, norms = (np.sqrt(ordered_dot(x, x, np)) for x in (queries, candidates))
    scores = cosine(scores, query_norms[:, None] * norms, np)
  if bias is not None:
    scores = scores + bias[slots]
  return best(mask_scores(scores, slots >= 0, np), slots, k)


def best(scores: np.ndarray, slots: np.ndarray, k: int) -> SearchResult:
  """Sort candidates [B, N] by score, ties by slot, and keep the best k."""
  order = np.lexsort((slots, -scores), axis=1)[:, :k]
  result = SearchResult(np.take_along_axis(scores, order, 1), np.take_along_axis(slots, order, 1).astype(np.int32))
  return pad(result, k, np)


def _product(queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
  """Return queries [B, D] @ rows [N, D].T, in blocks that stay in the cache: 2/3 of the time for few queries."""
  blocks = [rows[start : start + 1024] @ queries.T for start in range(0, len(rows), 1024)]
  return np.ascontiguousarray(np.concatenate(blocks).T)


def _largest(scores: np.ndarray, count: int) -> np.ndarray:
  """Return the columns of each row's `count` largest scores [B, N], ascending; ties go to the first columns."""
  least = -np.partition(-scores, count - 1, axis=1)[:, count - 1 : count]
  above, equal = scores > least, scores == least
  chosen = above | (equal & (np.cumsum(equal, axis=1) <= count - above.sum(axis=1, keepdims=True)))
  return np.nonzero(chosen)[1].reshape(len(scores), count)

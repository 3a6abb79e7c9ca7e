"""Search by a ScaNN index that is rebuilt in a thread while the index of vectors goes on changing."""

import concurrent.futures
import importlib.util
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from selfrag_jax.memory.backends.host import best, prepared, rescore, search_product
from selfrag_jax.memory.index import VectorIndex
from selfrag_jax.memory.scoring import OVERSAMPLING, Metric, SearchResult


class _Built(NamedTuple):
  """A ScaNN index of the rows that were valid at a version."""

  searcher: Any
  slots: np.ndarray  # row of the searcher -> slot
  metric: Metric
  version: int


class ScannBackend:
  """A ScaNN index (arXiv 1908.10396) over what was there when it was built, and exact search over what came later.

  It is rebuilt in a thread once a tenth of the store has changed; searches go on with the old index meanwhile. Small
  stores, and searches with a filter or a bias, are exact.
  """

  def __init__(self, smallest: int = 20_000):
    """Build no index for fewer than `smallest` chunks: exact search is about as fast there. Raises ImportError."""
    if importlib.util.find_spec("scann") is None:
      raise ImportError("backend 'scann' needs the package scann, which has wheels for Linux only; use 'exact'")
    self._smallest = smallest
    self._built: _Built | None = None
    self._begun: tuple[Metric | None, int] = None, -1  # metric and version of the build that was begun last
    self._build: concurrent.futures.Future[_Built] | None = None
    self._worker = concurrent.futures.ThreadPoolExecutor(1, "scann")

  def search(self, index, queries, k, *, allowed, bias, metric) -> SearchResult:
    exact = index.valid if allowed is None else index.valid & allowed
    if allowed is None and bias is None:
      self.update(index, metric)
    built = self._built
    if built is None or built.metric != metric or allowed is not None or bias is not None:
      return search_product(index, queries, k, exact, bias, metric)

    count = min(OVERSAMPLING * k, len(built.slots))
    options = {"pre_reorder_num_neighbors": max(100, count)}
    found, distances = built.searcher.search_batched(prepared(queries, metric), count, **options)
    slots, is_later = built.slots[found.astype(np.int64)], index.changed_at > built.version
    gone = is_later[slots] | np.isnan(distances)  # where it has found too few, it pads with NaN
    if np.any((~gone).sum(1) < min(k, len(index))):  # deletions among the best have starved the index
      return search_product(index, queries, k, exact, bias, metric)
    indexed = rescore(index, np.where(gone, -1, slots), queries, k, None, metric)
    later = search_product(index, queries, k, index.valid & is_later, None, metric)
    scores, slots = (np.concatenate(pair, axis=1) for pair in zip(indexed, later, strict=True))
    return best(scores, slots, k)

  def update(self, index: VectorIndex, metric: Metric, *, wait: bool = False) -> None:
    """Begin to build a ScaNN index where it is due, and take one that is finished.

    With `wait`, return when it is done, and raise what building raised; without, a failure is logged, and the next
    attempt comes after as many changes.
    """
    if self._build is None:
      self._begin(index, metric)
    if self._build is None or not (wait or self._build.done()):
      return
    build, self._build = self._build, None
    try:
      self._built = build.result()
    except Exception as error:
      if wait:
        raise
      logging.warning("the ScaNN index could not be built, search stays as it was: %r", error)

  def _begin(self, index: VectorIndex, metric: Metric) -> None:
    begun_metric, begun = self._begun
    is_due = int((index.valid & (index.changed_at > begun)).sum()) > len(index) // 10 or begun_metric != metric
    if len(index) < self._smallest or not is_due:
      return
    slots, version = np.flatnonzero(index.valid).astype(np.int32), index.version
    embeddings = prepared(index.embeddings[slots], metric)  # a copy: the index goes on changing
    self._begun = metric, version
    self._build = self._worker.submit(lambda: _Built(_build_scann(embeddings), slots, metric, version))


def _build_scann(embeddings: np.ndarray) -> Any:
  from scann.scann_ops.py import scann_ops_pybind  # TensorFlow comes with it

  n = len(embeddings)
  leaves = int(np.sqrt(n))
  searched = min(leaves, max(leaves // 5, 50))  # neighbours of an unusual query lie in many leaves
  builder = scann_ops_pybind.builder(embeddings, 10, "dot_product")
  builder = builder.tree(leaves, searched, training_sample_size=min(n, 100_000))
  return builder.score_ah(2, anisotropic_quantization_threshold=0.2).reorder(100).build()

"""The ScaNN backend, which rebuilds its index in a thread while the index of vectors goes on changing."""

import concurrent.futures
import importlib.util
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from selfrag_jax.memory.backends.host import best, prepared, rescore, search_product
from selfrag_jax.memory.index import VectorIndex
from selfrag_jax.memory.scoring import OVERSAMPLING, Metric, SearchResult


class _Built(NamedTuple):
  """A ScaNN index of the rows that were valid at one version."""

  searcher: Any
  slots: np.ndarray  # row of the searcher -> slot
  metric: Metric
  version: int


class ScannBackend:
  """A ScaNN index (arXiv 1908.10396) over the rows of its build time, and exact search over rows added later.

  The ScaNN index is rebuilt in a thread once a tenth of the store has changed; meanwhile searches use the old one.
  Searches of small stores, and searches with a filter or a bias, are exact.
  """

  def __init__(self, smallest: int = 20_000):
    """Build no ScaNN index below `smallest` chunks, where exact search is about as fast.

    Raises ImportError if the package scann is missing.
    """
    if importlib.util.find_spec("scann") is None:
      raise ImportError("backend 'scann' needs the package scann, which has wheels for Linux only; use 'exact'")
    self._smallest = smallest
    self._built: _Built | None = None
    self._begun: tuple[Metric | None, int] = None, -1  # metric and version of the latest build
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
    gone = is_later[slots] | np.isnan(distances)  # if ScaNN finds too few neighbours, it pads with NaN
    if np.any((~gone).sum(1) < min(k, len(index))):  # too many of the best rows were changed since the build
      return search_product(index, queries, k, exact, bias, metric)
    indexed = rescore(index, np.where(gone, -1, slots), queries, k, None, metric)
    later = search_product(index, queries, k, index.valid & is_later, None, metric)
    scores, slots = (np.concatenate(pair, axis=1) for pair in zip(indexed, later, strict=True))
    return best(scores, slots, k)

  def update(self, index: VectorIndex, metric: Metric, *, wait: bool = False) -> None:
    """Begin to build a ScaNN index if one is due, and adopt an index that is finished.

    With `wait`, return when the build is done, and raise its error; without it, log a failed build, and try again after
    another tenth of the store has changed.
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
    embeddings = prepared(index.embeddings[slots], metric)  # a copy, since the index goes on changing
    self._begun = metric, version
    self._build = self._worker.submit(lambda: _Built(_build_scann(embeddings), slots, metric, version))


def _build_scann(embeddings: np.ndarray) -> Any:
  from scann.scann_ops.py import scann_ops_pybind  # this imports TensorFlow

  n = len(embeddings)
  leaves = int(np.sqrt(n))
  searched = min(leaves, max(leaves // 5, 50))  # the neighbours of an unusual query lie in many leaves
  builder = scann_ops_pybind.builder(embeddings, 10, "dot_product")
  builder = builder.tree(leaves, searched, training_sample_size=min(n, 100_000))
  return builder.score_ah(2, anisotropic_quantization_threshold=0.2).reorder(100).build()

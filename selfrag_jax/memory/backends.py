"""How a store searches its rows: numpy, exact or approximate on the devices, or ScaNN on the host."""

import concurrent.futures
import functools
import importlib.util
import os
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from absl import logging

from selfrag_jax.memory.journal import StoreError
from selfrag_jax.memory.scoring import OVERSAMPLING, Metric, SearchResult, cosine, mask_scores, ordered_dot, pad
from selfrag_jax.memory.table import Table
from selfrag_jax.ragged import power_of_two

if TYPE_CHECKING:
  from jax.sharding import Mesh

  from selfrag_jax.memory.state import MemoryState

_SCORES = 1 << 24  # of one matrix product on the host, and numbers of its candidates: 64 MiB


class Backend(Protocol):
  """Finds the best rows. Results are those of `search_numpy`, or close to them if the backend is approximate."""

  def search(
    self,
    table: Table,
    queries: np.ndarray,
    k: int,
    *,
    allowed: np.ndarray | None,
    bias: np.ndarray | None,
    metric: Metric,
  ) -> SearchResult:
    """Find the best for queries f32[B, D] among valid rows that are `allowed` bool[C], with `bias` f32[C] added.

    Results are [B, k], or narrower where k is more than `at_most`.
    """
    ...


def at_most(k: int, table: Table) -> int:
  """Return k, but not far more than there are chunks: few values while a store grows, so few compilations."""
  return min(k, len(table.valid), max(64, power_of_two(len(table.slots))))


class NumpyBackend:
  """One matrix product, then exact scores for the best candidates: the fast path of small stores, without JAX."""

  def search(self, table, queries, k, *, allowed, bias, metric) -> SearchResult:
    table.changed.clear()
    allowed = table.valid if allowed is None else table.valid & allowed
    return _search_product(table, queries, at_most(k, table), allowed, bias, metric)


class DeviceBackend:
  """The memory as arrays on the devices, brought up to date before a search; `approx` uses `jax.lax.approx_max_k`."""

  _BLOCK = 1024  # rows an update: one shape, so one compilation

  def __init__(self, method: str, dtype: str = "float32", mesh: "Mesh | None" = None, axis: str = "data"):
    self._method, self._dtype, self._mesh, self._axis = method, dtype, mesh, axis
    self._state: MemoryState | None = None
    self._process: int | None = None  # that made the state

  def state(self, table: Table) -> "MemoryState":
    """Return the memory with every change made so far. The next change may donate its buffers.

    Raises StoreError in a fork of the process that has used it: JAX would wait for threads that are not there.
    """
    self._process = self._process or os.getpid()
    if self._process != os.getpid():
      raise StoreError(
        "this store was searched with JAX before the process forked, and JAX does not work in a fork: start processes "
        "with the method spawn, or make the store with backend='numpy'"
      )
    state = self._empty(table) if self._state is None else self._state
    C = len(state.valid)
    changed = np.sort(np.fromiter(table.changed, np.int32, len(table.changed)))
    for start in range(0, len(changed), self._BLOCK):
      part = changed[start : start + self._BLOCK]
      slots = np.concatenate([part, C + np.arange(self._BLOCK - len(part), dtype=np.int32)])  # beyond C: ignored
      source = np.where(slots < C, slots, 0)
      state = self._state = _programs().put(  # the old one's buffers are gone
        state,
        slots,
        table.embeddings[source],
        valid=table.valid[source],
        tokens=table.tokens[source],
        lengths=table.lengths[source],
      )
    table.changed.clear()
    self._state = state
    return state

  def _empty(self, table: Table) -> "MemoryState":
    import jax
    import jax.numpy as jnp

    from selfrag_jax.memory.state import init_memory, partition_specs

    (C, D), X = table.embeddings.shape, table.tokens.shape[1]
    shards = self._mesh.shape[self._axis] if self._mesh is not None else 1
    C = -(-C // shards) * shards  # rows beyond the table's are never valid
    state = init_memory(C, D, chunk_tokens=X, dtype=jnp.dtype(self._dtype))
    if self._mesh is None:
      return state
    place = functools.partial(jax.sharding.NamedSharding, self._mesh)
    return jax.device_put(state, jax.tree.map(place, partition_specs(state, self._axis)))

  def search(self, table, queries, k, *, allowed, bias, metric) -> SearchResult:
    state, k = self.state(table), at_most(k, table)
    B, C = len(queries), len(state.valid)
    padded = np.zeros((power_of_two(B), queries.shape[1]), np.float32)  # few shapes, so few compilations
    padded[:B] = queries
    allowed, bias = (None if x is None else np.pad(x, (0, C - len(x))) for x in (allowed, bias))
    result = _programs().search(
      state, padded, allowed, bias, k=k, metric=metric, method=self._method, mesh=self._mesh, axis=self._axis
    )
    return SearchResult(np.asarray(result.scores)[:B], np.asarray(result.slots)[:B])


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
    self._searcher: Any = None
    self._slots = np.zeros(0, np.int32)  # row of the index -> slot
    self._metric: Metric | None = None
    self._fresh = np.zeros(0, bool)  # by slot: changed since the index was taken
    self._begun_metric: Metric | None = None
    self._fresh_for_next = np.zeros(0, bool)  # the same for the index that was begun last
    self._build: concurrent.futures.Future | None = None
    self._worker = concurrent.futures.ThreadPoolExecutor(1, "scann")

  def search(self, table, queries, k, *, allowed, bias, metric) -> SearchResult:
    exact, k = table.valid if allowed is None else table.valid & allowed, at_most(k, table)
    if allowed is None and bias is None:
      self.update(table, metric)
    if self._searcher is None or self._metric != metric or allowed is not None or bias is not None:
      return _search_product(table, queries, k, exact, bias, metric)

    count = min(OVERSAMPLING * k, len(self._slots))
    options = {"pre_reorder_num_neighbors": max(100, count)}
    found, distances = self._searcher.search_batched(_prepared(queries, metric), count, **options)
    slots = self._slots[found.astype(np.int64)]
    gone = self._fresh[slots] | np.isnan(distances)  # where it has found too few, it pads with NaN
    if np.any((~gone).sum(1) < min(k, len(table.slots))):  # deletions among the best have starved the index
      return _search_product(table, queries, k, exact, bias, metric)
    indexed = _rescore(table, np.where(gone, -1, slots), queries, k, None, metric)
    later = _search_product(table, queries, k, table.valid & self._fresh, None, metric)
    scores, slots = (np.concatenate(pair, axis=1) for pair in zip(indexed, later, strict=True))
    return _best(scores, slots, k)

  def update(self, table: Table, metric: Metric, *, wait: bool = False) -> None:
    """Note what has changed, take a finished index, and begin to build one where it is due.

    With `wait`, return when it is done, and raise what building raised; without, a failure is logged, and the next
    attempt comes after as many changes.
    """
    if not len(self._fresh):
      self._fresh, self._fresh_for_next = np.ones((2, len(table.valid)), bool)
    changed = np.fromiter(table.changed, np.int64, len(table.changed))
    self._fresh[changed] = self._fresh_for_next[changed] = True
    table.changed.clear()
    if self._build is None:
      self._begin(table, metric)
    if self._build is None or not (wait or self._build.done()):
      return
    build, self._build = self._build, None
    try:
      self._searcher, self._slots, self._metric = build.result()
    except Exception as error:
      if wait:
        raise
      logging.warning("the ScaNN index could not be built, search stays as it was: %r", error)
    else:
      self._fresh = self._fresh_for_next.copy()

  def _begin(self, table: Table, metric: Metric) -> None:
    size = len(table.slots)
    due = int((table.valid & self._fresh_for_next).sum()) > size // 10 or self._begun_metric != metric
    if size < self._smallest or not due:
      return
    slots = np.flatnonzero(table.valid).astype(np.int32)
    embeddings = _prepared(table.embeddings[slots], metric)  # a copy: the store goes on changing
    self._fresh_for_next[:] = True
    self._fresh_for_next[slots] = False
    self._begun_metric = metric
    self._build = self._worker.submit(lambda: (_build_scann(embeddings), slots, metric))


def make_backend(name: str, dtype: str = "float32", mesh: "Mesh | None" = None) -> Backend:
  """Return the backend called exact, approx, scann or numpy. Raises ValueError for another."""
  if name in ("exact", "approx"):
    return DeviceBackend(name, dtype, mesh)
  if mesh is not None or dtype != "float32":
    raise ValueError(f"backend {name!r} keeps float32 on the host; dtype and mesh belong to 'exact' and 'approx'")
  if name == "scann":
    return ScannBackend()
  if name == "numpy":
    return NumpyBackend()
  raise ValueError(f"unknown backend {name!r}; use exact, approx, scann or numpy")


def _build_scann(embeddings: np.ndarray) -> Any:
  from scann.scann_ops.py import scann_ops_pybind  # TensorFlow comes with it

  n = len(embeddings)
  leaves = int(np.sqrt(n))
  searched = min(leaves, max(leaves // 5, 50))  # neighbours of an unusual query lie in many leaves
  builder = scann_ops_pybind.builder(embeddings, 10, "dot_product")
  builder = builder.tree(leaves, searched, training_sample_size=min(n, 100_000))
  return builder.score_ah(2, anisotropic_quantization_threshold=0.2).reorder(100).build()


def _prepared(vectors: np.ndarray, metric: Metric) -> np.ndarray:
  """Return vectors f32[N, D] whose inner product is the similarity."""
  if metric == "dot":
    return vectors.astype(np.float32)
  norms = np.linalg.norm(vectors, axis=1, keepdims=True)
  return vectors / np.where(norms == 0, 1, norms)


def _search_product(table: Table, queries, k: int, allowed: np.ndarray, bias, metric: Metric) -> SearchResult:
  """Score the rows that are `allowed` by matrix products, then the best candidates exactly."""
  slots = np.flatnonzero(allowed)
  if not len(slots):
    return pad(SearchResult(np.zeros((len(queries), 0), np.float32), np.zeros((len(queries), 0), np.int32)), k, np)
  is_head = slots[-1] == len(slots) - 1  # all rows up to one: no copy
  rows = table.embeddings[: len(slots)] if is_head else table.embeddings[slots]
  count = min(OVERSAMPLING * k, len(slots))
  block = max(_SCORES // max(len(slots), count * rows.shape[1]), 1)  # the candidates of a block are whole rows
  results = []
  for start in range(0, len(queries), block):
    part = queries[start : start + block]
    scores = _product(_prepared(part, metric), rows)
    if metric == "cosine":
      scores = cosine(scores, table.norms[slots][None, :], np)
    if bias is not None:
      scores += bias[slots][None, :]
    best = slots[_largest(scores, count)]
    results.append(_rescore(table, best, part, k, bias, metric))
  return SearchResult(*(np.concatenate(field) for field in zip(*results, strict=True)))


def _product(queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
  """Return queries [B, D] @ rows [N, D].T, in blocks that stay in the cache: for few queries in 2/3 of the time."""
  blocks = [rows[start : start + 1024] @ queries.T for start in range(0, len(rows), 1024)]
  return np.ascontiguousarray(np.concatenate(blocks).T)


def _largest(scores: np.ndarray, count: int) -> np.ndarray:
  """Return the columns of the `count` largest scores [B, N] of each row, in order; among equals the first."""
  least = -np.partition(-scores, count - 1, axis=1)[:, count - 1 : count]
  above, equal = scores > least, scores == least
  chosen = above | (equal & (np.cumsum(equal, axis=1) <= count - above.sum(axis=1, keepdims=True)))
  return np.nonzero(chosen)[1].reshape(len(scores), count)


def _rescore(table: Table, slots: np.ndarray, queries: np.ndarray, k: int, bias, metric: Metric) -> SearchResult:
  """Score candidates int[B, N] (-1 for none) as `search_numpy` does and return the best k."""
  candidates = table.embeddings[slots]
  scores = ordered_dot(candidates, queries[:, None, :], np)
  if metric == "cosine":
    query_norms, norms = (np.sqrt(ordered_dot(x, x, np)) for x in (queries, candidates))
    scores = cosine(scores, query_norms[:, None] * norms, np)
  if bias is not None:
    scores = scores + bias[slots]
  return _best(mask_scores(scores, slots >= 0, np), slots, k)


def _best(scores: np.ndarray, slots: np.ndarray, k: int) -> SearchResult:
  """Sort candidates [B, N] by score and, among equals, slot; keep k."""
  order = np.lexsort((slots, -scores), axis=1)[:, :k]
  best = SearchResult(np.take_along_axis(scores, order, 1), np.take_along_axis(slots, order, 1).astype(np.int32))
  return pad(best, k, np)


@functools.cache
def _programs() -> Any:
  """Return the compiled update and search; JAX is imported by whoever needs them."""
  import types

  import jax

  from selfrag_jax.memory.state import put
  from selfrag_jax.memory.topk import search

  def search_allowed(state, queries, allowed, bias, **options):
    if allowed is not None:
      state = state.replace(valid=state.valid & allowed)
    return search(state, queries, bias=bias, **options)

  return types.SimpleNamespace(
    put=jax.jit(put, donate_argnums=0),
    search=jax.jit(search_allowed, static_argnames=("k", "metric", "method", "mesh", "axis")),
  )

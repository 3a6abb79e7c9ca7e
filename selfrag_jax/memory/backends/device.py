"""The backend that keeps a copy of the index on the devices, and its compiled programs for update and search."""

import functools
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from selfrag_jax.memory.index import VectorIndex
from selfrag_jax.memory.journal import StoreError
from selfrag_jax.memory.scoring import SearchResult
from selfrag_jax.ragged import power_of_two

if TYPE_CHECKING:
  from jax.sharding import Mesh

  from selfrag_jax.memory.state import MemoryRows


class DeviceBackend:
  """A copy of the rows on the devices, updated before each search; `approx` uses `jax.lax.approx_max_k`."""

  _BLOCK = 1024  # rows of one update: one shape, so one compilation

  def __init__(self, method: str, dtype: str = "float32", mesh: "Mesh | None" = None):
    self._method, self._dtype, self._mesh = method, dtype, mesh
    self._rows: MemoryRows | None = None
    self._version = 0  # the index version of the rows
    self._process: int | None = None  # the process that made the rows

  def rows(self, index: VectorIndex) -> "MemoryRows":
    """Return the rows with every change made so far. The next change may donate their buffers.

    Raises StoreError in a fork of the process that made the rows: JAX would wait for threads that the fork lacks.
    """
    self._process = self._process or os.getpid()
    if self._process != os.getpid():
      raise StoreError(
        "this store was searched with JAX before the process forked, and JAX does not work in a fork: start processes "
        "with the method spawn, or make the store with backend='numpy'"
      )
    rows = self._rows
    if rows is None or len(rows.valid) < len(index.valid):  # the index has grown
      rows, self._version = self._empty(index), 0
    C = len(rows.valid)
    changed = index.changed_since(self._version).astype(np.int32)
    for start in range(0, len(changed), self._BLOCK):
      part = changed[start : start + self._BLOCK]
      slots = np.concatenate([part, C + np.arange(self._BLOCK - len(part), dtype=np.int32)])  # >= C: ignored
      source = np.where(slots < C, slots, 0)
      rows = self._rows = _programs().put(  # the buffers of the old rows are donated
        rows,
        slots,
        index.embeddings[source],
        valid=index.valid[source],
        tokens=index.tokens[source],
        lengths=index.lengths[source],
      )
    self._rows, self._version = rows, index.version
    return rows

  def search(self, index, queries, k, *, allowed, bias, metric) -> SearchResult:
    rows = self.rows(index)
    B, C = len(queries), len(rows.valid)
    padded = np.zeros((power_of_two(B), queries.shape[1]), np.float32)  # few shapes, so few compilations
    padded[:B] = queries
    allowed, bias = (None if x is None else np.pad(x, (0, C - len(x))) for x in (allowed, bias))
    result = _programs().search(rows, padded, allowed, bias, k=k, metric=metric, method=self._method, mesh=self._mesh)
    return SearchResult(np.asarray(result.scores)[:B], np.asarray(result.slots)[:B])

  def _empty(self, index: VectorIndex) -> "MemoryRows":
    import jax
    import jax.numpy as jnp

    from selfrag_jax.memory.state import init_rows, partition_specs

    (C, D), X = index.embeddings.shape, index.tokens.shape[1]
    shards = self._mesh.shape["data"] if self._mesh is not None else 1
    C = -(-C // shards) * shards  # the rows added here are never valid
    rows = init_rows(C, D, chunk_tokens=X, dtype=jnp.dtype(self._dtype))
    if self._mesh is None:
      return rows
    place = functools.partial(jax.sharding.NamedSharding, self._mesh)
    return jax.device_put(rows, jax.tree.map(place, partition_specs(rows)))


@functools.cache
def _programs() -> Any:
  """Return the jitted update and search. This imports JAX, which only the device backends need."""
  import types

  import jax

  from selfrag_jax.memory.state import put
  from selfrag_jax.memory.topk import search

  def search_allowed(rows, queries, allowed, bias, **options):
    if allowed is not None:
      rows = rows.replace(valid=rows.valid & allowed)
    return search(rows, queries, bias=bias, **options)

  return types.SimpleNamespace(
    put=jax.jit(put, donate_argnums=0),
    search=jax.jit(search_allowed, static_argnames=("k", "metric", "method", "mesh")),
  )

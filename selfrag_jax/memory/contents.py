"""The base class of a store that reads its chunks: one by id, or all chunks, oldest first."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from selfrag_jax.memory.records import Chunk
from selfrag_jax.memory.store_lock import StoreLock
from selfrag_jax.memory.table import Table


class Contents:
  """Read access to the chunks of a store; everything that is returned is a copy."""

  _table: Table
  _lock: StoreLock

  def __len__(self) -> int:
    with self._lock:
      return len(self._table.records)

  def __contains__(self, id: str) -> bool:
    with self._lock:
      return id in self._table.records

  size = property(__len__, doc="How many chunks there are.")

  @property
  def is_changing(self) -> bool:
    """Whether a change is being made. An exception in the middle, such as that of Ctrl-C, closes the store."""
    return self._lock.is_changing

  @property
  def ids(self) -> list[str]:
    """The ids of the chunks, oldest first; the other properties have the same order."""
    with self._lock:
      return list(self._table.slots)

  @property
  def chunks(self) -> list[str]:
    """The texts of the chunks."""
    with self._lock:
      return [self._table.records[i]["text"] for i in self._table.slots]

  @property
  def token_ids(self) -> list[np.ndarray]:
    """The token ids of each chunk, int32[X]."""
    return [chunk.token_ids for chunk in self._all()]

  @property
  def embeddings(self) -> np.ndarray:
    """The embeddings of the chunks, f32[N, d_model]."""
    with self._lock:
      return self._table.vectors(self._table.slots)

  @property
  def metadata(self) -> list[Mapping[str, Any]]:
    """The metadata of each chunk."""
    return [chunk.metadata for chunk in self._all()]

  def get(self, id: str) -> Chunk:
    """Return a chunk by its id. Raises KeyError."""
    with self._lock:
      if id not in self._table.records:
        raise KeyError(f"no chunk has the id {id!r}")
      return self._table.chunk(id)

  def vectors(self, ids: Iterable[str]) -> np.ndarray:
    """Return the embeddings of chunks by id, f32[N, d_model]. Raises KeyError."""
    with self._lock:
      return self._table.vectors(ids)

  def _all(self) -> list[Chunk]:
    with self._lock:
      return [self._table.chunk(chunk_id) for chunk_id in self._table.slots]

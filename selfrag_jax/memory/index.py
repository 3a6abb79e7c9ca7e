"""An index of vectors on the host: rows by slot, a free list, and versions by which backends follow the changes.

It is a state machine: the same calls in the same order fill the same slots.
"""

import collections
import heapq
from typing import Protocol

import numpy as np

from selfrag_jax.memory.scoring import Metric, SearchResult
from selfrag_jax.ragged import power_of_two

MOST = np.iinfo(np.int32).max  # slots are int32, on the devices too


class Backend(Protocol):
  """Finds the best rows of an index. Results are those of `search_numpy`, or close to them if it is approximate.

  A backend that keeps a copy of the rows remembers which version of the index the copy has.
  """

  def search(self, index: "VectorIndex", queries: np.ndarray, k: int, *, allowed, bias, metric: Metric) -> SearchResult:
    """Find the best k for queries f32[B, D], as `VectorIndex.search` has it; neither it nor the index is empty."""
    ...


class VectorIndex:
  """Vectors by slot, with the token ids that they stand for where there are any. A row counts only where `valid`.

  A new row takes the lowest free slot, or that of the oldest row. `version` counts the changes, and `changed_at` tells
  for each slot which of them was its last. The arrays are to be read, and changed by the methods alone.
  """

  def __init__(self, max_chunks: int, d_model: int, chunk_size: int = 0, *, backend: Backend):
    """Raises ValueError for sizes that are no whole numbers, too small, or more than there is memory for."""
    sizes = {"d_model": (d_model, 1), "max_chunks": (max_chunks, 1), "chunk_size": (chunk_size, 0)}
    for name, (value, least) in sizes.items():
      if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value <= MOST:
        raise ValueError(f"{name} = {value!r} must be a whole number from {least} to {MOST}")
    try:
      self.embeddings = np.zeros((max_chunks, d_model), np.float32)
      self.norms = np.zeros(max_chunks, np.float32)
      self.tokens = np.zeros((max_chunks, chunk_size), np.int32)
      self.lengths = np.zeros(max_chunks, np.int32)
      self.valid = np.zeros(max_chunks, bool)
      self.changed_at = np.zeros(max_chunks, np.int64)
    except (MemoryError, ValueError):
      gib = int(max_chunks) * (int(d_model) + int(chunk_size)) * 4 >> 30
      raise ValueError(
        f"max_chunks = {max_chunks} chunks of d_model = {d_model} and chunk_size = {chunk_size} take {gib:,} GiB, "
        "more than there is; make the store smaller"
      ) from None
    self.backend = backend
    self.version = 0
    self._oldest_first: collections.OrderedDict[int, None] = collections.OrderedDict()  # the valid slots
    self._free: list[int] = []  # a heap of slots below `_unused`
    self._unused = 0

  def __len__(self) -> int:
    return len(self._oldest_first)

  def changed_since(self, version: int) -> np.ndarray:
    """Return the slots, in order, that have changed after a version."""
    return np.flatnonzero(self.changed_at > version) if version < self.version else np.zeros(0, np.int64)

  def add(
    self, embeddings: np.ndarray, tokens: np.ndarray | None = None, lengths: np.ndarray | None = None
  ) -> list[int]:
    """Add rows f32[N, D] with tokens int32[N, X], of which `lengths` int32[N] are real, and return their slots.

    A full index loses its oldest rows, and of a batch larger than the index its first: their slots come again.
    """
    slots, C = self._take(len(embeddings)), len(self.valid)
    if len(slots) <= C:
      self._fill(slots, embeddings, tokens, lengths)
    else:  # no slot comes twice among the last C
      self._fill(slots[-C:], *(None if x is None else x[-C:] for x in (embeddings, tokens, lengths)))
    return slots

  def delete(self, slots: list[int]) -> None:
    """Delete rows. Raises KeyError where there is none."""
    if not slots:
      return
    for slot in slots:
      del self._oldest_first[slot]
      heapq.heappush(self._free, slot)
    self.valid[slots] = False
    self._note_change(slots)

  def restore(self, slots: list[int], embeddings: np.ndarray, tokens: np.ndarray, lengths: np.ndarray) -> None:
    """Fill an empty index with rows, the oldest first, in the slots that they had."""
    self._fill(slots, embeddings, tokens, lengths)
    self._oldest_first.update(dict.fromkeys(slots))
    self._unused = max(slots, default=-1) + 1
    self._free = np.flatnonzero(~self.valid[: self._unused]).tolist()

  def reserve(self, n: int) -> None:
    """Make room for n more rows, a power of two in all if there is too little; every row keeps its slot."""
    if (needed := len(self) + n) > len(self.valid):
      names = ("embeddings", "norms", "tokens", "lengths", "valid", "changed_at")
      vars(self).update({name: _longer(getattr(self, name), power_of_two(needed)) for name in names})

  def search(
    self,
    queries: np.ndarray,
    k: int,
    *,
    allowed: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    metric: Metric = "cosine",
  ) -> SearchResult:
    """Find the k best for queries f32[B, D] among the rows that are `allowed` bool[C], with `bias` f32[C] added.

    Results are [B, k], or narrower where k is far more than there are rows.
    """
    if not len(self) or not len(queries):
      return SearchResult(np.zeros((len(queries), 0), np.float32), np.zeros((len(queries), 0), np.int32))
    k = min(k, len(self.valid), max(64, power_of_two(len(self))))  # few values while it grows, so few compilations
    return self.backend.search(self, queries, k, allowed=allowed, bias=bias, metric=metric)

  def _take(self, n: int) -> list[int]:
    """Return n slots, the lowest free ones and then those of the oldest rows, and make them the newest."""
    taken = []
    for _ in range(n):
      if self._free:
        slot = heapq.heappop(self._free)
      elif self._unused < len(self.valid):
        slot = self._unused
        self._unused += 1
      else:
        slot, _ = self._oldest_first.popitem(last=False)
      self._oldest_first[slot] = None
      taken.append(slot)
    return taken

  def _fill(self, slots: list[int], embeddings, tokens, lengths) -> None:
    at = _block(slots)
    self.embeddings[at] = embeddings
    self.norms[at] = np.sqrt(np.fromiter(map(np.dot, embeddings, embeddings), np.float32, len(slots)))
    self.tokens[at] = 0 if tokens is None else tokens
    self.lengths[at] = 0 if lengths is None else lengths
    self.valid[at] = True
    self._note_change(at)

  def _note_change(self, at: slice | list[int]) -> None:
    self.version += 1
    self.changed_at[at] = self.version


def _block(slots: list[int]) -> slice | list[int]:
  """Return slots as a slice if each follows the one before: numpy writes to a block several times faster."""
  first, end = (slots[0], slots[0] + len(slots)) if slots else (0, 0)
  return slice(first, end) if slots == list(range(first, end)) else slots


def _longer(rows: np.ndarray, size: int) -> np.ndarray:
  """Return rows followed by zeros, `size` in all."""
  longer = np.zeros((size, *rows.shape[1:]), rows.dtype)
  longer[: len(rows)] = rows
  return longer

"""An index of vectors on the host, with rows by slot, a free list, and versions that tell backends what has changed.

The index is a state machine: the same calls in the same order fill the same slots.
"""

import collections
import heapq
from typing import Protocol

import numpy as np

from selfrag_jax.memory.scoring import Metric, SearchResult, norm
from selfrag_jax.ragged import power_of_two

MOST = np.iinfo(np.int32).max  # slots are int32, on the devices too


class Backend(Protocol):
  """A search method for an index. Its results equal those of `search_numpy`, or come close if it is approximate.

  A backend that keeps a copy of the rows remembers the index version of that copy.
  """

  def search(self, index: "VectorIndex", queries: np.ndarray, k: int, *, allowed, bias, metric: Metric) -> SearchResult:
    """Find the k best rows for queries f32[B, D] as `VectorIndex.search` does; queries and index are not empty."""
    ...


class VectorIndex:
  """Vectors by slot, with the token ids of their chunks if there are any. A row counts only where `valid` is True.

  A new row takes the lowest free slot, or the slot of the oldest row if none is free. `version` counts the changes, and
  `changed_at` holds for each slot the version of its last change. Only the methods may change the arrays.
  """

  def __init__(self, max_chunks: int, d_model: int, chunk_size: int = 0, *, backend: Backend):
    """Raises ValueError for sizes that are not whole numbers, are too small, or need more memory than there is."""
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
    self._free: list[int] = []  # a heap of the free slots below `_unused`
    self._unused = 0  # the first slot that was never used

  def __len__(self) -> int:
    return len(self._oldest_first)

  def changed_since(self, version: int) -> np.ndarray:
    """Return the slots, in order, that have changed since a version."""
    return np.flatnonzero(self.changed_at > version) if version < self.version else np.zeros(0, np.int64)

  def add(
    self, embeddings: np.ndarray, tokens: np.ndarray | None = None, lengths: np.ndarray | None = None
  ) -> list[int]:
    """Add rows f32[N, D] with tokens int32[N, X], of which the first `lengths` int32[N] are real; return their slots.

    A full index loses its oldest rows. Of a batch larger than the index only the last C rows stay, and the returned
    list names slots more than once.
    """
    slots, C = self._take(len(embeddings)), len(self.valid)
    # the last C slots are all different
    self._fill(slots[-C:], *(None if x is None else x[-C:] for x in (embeddings, tokens, lengths)))
    return slots

  def delete(self, slots: list[int]) -> None:
    """Delete the rows of slots. Raises KeyError for a slot without a row."""
    if not slots:
      return
    for slot in slots:
      del self._oldest_first[slot]
      heapq.heappush(self._free, slot)
    self.valid[slots] = False
    self._note_change(slots)

  def restore(self, slots: list[int], embeddings: np.ndarray, tokens: np.ndarray, lengths: np.ndarray) -> None:
    """Fill an empty index with rows, oldest first, in their former slots."""
    self._fill(slots, embeddings, tokens, lengths)
    self._oldest_first.update(dict.fromkeys(slots))
    self._unused = max(slots, default=-1) + 1
    self._free = np.flatnonzero(~self.valid[: self._unused]).tolist()

  def reserve(self, n: int) -> None:
    """Make room for n more rows: grow the index to a power of two if it is too small; every row keeps its slot."""
    if (needed := len(self) + n) > len(self.valid):
      more = power_of_two(needed) - len(self.valid)
      longer = lambda rows: np.pad(rows, [(0, more)] + [(0, 0)] * (rows.ndim - 1))
      names = ("embeddings", "norms", "tokens", "lengths", "valid", "changed_at")
      vars(self).update({name: longer(getattr(self, name)) for name in names})

  def search(
    self,
    queries: np.ndarray,
    k: int,
    *,
    allowed: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    metric: Metric = "cosine",
  ) -> SearchResult:
    """Find the k best rows for queries f32[B, D] among the `allowed` bool[C] slots; add `bias` f32[C] to the scores.

    Results are [B, k], or narrower if k is far above the number of rows.
    """
    if not len(self) or not len(queries):
      return SearchResult(np.zeros((len(queries), 0), np.float32), np.zeros((len(queries), 0), np.int32))
    k = min(k, len(self.valid), max(64, power_of_two(len(self))))  # few values of k, so few compilations
    return self.backend.search(self, queries, k, allowed=allowed, bias=bias, metric=metric)

  def _take(self, n: int) -> list[int]:
    """Return n slots, first the lowest free slots, then the slots of the oldest rows, and mark all as the newest."""
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
    self.norms[at] = norm(np.fromiter(map(np.dot, embeddings, embeddings), np.float32, len(slots)))
    self.tokens[at] = 0 if tokens is None else tokens
    self.lengths[at] = 0 if lengths is None else lengths
    self.valid[at] = True
    self._note_change(at)

  def _note_change(self, at: slice | list[int]) -> None:
    self.version += 1
    self.changed_at[at] = self.version


def _block(slots: list[int]) -> slice | list[int]:
  """Return consecutive slots as a slice, which NumPy writes several times faster, and other slots unchanged."""
  first, end = (slots[0], slots[0] + len(slots)) if slots else (0, 0)
  return slice(first, end) if slots == list(range(first, end)) else slots

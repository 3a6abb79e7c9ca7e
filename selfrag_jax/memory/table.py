"""The contents of a store: arrays of fixed size by slot, records by id, and the one function that changes them.

It is a state machine: the same changes in the same order give the same contents, slots included, whether they are made
by a running store or read from its log.
"""

import collections
import heapq
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from selfrag_jax.memory.records import Chunk, Recency, Where, fits


class Change(NamedTuple):
  """What `Table.apply` makes: chunks removed, then chunks added, then counts raised."""

  header: dict[str, Any]  # remove: ids; add: records; count: id -> how many more; added: chunks ever added
  arrays: dict[str, np.ndarray]  # of the chunks added: embeddings f32[N, D], tokens int32[N, X], lengths int32[N]


class Table:
  """Chunks by slot and by id. A row of the arrays means something only where `valid`.

  A new chunk takes the lowest free slot, or that of the oldest chunk. `changed` collects the slots touched, for whoever
  keeps a copy of the arrays; they clear it.
  """

  def __init__(self, max_chunks: int, d_model: int, chunk_size: int):
    self.embeddings = np.zeros((max_chunks, d_model), np.float32)
    self.norms = np.zeros(max_chunks, np.float32)
    self.tokens = np.zeros((max_chunks, chunk_size), np.int32)
    self.lengths = np.zeros(max_chunks, np.int32)
    self.valid = np.zeros(max_chunks, bool)
    self.slots: collections.OrderedDict[str, int] = collections.OrderedDict()  # id -> slot, oldest first
    self.ids: dict[int, str] = {}  # slot -> id
    self.records: dict[str, dict[str, Any]] = {}
    self.keys: dict[str, str] = {}  # key -> id
    self.added = 0  # chunks ever added
    self.changed: set[int] = set()
    self._free: list[int] = []  # a heap of slots below `_unused`
    self._unused = 0

  def apply(self, change: Change) -> None:
    """Make a change."""
    for chunk_id in change.header["remove"]:
      self._remove(chunk_id)
    for i, record in enumerate(change.header["add"]):
      if len(self.slots) == len(self.valid):
        self._remove(next(iter(self.slots)))
      slot = self._take()
      for name in ("embeddings", "tokens", "lengths"):
        getattr(self, name)[slot] = change.arrays[name][i]
      self._put(record, slot)
    for chunk_id, more in change.header["count"].items():
      if chunk_id in self.records:  # else it was the oldest chunk of a full store, and had to go just now
        self.records[chunk_id]["count"] += more
    self.added = change.header["added"]

  def chunk(self, chunk_id: str, score: float | None = None) -> Chunk:
    """Return a chunk that shares no memory with the table."""
    record, slot = self.records[chunk_id], self.slots[chunk_id]
    tokens = self.tokens[slot, : self.lengths[slot]].copy()
    return Chunk(**_copied(record), token_ids=tokens, score=score)

  def fitting(self, where: Where) -> np.ndarray:
    """Return bool[C]: the slots of the chunks whose metadata fits."""
    mask = np.zeros_like(self.valid)
    mask[[self.slots[i] for i, record in self.records.items() if fits(record["metadata"], where)]] = True
    return mask

  def bonus(self, recency: Recency) -> np.ndarray:
    """Return f32[C]: what recency adds to the score of each slot."""
    bias = np.zeros(len(self.valid), np.float32)
    bias[[self.slots[i] for i in self.records]] = recency.bonus(record["metadata"] for record in self.records.values())
    return bias

  def contents(self) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Return the records, oldest first, and the arrays that `restore` takes."""
    slots = np.array(list(self.slots.values()), np.int32)
    arrays = {name: getattr(self, name)[slots] for name in ("embeddings", "tokens", "lengths")}
    return [self.records[chunk_id] for chunk_id in self.slots], {"slots": slots, **arrays}

  def restore(self, records: list[dict[str, Any]], arrays: Mapping[str, np.ndarray], added: int) -> None:
    """Fill an empty table with `contents`, every chunk in the slot that it had."""
    slots = arrays["slots"]
    for name in ("embeddings", "tokens", "lengths"):
      getattr(self, name)[slots] = arrays[name]
    for record, slot in zip(records, slots.tolist(), strict=True):
      self._put(record, slot)
    self.added = added
    self._unused = int(slots.max(initial=-1)) + 1
    self._free = np.flatnonzero(~self.valid[: self._unused]).tolist()

  def _put(self, record: Mapping[str, Any], slot: int) -> None:
    chunk_id, key = record["id"], record["key"]
    self.norms[slot] = np.linalg.norm(self.embeddings[slot])
    self.valid[slot] = True
    self.slots[chunk_id], self.ids[slot], self.records[chunk_id] = slot, chunk_id, _named(record)
    if key is not None:
      self.keys[key] = chunk_id
    self.changed.add(slot)

  def _remove(self, chunk_id: str) -> None:
    slot, record = self.slots.pop(chunk_id), self.records.pop(chunk_id)
    del self.ids[slot]
    if record["key"] is not None:
      del self.keys[record["key"]]
    self.valid[slot] = False
    self.changed.add(slot)
    heapq.heappush(self._free, slot)

  def _take(self) -> int:
    if self._free:
      return heapq.heappop(self._free)
    self._unused += 1
    return self._unused - 1


def _named(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Return fields with names that all records share: JSON makes new ones for each, a third of a record."""
  return {sys.intern(name): _named(value) if isinstance(value, dict) else value for name, value in fields.items()}


def _copied(value: Any) -> Any:
  """Return a copy of what JSON can hold, in a third of the time of `copy.deepcopy`."""
  if isinstance(value, dict):
    return {name: _copied(each) for name, each in value.items()}
  return [_copied(each) for each in value] if isinstance(value, list) else value

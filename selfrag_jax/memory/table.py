"""A table of chunks over an index of their vectors: records by id and by key, and the one function that changes them.

It is a state machine: the same changes in the same order give the same contents, slots included, whether they are made
by a running store or read from its log.
"""

import json
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from selfrag_jax.memory.filters import Where, check_where, predicate
from selfrag_jax.memory.index import VectorIndex
from selfrag_jax.memory.records import DEEPEST, Chunk, Recency

FIELDS = {"id": str, "text": str, "key": (str, type(None)), "count": int, "metadata": dict}  # of a record
COLUMNS = ("embeddings", "tokens", "lengths")  # of the index, as files have them


class Change(NamedTuple):
  """What `Table.apply` makes: chunks removed, then chunks added, then counts raised."""

  header: dict[str, Any]  # remove: ids; add: records; count: id -> how many more; added: chunks ever added
  arrays: dict[str, np.ndarray]  # of the chunks added: embeddings f32[N, D], tokens int32[N, X], lengths int32[N]


class Table:
  """Chunks by id and by slot of the index. The dicts have the oldest chunk first."""

  def __init__(self, index: VectorIndex):
    self.index = index
    self.slots: dict[str, int] = {}  # id -> slot
    self.ids: dict[int, str] = {}  # slot -> id
    self.records: dict[str, dict[str, Any]] = {}
    self.keys: dict[str, str] = {}  # key -> id
    self.added = 0  # chunks ever added

  def apply(self, change: Change) -> None:
    """Make a change."""
    self.index.delete([self._remove(chunk_id) for chunk_id in change.header["remove"]])
    if records := change.header["add"]:
      slots = self.index.add(*(change.arrays[name] for name in COLUMNS))
      for record, slot in zip(records, slots, strict=True):
        if slot in self.ids:  # of the oldest chunk, which a full index has given up
          self._remove(self.ids[slot])
        self._put(record, slot)
    for chunk_id, more in change.header["count"].items():
      if chunk_id in self.records:  # else it was the oldest chunk of a full store, and had to go just now
        self.records[chunk_id]["count"] += more
    self.added = operator.index(change.header["added"])

  def check(self, records: Sequence[Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError unless these are records with arrays as `contents` and a log of this table have them."""
    (C, D), X, n = self.index.embeddings.shape, self.index.tokens.shape[1], len(records)
    for record in records:
      if not (isinstance(record, dict) and record.keys() == FIELDS.keys()):
        raise ValueError(f"a chunk has no {', '.join(FIELDS)}, but {record!r:.80}")
      if wrong := [name for name, kind in FIELDS.items() if not isinstance(record[name], kind)]:
        raise ValueError(f"the {wrong[0]} of chunk {record['id']!r:.80} is of type {type(record[wrong[0]]).__name__}")
    wanted = {"embeddings": ((n, D), np.float32), "tokens": ((n, X), np.int32), "lengths": ((n,), np.int32)}
    for name, want in wanted.items() if n or arrays else ():
      if (arrays[name].shape, arrays[name].dtype) != want:
        raise ValueError(f"{name} are {arrays[name].dtype}{arrays[name].shape}, expected {want}")
    for name, least, most in ("lengths", 0, X), ("slots", 0, C - 1):
      if name in arrays and not ((least <= arrays[name]) & (arrays[name] <= most)).all():
        raise ValueError(f"{name} do not lie between {least} and {most}")

  def chunk(self, chunk_id: str, score: float | None = None) -> Chunk:
    """Return a chunk that shares no memory with the table."""
    record, slot = self.records[chunk_id], self.slots[chunk_id]
    tokens = self.index.tokens[slot, : self.index.lengths[slot]].copy()
    return Chunk(**_copied(record), token_ids=tokens, score=score)

  def vectors(self, ids: Iterable[str]) -> np.ndarray:
    """Return the embeddings of chunks, f32[N, D]."""
    return self.index.embeddings[[self.slots[i] for i in ids]]

  def fitting(self, where: Where) -> np.ndarray:
    """Return bool[C]: the slots of the chunks whose metadata fits. Raises ValueError like `check_where`."""
    check_where(where, (record["metadata"] for record in self.records.values()))
    mask, fits = np.zeros_like(self.index.valid), predicate(where)
    mask[[self.slots[i] for i, record in self.records.items() if fits(record["metadata"])]] = True
    return mask

  def bonus(self, recency: Recency) -> np.ndarray:
    """Return f32[C]: what recency adds to the score of each slot."""
    bias = np.zeros(len(self.index.valid), np.float32)
    bias[[self.slots[i] for i in self.records]] = recency.bonus(record["metadata"] for record in self.records.values())
    return bias

  def contents(self) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Return the records, oldest first, and the arrays that `restore` takes."""
    slots = np.array(list(self.slots.values()), np.int32)
    arrays = {name: getattr(self.index, name)[slots] for name in COLUMNS}
    return [self.records[chunk_id] for chunk_id in self.slots], {"slots": slots, **arrays}

  def restore(self, records: list[dict[str, Any]], arrays: Mapping[str, np.ndarray], added: int) -> None:
    """Fill an empty table with `contents`, every chunk in the slot that it had."""
    self.check(records, arrays)
    slots = arrays["slots"].tolist()
    self.index.restore(slots, *(arrays[name] for name in COLUMNS))
    for record, slot in zip(records, slots, strict=True):
      self._put(record, slot)
    self.added = operator.index(added)

  def _put(self, record: Mapping[str, Any], slot: int) -> None:
    chunk_id, key = record["id"], record["key"]
    if chunk_id in self.records or slot in self.ids or key in self.keys:  # only a file that was tampered with has these
      raise ValueError(f"the id, the slot or the key of chunk {chunk_id!r} is another chunk's")
    self.slots[chunk_id], self.ids[slot], self.records[chunk_id] = slot, chunk_id, _named(record)
    if key is not None:
      self.keys[key] = chunk_id

  def _remove(self, chunk_id: str) -> int:
    """Forget a chunk, and return the slot that it had."""
    slot, record = self.slots.pop(chunk_id), self.records.pop(chunk_id)
    del self.ids[slot]
    if record["key"] is not None:
      del self.keys[record["key"]]
    return slot


def _named(fields: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
  """Return fields with names that all records share: JSON makes new ones for each, a third of a record."""
  nested = lambda value: isinstance(value, dict) and depth < DEEPEST
  return {sys.intern(name): _named(value, depth + 1) if nested(value) else value for name, value in fields.items()}


def _copied(value: Any, depth: int = 0) -> Any:
  """Return a copy of what JSON can hold, in a third of the time of `copy.deepcopy`."""
  if depth > DEEPEST:  # of a store that was written when that was not refused yet
    return json.loads(json.dumps(value))
  if isinstance(value, dict):
    return {name: _copied(each, depth + 1) for name, each in value.items()}
  return [_copied(each, depth + 1) for each in value] if isinstance(value, list) else value

"""A table of chunks over an index of their vectors, with records by id and by key; one function makes all changes.

The table is a state machine: the same changes in the same order give the same contents, slots included, whether a
running store makes them or they are read from its log.
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

FIELDS = {"id": str, "text": str, "key": (str, type(None)), "count": int, "metadata": dict}  # the fields of a record
COLUMNS = ("embeddings", "tokens", "lengths")  # the arrays of the index that files keep


class Change(NamedTuple):
  """A change of a table: `Table.apply` removes chunks, then adds chunks, then raises counts."""

  header: dict[str, Any]  # remove: ids; add: records; count: id -> increase; added: number of chunks ever added
  arrays: dict[str, np.ndarray]  # for the added chunks: embeddings f32[N, D], tokens int32[N, X], lengths int32[N]


class Table:
  """Chunks by id and by slot of the index. The dicts are ordered from the oldest chunk to the newest."""

  def __init__(self, index: VectorIndex):
    self.index = index
    self.slots: dict[str, int] = {}  # id -> slot
    self.ids: dict[int, str] = {}  # slot -> id
    self.records: dict[str, dict[str, Any]] = {}
    self.keys: dict[str, str] = {}  # key -> id
    self.added = 0  # number of chunks ever added

  def apply(self, change: Change) -> None:
    """Make a change."""
    self.index.delete([self._remove(chunk_id) for chunk_id in change.header["remove"]])
    if records := change.header["add"]:
      slots = self.index.add(*(change.arrays[name] for name in COLUMNS))
      for record, slot in zip(records, slots, strict=True):
        if slot in self.ids:  # the slot of the oldest chunk, which a full index gives up
          self._remove(self.ids[slot])
        self._put(record, slot)
    for chunk_id, more in change.header["count"].items():
      if chunk_id in self.records:  # else it was the oldest chunk of a full store, and this change removed it
        self.records[chunk_id]["count"] += more
    self.added = operator.index(change.header["added"])

  def check(self, records: Sequence[Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError unless records and arrays have the fields, shapes and dtypes that this table writes."""
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
    """Return the embeddings of chunks by id, f32[N, D]. Raises KeyError."""
    return self.index.embeddings[[self.slots[i] for i in ids]]

  def fitting(self, where: Where) -> np.ndarray:
    """Return bool[C], True for the slots of chunks whose metadata matches. Raises ValueError like `check_where`."""
    check_where(where, (record["metadata"] for record in self.records.values()))
    mask, fits = np.zeros_like(self.index.valid), predicate(where)
    mask[[self.slots[i] for i, record in self.records.items() if fits(record["metadata"])]] = True
    return mask

  def bonus(self, recency: Recency) -> np.ndarray:
    """Return f32[C], the recency bonus of each slot. Raises ValueError for anything but a `Recency`."""
    if not isinstance(recency, Recency):
      raise ValueError(f"recency = {recency!r}; give a Recency, or None for no bonus")
    bias = np.zeros(len(self.index.valid), np.float32)
    bias[[self.slots[i] for i in self.records]] = recency.bonus(record["metadata"] for record in self.records.values())
    return bias

  def contents(self) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Return the records, oldest first, and the arrays that `restore` takes."""
    slots = np.array(list(self.slots.values()), np.int32)
    arrays = {name: getattr(self.index, name)[slots] for name in COLUMNS}
    return [self.records[chunk_id] for chunk_id in self.slots], {"slots": slots, **arrays}

  def restore(self, records: list[dict[str, Any]], arrays: Mapping[str, np.ndarray], added: int) -> None:
    """Fill an empty table with `contents`, every chunk in its former slot."""
    self.check(records, arrays)
    slots = arrays["slots"].tolist()
    self.index.restore(slots, *(arrays[name] for name in COLUMNS))
    for record, slot in zip(records, slots, strict=True):
      self._put(record, slot)
    self.added = operator.index(added)

  def _put(self, record: Mapping[str, Any], slot: int) -> None:
    chunk_id, key = record["id"], record["key"]
    if chunk_id in self.records or slot in self.ids or key in self.keys:  # only in a file that was tampered with
      raise ValueError(f"the id, the slot or the key of chunk {chunk_id!r} is another chunk's")
    self.slots[chunk_id], self.ids[slot], self.records[chunk_id] = slot, chunk_id, _interned(record)
    if key is not None:
      self.keys[key] = chunk_id

  def _remove(self, chunk_id: str) -> int:
    """Forget a chunk and return its former slot."""
    slot, record = self.slots.pop(chunk_id), self.records.pop(chunk_id)
    del self.ids[slot]
    if record["key"] is not None:
      del self.keys[record["key"]]
    return slot


def _interned(fields: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
  """Return fields with interned names: JSON makes new strings for every record, a third of its size."""
  nested = lambda value: isinstance(value, dict) and depth < DEEPEST
  return {sys.intern(name): _interned(value, depth + 1) if nested(value) else value for name, value in fields.items()}


def _copied(value: Any, depth: int = 0) -> Any:
  """Return a copy of a JSON value, in a third of the time of `copy.deepcopy`."""
  if depth > DEEPEST:  # an earlier version, which did not refuse deep metadata, wrote this store
    return json.loads(json.dumps(value))
  if isinstance(value, dict):
    return {name: _copied(each, depth + 1) for name, each in value.items()}
  return [_copied(each, depth + 1) for each in value] if isinstance(value, list) else value

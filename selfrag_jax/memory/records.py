"""What a store keeps of a chunk beside its embedding, and what it refuses to keep."""

import dataclasses
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Where = Mapping[str, Any] | Callable[[Mapping[str, Any]], bool]


@dataclasses.dataclass(frozen=True)
class Chunk:
  """One chunk of the store, as it was when it was returned."""

  id: str
  text: str
  token_ids: np.ndarray  # int32[X]
  metadata: Mapping[str, Any]  # position, timestamp, source, and what was given
  key: str | None  # of several chunks with one key the newest is kept
  count: int  # how often it was added, near duplicates counted
  score: float | None = None  # of the search that found it: similarity plus recency


@dataclasses.dataclass(frozen=True)
class Recency:
  """What newer chunks gain in a search: `weight` for the newest, half of it for each `half_life` that one is older.

  `field` is a number in the metadata: `timestamp` (seconds), `position` (chunks), or the user's own.
  """

  weight: float
  half_life: float
  field: str = "timestamp"

  def __post_init__(self):
    if not self.half_life > 0:
      raise ValueError(f"half_life = {self.half_life} must be above 0, in the unit of {self.field!r}")

  def bonus(self, metadata: Iterable[Mapping[str, Any]]) -> np.ndarray:
    """Return what each chunk gains, f32[N]. Raises ValueError if one has no such number."""
    try:
      values = np.array([record[self.field] for record in metadata], np.float64)
    except (KeyError, TypeError, ValueError):
      values = np.array([np.nan])
    if not np.isfinite(values).all():
      raise ValueError(f"recency needs a number {self.field!r} in the metadata of every chunk")
    age = values.max(initial=-np.inf) - values
    return (self.weight * 0.5 ** (age / self.half_life)).astype(np.float32)


def fits(metadata: Mapping[str, Any], where: Where) -> bool:
  """Tell whether metadata equals the mapping (or one of its lists and sets), or passes the function."""
  if callable(where):
    return bool(where(metadata))
  missing = object()
  for name, wanted in where.items():
    value = metadata.get(name, missing)
    options = wanted if isinstance(wanted, (list, tuple, set, frozenset)) else (wanted,)
    if not any(value == option for option in options):
      return False
  return True


def make_records(
  texts: Sequence[str],
  metadata: Sequence[Mapping[str, Any]] | None,
  ids: Sequence[str] | None,
  keys: Sequence[str | None] | None,
  *,
  taken: Collection[str],
  position: int,
) -> list[dict[str, Any]]:
  """Check what is to be added and return a record of each chunk, as JSON holds it.

  `taken` are the ids in use, `position` that of the first chunk. Raises ValueError, naming the chunk.
  """
  for name, values in (("metadata", metadata), ("ids", ids), ("keys", keys)):
    if values is not None and len(values) != len(texts):
      raise ValueError(f"{len(values)} {name} for {len(texts)} texts: give one for each")
  records, seen, now = [], set(), time.time()
  for i, text in enumerate(texts):
    if not isinstance(text, str) or not text.strip():
      raise ValueError(f"chunk {i} has no text ({text!r}); leave it out")
    chunk_id = _free_id(position + i, taken) if ids is None else ids[i]
    if not isinstance(chunk_id, str) or not chunk_id:
      raise ValueError(f"the id of chunk {i} is {chunk_id!r}; ids are texts that are not empty")
    if chunk_id in taken or chunk_id in seen:
      raise ValueError(f"the id {chunk_id!r} of chunk {i} is taken; update() changes a chunk, delete() removes it")
    seen.add(chunk_id)
    given = dict(metadata[i]) if metadata is not None else {}
    full = {"position": position + i, "timestamp": now, "source": "", **given}
    key = keys[i] if keys is not None else None
    if key is not None and not isinstance(key, str):
      raise ValueError(f"the key of chunk {i} is {key!r}; keys are texts")
    records.append({"id": chunk_id, "text": text, "key": key, "count": 1, "metadata": _plain(full, i)})
  return records


def token_rows(
  token_ids: Sequence[Sequence[int] | np.ndarray] | None, count: int, chunk_size: int
) -> tuple[np.ndarray, np.ndarray]:
  """Pad the token ids of N = `count` chunks: int32[N, chunk_size], lengths int32[N]. ValueError if one is too long."""
  tokens, lengths = np.zeros((count, chunk_size), np.int32), np.zeros(count, np.int32)
  if token_ids is None:
    return tokens, lengths
  if len(token_ids) != count:
    raise ValueError(f"{len(token_ids)} token_ids for {count} texts: give one list for each")
  for i, row in enumerate(token_ids):
    if len(row) > chunk_size:
      raise ValueError(
        f"chunk {i} has {len(row)} tokens, chunk_size is {chunk_size}; split it, or make a store for more"
      )
    tokens[i, : len(row)] = row
    lengths[i] = len(row)
  return tokens, lengths


def check_rows(vectors: Any, count: int, width: int) -> np.ndarray:
  """Return embeddings as f32 [count, width]. Raises ValueError for another shape, NaN or infinity."""
  rows = np.asarray(vectors, np.float32)
  if rows.shape != (count, width):
    raise ValueError(f"embeddings have shape {rows.shape}, expected {(count, width)}: embed with the store's encoder")
  if not np.isfinite(rows).all():
    raise ValueError(f"embedding {int(np.flatnonzero(~np.isfinite(rows).all(1))[0])} has NaN or infinity")
  return rows


def _free_id(position: int, taken: Collection[str]) -> str:
  """Return the position as an id, told apart from ids that the user gave."""
  chunk_id = str(position)
  while chunk_id in taken:
    chunk_id += "'"
  return chunk_id


def _plain(metadata: dict[str, Any], i: int) -> dict[str, Any]:
  """Return metadata as it will be read back. Raises ValueError for what JSON cannot hold."""
  try:
    plain = json.loads(json.dumps(metadata, allow_nan=False))
  except (TypeError, ValueError) as error:
    raise ValueError(f"the metadata of chunk {i} cannot be written as JSON: {error}") from None
  if list(plain) != list(metadata):
    raise ValueError(f"the metadata of chunk {i} has names that are not texts: {list(metadata)}")
  return plain

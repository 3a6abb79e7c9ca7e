"""The records that a store keeps of its chunks beside their embeddings, and the checks of their values."""

import dataclasses
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from selfrag_jax.checked import LARGEST_FLOAT
from selfrag_jax.ragged import pad_rows

DEEPEST = 64  # levels of nested metadata: far below Python's recursion limit, which would stop the reading of a log
_LONGEST_INT = 2048  # bits; every Python can read that many digits, `sys.set_int_max_str_digits` may forbid more
_LAST_TOKEN = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Chunk:
  """One chunk of a store: a copy that later changes of the store do not affect."""

  id: str
  text: str
  token_ids: np.ndarray  # int32[X]
  metadata: Mapping[str, Any]  # position, timestamp, source, and the caller's values
  key: str | None  # a store keeps only the newest chunk with a key
  count: int  # how often the chunk was added, near duplicates included
  score: float | None = None  # the score in the search that found it: similarity plus recency


@dataclasses.dataclass(frozen=True)
class Recency:
  """A bonus for newer chunks in a search: `weight` for the newest chunk, halved for every `half_life` of age.

  `field` names a number in the metadata: `timestamp` (seconds), `position` (chunks), or a field of the user's own.
  """

  weight: float
  half_life: float
  field: str = "timestamp"

  def __post_init__(self):
    if not _is_float(self.weight) or abs(self.weight) > LARGEST_FLOAT:
      raise ValueError(f"the weight of recency is {self.weight!r:.40}; give a finite number that float32 holds")
    if not _is_float(self.half_life) or not self.half_life > 0:
      raise ValueError(f"half_life = {self.half_life!r:.40} must be above 0, in the unit of {self.field!r}")

  def bonus(self, metadata: Iterable[Mapping[str, Any]]) -> np.ndarray:
    """Return the bonus of each chunk, f32[N]. Raises ValueError if a chunk has no number in `field`."""
    try:
      values = np.array([record[self.field] for record in metadata], np.float64)
    except (KeyError, TypeError, ValueError, OverflowError):
      values = np.array([np.nan])
    if not np.isfinite(values).all():
      raise ValueError(f"recency needs a number {self.field!r} that float64 holds in the metadata of every chunk")
    with np.errstate(over="ignore"):  # the bonus of an infinite age is 0
      age = values.max(initial=-np.inf) - values
      return (self.weight * 0.5 ** (age / self.half_life)).astype(np.float32)


def make_records(
  texts: Sequence[str],
  metadata: Sequence[Mapping[str, Any]] | None,
  ids: Sequence[str] | None,
  keys: Sequence[str | None] | None,
  *,
  taken: Collection[str],
  position: int,
) -> list[dict[str, Any]]:
  """Check the values of new chunks and return a record for each chunk, made of JSON values only.

  `taken` holds the ids in use; `position` is the position of the first chunk. Raises ValueError, naming the chunk.
  """
  for name, values in (("texts", texts), ("metadata", metadata), ("ids", ids), ("keys", keys)):
    if isinstance(values, (str, bytes, Mapping)):
      raise ValueError(f"{name} are {type(values).__name__}; give a list of them, one for each chunk")
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
    key = keys[i] if keys is not None else None
    if key is not None and not isinstance(key, str):
      raise ValueError(f"the key of chunk {i} is {key!r}; keys are texts")
    for name, value in (("text", text), ("id", chunk_id), ("key", key or "")):
      if problem := _not_unicode(value):
        raise ValueError(f"the {name} of chunk {i} {problem}")
    given = {} if metadata is None else check_metadata(metadata[i], f"chunk {i}")
    try:
      full = _plain({"position": position + i, "timestamp": now, "source": "", **given})
    except ValueError as error:
      raise ValueError(f"the metadata of chunk {i} cannot be written as JSON: {error}") from None
    records.append({"id": chunk_id, "text": text, "key": key, "count": 1, "metadata": full})
  return records


def token_rows(
  token_ids: Sequence[Sequence[int] | np.ndarray] | None, count: int, chunk_size: int
) -> tuple[np.ndarray, np.ndarray]:
  """Pad the token ids of N = `count` chunks: int32[N, chunk_size], lengths int32[N].

  Raises ValueError for a chunk with too many ids, and for ids that are not whole numbers from 0 to the largest int32.
  """
  token_ids = [()] * count if token_ids is None else token_ids
  if len(token_ids) != count:
    raise ValueError(f"{len(token_ids)} token_ids for {count} texts: give one list for each")
  rows: list[Any] = []
  for i, row in enumerate(token_ids):
    try:
      ids = np.asarray(row) if len(row) else np.zeros(0, np.int32)  # NumPy makes an empty list an array of floats
    except (TypeError, ValueError, OverflowError):
      ids = np.zeros((), object)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
      raise ValueError(f"the token_ids of chunk {i} are no list of whole numbers; give those of a tokenizer")
    if len(ids) and (ids.min() < 0 or ids.max() > _LAST_TOKEN):
      wrong = ids.min() if ids.min() < 0 else ids.max()
      raise ValueError(f"chunk {i} has the token id {wrong}; ids of a tokenizer lie between 0 and {_LAST_TOKEN}")
    if len(ids) > chunk_size:
      raise ValueError(
        f"chunk {i} has {len(ids)} tokens, chunk_size is {chunk_size}; split it, or make a store for more"
      )
    rows.append(ids)
  return pad_rows(rows, chunk_size)


def check_rows(vectors: Any, count: int | None, width: int) -> np.ndarray:
  """Return embeddings as f32 [count, width], or with any number of rows if `count` is None.

  Raises ValueError for another shape, for values that are not real numbers, for NaN and infinity, and for rows whose
  squared norm overflows float32.
  """
  try:
    given = np.asarray(vectors)
    if given.dtype.kind in "cmMSUO":
      raise TypeError(f"these are of type {given.dtype}")
    with np.errstate(over="ignore"):
      rows = given.astype(np.float32)
  except (TypeError, ValueError) as error:
    raise ValueError(f"embeddings must be rows of {width} real numbers: {error}") from None
  expected = (len(rows) if count is None and rows.ndim else count, width)
  if rows.shape != expected:
    raise ValueError(f"embeddings have shape {rows.shape}, expected {expected}: embed with the store's encoder")
  if not np.isfinite(rows).all():
    raise ValueError(f"embedding {int(np.flatnonzero(~np.isfinite(rows).all(1))[0])} has NaN or infinity")
  with np.errstate(over="ignore"):
    too_long = ~np.isfinite(np.einsum("nd,nd->n", rows, rows))
  if too_long.any():
    raise ValueError(f"embedding {int(np.flatnonzero(too_long)[0])} is so long that float32 cannot hold its square")
  return rows


def check_metadata(metadata: Any, whose: str) -> Mapping[str, Any]:
  """Return metadata unchanged. Raises ValueError unless it is a mapping."""
  if not isinstance(metadata, Mapping):
    raise ValueError(f"the metadata of {whose} is of type {type(metadata).__name__}; give names with values, as a dict")
  return metadata


def check_score(name: str, value: float | None) -> None:
  """Raise ValueError for a threshold that is not a number: every comparison with NaN is false."""
  is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
  if value is not None and not (is_number and value == value):
    raise ValueError(f"{name} = {value!r}; give a number, or None for no threshold")


def _is_float(value: Any) -> bool:
  """Tell whether a value is a number that float64 can hold, infinity included; NaN is not."""
  try:
    return not isinstance(value, (str, bool)) and not math.isnan(value)
  except (TypeError, OverflowError):
    return False


def _free_id(position: int, taken: Collection[str]) -> str:
  """Return the position as an id, with apostrophes added until it differs from all taken ids."""
  chunk_id = str(position)
  while chunk_id in taken:
    chunk_id += "'"
  return chunk_id


def _not_unicode(text: str) -> str | None:
  """Say what is wrong with a text that UTF-8 cannot hold; return None for any other text."""
  try:
    text.encode()
  except UnicodeEncodeError as error:
    return f"has half of a surrogate pair at {error.start} ({text[error.start]!r}), which is no character: {text!a:.80}"
  return None


def _plain(value: Any, depth: int = 0) -> Any:
  """Return a value as JSON would read it back. Raises ValueError for a value that JSON cannot hold, or would change."""
  if value is None or isinstance(value, bool):
    return value
  if isinstance(value, str):
    if problem := _not_unicode(value):
      raise ValueError(f"a text {problem}")
    return str.__str__(value)  # a member of a str enumeration becomes its value, as in JSON
  if isinstance(value, int):
    if value.bit_length() > _LONGEST_INT:
      raise ValueError(f"a whole number of more than {_LONGEST_INT} bits; store it as a text")
    return int(value)
  if isinstance(value, float):
    if not math.isfinite(value):
      raise ValueError(f"the number {value}; leave it out, or store None")
    return float(value)
  if depth == DEEPEST:
    raise ValueError(f"it is nested more than {DEEPEST} deep")
  if isinstance(value, Mapping):
    if others := [name for name in value if not isinstance(name, str)]:
      raise ValueError(f"it has names that are not texts, such as one of type {type(others[0]).__name__}")
    return {_plain(name): _plain(each, depth + 1) for name, each in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(each, depth + 1) for each in value]
  raise ValueError(f"JSON has no {type(value).__name__}")

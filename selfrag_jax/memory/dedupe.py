"""The detection of new chunks that nearly repeat a chunk of the store or of the same batch."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from selfrag_jax.checked import LARGEST_FLOAT
from selfrag_jax.memory.scoring import cosine, norm
from selfrag_jax.memory.table import Table

SIMILARITIES = 2**22  # computed at once
CANDIDATES = 4  # nearest chunks that are tried first if a metadata field must agree too


def near_duplicates(
  table: Table,
  rows: np.ndarray,
  records: Sequence[Mapping[str, Any]],
  superseded: AbstractSet[str],
  threshold: float | None,
  within: str | None = None,
) -> list[str | None]:
  """Return for each new chunk the id of the chunk that it repeats, or None: an old chunk, or an earlier new one.

  rows f32 [N, D] are the embeddings of `records`. A chunk repeats another if their cosine is at least `threshold`
  (None: no chunk repeats another) and, with `within`, if their metadata agrees in that field. A chunk with a key never
  repeats another chunk.
  """
  if threshold is None:
    return [None] * len(rows)
  threshold = max(threshold, -LARGEST_FLOAT)  # -inf would count missing results
  value_of = lambda record: None if within is None else record["metadata"].get(within)
  values = [value_of(record) for record in records]
  is_keyed = np.array([record["key"] is not None for record in records])
  allowed = _kept_slots(table, len(rows), superseded)
  k = 1 if within is None else CANDIDATES
  old = table.index.search(rows, k, allowed=allowed)
  slots, scores = np.asarray(old.slots), np.asarray(old.scores)
  same_as: list[str | None] = [None] * len(rows)
  for i in np.flatnonzero(~is_keyed):
    near = [table.ids[slot] for slot, score in zip(slots[i].tolist(), scores[i], strict=True) if score >= threshold]
    same_as[i] = next((id for id in near if value_of(table.records[id]) == values[i]), None)
    if same_as[i] is None and within is not None and len(near) == k:  # a chunk that agrees may rank below these k
      fitting = table.fitting({within: values[i]}) & (True if allowed is None else allowed)
      best = table.index.search(rows[i : i + 1], 1, allowed=fitting)
      same_as[i] = table.ids[int(best.slots[0, 0])] if best.scores[0, 0] >= threshold else None
  is_old = np.array([same is not None for same in same_as])
  for value in dict.fromkeys(values):
    fits = np.array([own == value for own in values])
    for i, first in enumerate(repeats(rows, threshold, is_old | is_keyed | ~fits)):
      if first is not None:
        same_as[i] = records[first]["id"]
  return same_as


def _kept_slots(table: Table, n: int, superseded: AbstractSet[str]) -> np.ndarray | None:
  """Return bool[C], the slots that a change which adds n chunks does not clear; None if it clears none.

  The change removes superseded chunks, and the oldest chunks if it needs room: no new chunk may count as their repeat.
  """
  room = len(table.index.valid) - n
  if not superseded and len(table.slots) <= room:
    return None
  stay = [slot for chunk_id, slot in table.slots.items() if chunk_id not in superseded]
  allowed = np.zeros_like(table.index.valid)
  allowed[stay[max(len(stay) - room, 0) :]] = True
  return allowed


def repeats(rows: np.ndarray, threshold: float, exempt: np.ndarray) -> list[int | None]:
  """Return for each row f32[N, D] the first earlier row whose cosine with it is at least `threshold`, or None.

  An `exempt` bool[N] row repeats no row, and no row repeats it; no row repeats a row that itself repeats another.
  """
  norms = norm(np.einsum("nd,nd->n", rows, rows))
  firsts: list[int | None] = []
  is_first = ~exempt
  block = max(1, SIMILARITIES // max(len(rows), 1))  # all similarities together would take N x N numbers
  for start in range(0, len(rows), block):
    some = slice(start, start + block)
    before = slice(0, min(some.stop, len(rows)))
    similar = cosine(rows[some] @ rows[before].T, norms[some, None] * norms[None, before], np) >= threshold
    for i, near in enumerate(similar, start):
      earlier = np.flatnonzero(near[:i] & is_first[:i])
      firsts.append(int(earlier[0]) if len(earlier) and not exempt[i] else None)
      is_first[i] &= firsts[i] is None
  return firsts

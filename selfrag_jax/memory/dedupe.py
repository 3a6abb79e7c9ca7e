"""Which of the chunks that are to be added say what is there already."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from selfrag_jax.memory.scoring import cosine
from selfrag_jax.memory.table import Table

CANDIDATES = 4  # chunks that are near enough are asked for, where a field must agree too


def near_duplicates(
  table: Table,
  rows: np.ndarray,
  records: Sequence[Mapping[str, Any]],
  superseded: AbstractSet[str],
  threshold: float | None,
  within: str | None = None,
) -> list[str | None]:
  """Return for each new chunk the id of the chunk that it repeats: an old one, or an earlier one of the batch.

  rows f32 [N, D] are the embeddings of `records`; repeating is a cosine of at least `threshold` (None: nothing does).
  Chunks with a key are always new; with `within`, chunks repeat only those whose metadata agrees in that field.
  """
  if threshold is None:
    return [None] * len(rows)
  value_of = lambda record: None if within is None else record["metadata"].get(within)
  values = [value_of(record) for record in records]
  is_keyed = np.array([record["key"] is not None for record in records])
  allowed = _staying(table, len(rows), superseded)
  k = 1 if within is None else CANDIDATES
  old = table.index.search(rows, k, allowed=allowed)
  same_as: list[str | None] = [None] * len(rows)
  for i in np.flatnonzero(~is_keyed):
    near = [table.ids[slot] for slot, score in zip(old.slots[i], old.scores[i], strict=True) if score >= threshold]
    same_as[i] = next((id for id in near if value_of(table.records[id]) == values[i]), None)
    if same_as[i] is None and within is not None and len(near) == k:  # one that agrees may come behind them
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


def _staying(table: Table, n: int, superseded: AbstractSet[str]) -> np.ndarray | None:
  """Return bool[C], the slots that are not cleared by a change that adds n chunks; None if all stay.

  What goes with this very change is repeated by nobody: superseded chunks, and the oldest if room is needed.
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

  Rows that are `exempt` bool[N], and those that repeat another, repeat nothing and are not repeated.
  """
  norms = np.linalg.norm(rows, axis=1)
  firsts: list[int | None] = []
  is_first = ~exempt
  for i, row in enumerate(rows):  # one at a time: the similarities of all would be N times the rows
    similar = cosine(rows[:i] @ row, norms[:i] * norms[i], np) >= threshold
    earlier = np.flatnonzero(similar & is_first[:i])
    firsts.append(int(earlier[0]) if len(earlier) and not exempt[i] else None)
    is_first[i] &= firsts[i] is None
  return firsts

"""Which of the chunks that are to be added say what is there already."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from selfrag_jax.memory.backends import Backend
from selfrag_jax.memory.similarity import cosine
from selfrag_jax.memory.table import Table


def near_duplicates(
  table: Table,
  backend: Backend,
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
  same_as: list[str | None] = [None] * len(rows)
  if threshold is None:
    return same_as
  # what goes with this very change is repeated by nobody: superseded chunks, and the oldest if room is needed
  stay = [slot for chunk_id, slot in table.slots.items() if chunk_id not in superseded]
  room = len(table.valid) - len(rows)
  allowed = np.zeros_like(table.valid)
  allowed[stay[max(len(stay) - room, 0) :]] = True
  groups: dict[Any, list[int]] = {}
  for i, record in enumerate(records):
    groups.setdefault(None if within is None else record["metadata"].get(within), []).append(i)
  for value, places in groups.items():
    fitting = allowed if within is None else allowed & table.fitting({within: value})
    found = _repeated(table, backend, rows[places], [records[i] for i in places], fitting, threshold)
    for i, same in zip(places, found, strict=True):
      same_as[i] = same
  return same_as


def _repeated(
  table: Table,
  backend: Backend,
  rows: np.ndarray,
  records: Sequence[Mapping[str, Any]],
  allowed: np.ndarray,
  threshold: float,
) -> list[str | None]:
  old = backend.search(table, rows, 1, allowed=allowed, bias=None, metric="cosine")
  is_old = np.asarray(old.scores)[:, 0] >= threshold
  is_keyed = np.array([record["key"] is not None for record in records])
  same_as: list[str | None] = [
    None if first is None else records[first]["id"] for first in repeats(rows, threshold, is_old | is_keyed)
  ]
  for i in np.flatnonzero(is_old & ~is_keyed):
    same_as[i] = table.ids[int(old.slots[i, 0])]
  return same_as


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

"""Prompts that have been read before: a new one that begins like one of them is read from there on."""

from collections import OrderedDict
from collections.abc import Sequence

import jax
import numpy as np

from selfrag_jax.generate.slots import shortened
from selfrag_jax.generate.step import Position

LEAST = 16  # tokens; to read fewer again costs less than to keep them


class PrefixCache:
  """Rows of batch 1 by their tokens; the least recently used go when they hold more than `capacity` bytes.

  The caches of attention layers can be cut at any token. The state of a Mamba layer cannot: if `is_cuttable` is False,
  a row serves prompts that begin with all of its tokens.
  """

  def __init__(self, capacity: int, is_cuttable: bool):
    self._capacity, self._is_cuttable = capacity, is_cuttable
    self._rows: OrderedDict[bytes, tuple[np.ndarray, Position]] = OrderedDict()
    self._bytes = 0

  def __len__(self) -> int:
    return len(self._rows)

  @property
  def nbytes(self) -> int:
    """The bytes that the rows hold."""
    return self._bytes

  def find(self, tokens: Sequence[int]) -> tuple[int, Position | None]:
    """Return how many of the first tokens need not be read, and a row that has read them (0: none).

    If that is not all of its own tokens, the row has been cut, and at least one token is left to be read.
    """
    wanted = np.asarray(tokens, np.int32)
    best, at = 0, None
    for key, (known, _) in self._rows.items():
      common = _common(wanted, known)
      if common < len(known):
        common = min(common, len(wanted) - 1) if self._is_cuttable else 0
      if common > best:
        best, at = common, key
    if at is None or best < LEAST:
      return 0, None
    self._rows.move_to_end(at)
    known, row = self._rows[at]
    return best, row if best == len(known) else shortened(row, best)

  def keep(self, tokens: Sequence[int], row: Position) -> None:
    """Keep a row that has read these tokens and no others."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(row))
    if len(tokens) < LEAST or size > self._capacity:
      return
    known = np.asarray(tokens, np.int32)
    self._drop(known.tobytes())
    self._rows[known.tobytes()] = known, row
    self._bytes += size
    while self._bytes > self._capacity:
      self._drop(next(iter(self._rows)))

  def clear(self) -> None:
    """Forget all rows."""
    self._rows.clear()
    self._bytes = 0

  def _drop(self, key: bytes) -> None:
    if (old := self._rows.pop(key, None)) is not None:
      self._bytes -= sum(leaf.nbytes for leaf in jax.tree.leaves(old[1]))


def _common(a: np.ndarray, b: np.ndarray) -> int:
  size = min(len(a), len(b))
  different = np.flatnonzero(a[:size] != b[:size])
  return int(different[0]) if len(different) else size

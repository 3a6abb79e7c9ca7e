"""The slots of an engine on the device: a batch that grows and shrinks with what is written in it."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import jax
import numpy as np

from selfrag_jax.generate.slots import Rows, put, resized, write
from selfrag_jax.generate.step import Position, begin, read
from selfrag_jax.mesh import fetch
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.ragged import pad_rows, power_of_two
from selfrag_jax.typing import Params

LEAST_ROOM = 128  # tokens; rooms are powers of two, so that a few compiled programs serve all lengths
WIDTHS = (16, 64, 256)  # tokens that one program reads
GROWTH = 4  # numbers of slots are its powers: half empty batches cost little, and a program takes seconds to compile
FIRST = np.zeros(1, np.int32)

T = TypeVar("T")


class SlotBatch(Generic[T]):
  """Rows of one batch for occupants of the type T. `occupants` has one of them, or None, for each slot."""

  def __init__(self, model: ModelConfig, params: Params, most: int, needs: Callable[[T], int]):
    """params: `unstack`ed. most: slots. needs: how many tokens an occupant may come to have."""
    self._model, self._params, self._most, self._needs = model, params, most, needs
    self.clear()

  def __len__(self) -> int:
    return sum(occupant is not None for occupant in self.occupants)

  @property
  def is_full(self) -> bool:
    return len(self) >= self._most

  def clear(self) -> None:
    """Forget all occupants, and let go of the device's memory."""
    self._position: Position | None = None
    self._room = 0
    self.occupants: list[T | None] = []

  def begin(self, tokens: int, known: Position | None = None) -> Position:
    """Return a row of batch 1 with room for some tokens; it goes on from a `known` row, or is empty."""
    room = _bucket(tokens)
    return _begin(self._model, 1, room) if known is None else _resized(known, FIRST, room)

  def read(self, row: Position, ids: Sequence[int]) -> Position:
    """Extend a row of batch 1 by tokens, in programs of a few widths."""
    ids = list(ids)
    while ids:
      width = next((w for w in WIDTHS if w >= len(ids)), WIDTHS[-1])
      tokens, lengths = pad_rows([ids[:width]], width)
      row, ids = _read(self._model, self._params, row, tokens, lengths), ids[width:]
    return row

  def add(self, occupant: T, row: Position) -> None:
    """Put an occupant with its row of batch 1 into a free slot."""
    self._fit([*(each for each in self.occupants if each is not None), occupant])
    slot = self.occupants.index(None)
    assert self._position is not None
    self._position = _put(self._position, row, slot)
    self.occupants[slot] = occupant

  def take(self, occupant: T, tokens: int) -> Position:
    """Return a copy of an occupant's row, of batch 1, with room for some tokens."""
    assert self._position is not None
    return _resized(self._position, np.array([self.occupants.index(occupant)], np.int32), _bucket(tokens))

  def remove(self, occupant: T) -> None:
    """Free the slot of an occupant."""
    self.occupants[self.occupants.index(occupant)] = None

  def write(self, rows: Rows, allowed: np.ndarray | None, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Let the slots write as `slots.write` does; return tokens int32 [B, steps] and log-probabilities f32."""
    position, *written = _write(self._model, self._params, self._position, rows, allowed, steps=steps)
    self._position = position
    tokens, log_probs = fetch(tuple(written))
    return tokens, log_probs

  def _fit(self, occupants: Sequence[T]) -> None:
    """Give the slots room for occupants, of which the last has none yet; far too much room is given back."""
    n, room = 1, _bucket(max(map(self._needs, occupants)))
    while n < len(occupants):
      n *= GROWTH
    n = min(n, self._most)
    held = len(self.occupants)
    if self._position is None:
      self._position, self._room, self.occupants = _begin(self._model, n, room), room, [None] * n
      return
    n = n if n > held or n * GROWTH < held else held
    room = room if room > self._room or room * GROWTH < self._room else self._room
    if (n, room) == (held, self._room):
      return
    order = [slot for slot, occupant in enumerate(self.occupants) if occupant is not None]
    kept = [self.occupants[slot] for slot in order]
    self._position = _resized(self._position, np.array([*order, *[0] * (n - len(order))], np.int32), room)
    self._room, self.occupants = room, [*kept, *[None] * (n - len(kept))]


def _bucket(tokens: int) -> int:
  return max(power_of_two(tokens), LEAST_ROOM)


_begin = jax.jit(begin, static_argnums=(0, 1, 2))
_read = jax.jit(read, static_argnums=0)
_write = jax.jit(write, static_argnames=("model", "steps"), donate_argnames="position")
_put = jax.jit(put, donate_argnums=0)
_resized = jax.jit(resized, static_argnames="capacity")

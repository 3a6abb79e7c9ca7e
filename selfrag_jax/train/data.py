"""Batches in an order that is a function of the seed, the step and the row, fed by grain."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import numpy as np


class _Steps:
  """A random-access source whose element `step` is the batch of that step."""

  def __init__(self, make: Callable[[int], Any], steps: int):
    self._make, self._steps = make, steps

  def __len__(self) -> int:
    return self._steps

  def __getitem__(self, step: int) -> Any:
    return self._make(int(step))


def batches(make: Callable[[int], Any], start: int, stop: int, *, prefetch: int = 2) -> Iterator[Any]:
  """Yield `make(step)` for each step of [start, stop), made ahead by one background thread.

  The position in the data is the step itself, so resuming is exact on any number of processes.
  """
  source: Any = _Steps(make, stop)  # duck-typed
  data = grain.MapDataset.source(source).slice(slice(start, stop))
  return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)))


class ShuffledEpochs:
  """An endless sequence: `items` in an order of its own for every epoch, a function of the seed and the epoch."""

  def __init__(self, items: Sequence[int], seed: int):
    self._items, self._seed = items, seed
    self._epoch = functools.lru_cache(2)(self._shuffled)

  def __getitem__(self, position: int) -> int:
    epoch, offset = divmod(position, len(self._items))
    return self._items[self._epoch(epoch)[offset]]

  def _shuffled(self, epoch: int) -> np.ndarray:
    return np.random.default_rng([self._seed, epoch]).permutation(len(self._items))

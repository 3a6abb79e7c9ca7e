"""Batches in an order that is a function of the seed, the step and the row, fed by grain."""

from collections.abc import Callable, Iterator
from typing import Any

import grain


class _Steps:
  """A random-access source whose element `step` is the batch of that step."""

  def __init__(self, make: Callable[[int], Any], steps: int):
    self._make, self._steps = make, steps

  def __len__(self) -> int:
    return self._steps

  def __getitem__(self, step: int) -> Any:
    return self._make(int(step))


def batches(make: Callable[[int], Any], start: int, stop: int, *, prefetch: int = 2) -> Iterator[Any]:
  """Yield `make(step)` for each step of [start, stop), made in advance by one background thread.

  The position in the data is the step itself, so resuming is exact on any number of processes.
  """
  source: Any = _Steps(make, stop)  # duck-typed
  data = grain.MapDataset.source(source).slice(slice(start, stop))
  return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)))

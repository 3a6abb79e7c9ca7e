"""Batches in an order that is a function of the seed, the step and the row, fed by grain."""

from collections.abc import Callable, Iterator
from typing import Any

import grain


def batches(make: Callable[[int], Any], start: int, stop: int, *, prefetch: int = 2) -> Iterator[Any]:
  """Yield `make(step)` for each step of [start, stop), made in advance by one background thread.

  The position in the data is the step itself, so resuming is exact on any number of processes.
  """
  data = grain.MapDataset.range(start, stop).map(make)
  return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)))

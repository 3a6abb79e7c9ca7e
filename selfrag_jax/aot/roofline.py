"""The least time of a compiled program on a chip: of its products, its memory and its interconnect."""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from selfrag_jax.aot import hbm
from selfrag_jax.aot.collectives import Collective, collectives
from selfrag_jax.aot.hlo import path_of
from selfrag_jax.aot.programs import Program
from selfrag_jax.chips import Chip


class Traffic(NamedTuple):
  """The collectives of one kind, along the same axes of the mesh and within the same loops."""

  kind: str
  axes: tuple[str, ...]
  loop: str  # empty: outside of all loops
  trips: int | None  # of all loops around them; None: only the running program knows
  number: int
  bytes: float  # that a device sends, each time


class Bound(NamedTuple):
  """Seconds at the peak of a chip: of matrix products, of its memory, and of what it sends, each by itself."""

  products: float
  memory: float
  wire: float

  @property
  def overlapped(self) -> float:
    """Seconds if all three go on at once."""
    return max(self)

  @property
  def in_turn(self) -> float:
    """Seconds if nothing is computed while something is sent."""
    return max(self.products, self.memory) + self.wire


def traffic(program: Program, mesh: Mapping[str, int]) -> list[Traffic]:
  """Sum what a program sends by kind, axes and loop: outside of loops first, the most bytes first."""
  groups: dict[tuple, list[Collective]] = defaultdict(list)
  for one in collectives(program.text):
    # devices that differ along no axis send nothing
    if axes := one.axes(mesh):
      groups[one.kind, axes, one.loops].append(one)
  rows = []
  for (kind, axes, loops), found in groups.items():
    trips: int | None = 1
    for loop in loops:
      trips = None if trips is None or loop.trips is None else trips * loop.trips
    loop = loops[-1].name if loops else ""
    rows.append(Traffic(kind, axes, loop, trips, len(found), sum(one.wire_bytes for one in found)))
  return sorted(rows, key=lambda row: (row.loop, -row.bytes))


def bounds(program: Program, mesh: Mapping[str, int], chip: Chip) -> dict[str, Bound]:
  """Return the bound outside of all loops, "", and of one turn of each loop of unknown length, by its path.

  Loops of known length count as often as they turn. Element-wise work is not counted, but for the memory it moves.
  """
  peak = program.module.n_devices * chip.flops
  moved, sent = hbm.moved(program.module), defaultdict(float)
  for one in collectives(program.text, one_branch=True):
    path, times = path_of(one.loops)
    sent[path] += times * one.wire_bytes if one.axes(mesh) else 0
  paths = sorted({"", *program.work, *(path for path in (*moved, *sent) if moved[path] + sent[path] > 0)})
  of = lambda path: (program.work[path] / peak, moved[path] / chip.bandwidth, sent[path] / chip.interconnect)
  return {path: Bound(*of(path)) for path in paths}


def utilization(program: Program, mesh: Mapping[str, int], chip: Chip) -> tuple[float, float] | None:
  """Return the highest model FLOPs utilization (MFU): if all overlaps, and if nothing does with what is sent.

  None for a program whose length only running it tells, or of which the FLOPs of the model are not known.
  """
  found = bounds(program, mesh, chip)
  if program.useful is None or len(found) > 1:
    return None
  least = program.useful.flops / (program.module.n_devices * chip.flops)
  return least / found[""].overlapped, least / found[""].in_turn


def speed(program: Program, mesh: Mapping[str, int], chip: Chip) -> tuple[float, float] | None:
  """Return the most tokens per second, padding included, in the two cases of `utilization`; None where it is None."""
  if program.useful is None or utilization(program, mesh, chip) is None:
    return None
  bound = bounds(program, mesh, chip)[""]
  return program.useful.tokens / bound.overlapped, program.useful.tokens / bound.in_turn

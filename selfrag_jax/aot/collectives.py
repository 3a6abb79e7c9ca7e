"""What a compiled program sends between devices, and in which of its loops: read from the text of its HLO.

The compiler's cost model counts the body of a loop once and knows no interconnect. The text has both: every collective
with its shapes and its groups of devices, and every `while` with the computations that it calls.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from selfrag_jax.aot.hlo import Instruction, Loop, parse

STEP = "async_collective_fusion"
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(
  r"replica_groups=mesh\[((?:'\w+'=\d+,?)+)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{((?:'\w+',?)*)\}"
)
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}")


class Collective(NamedTuple):
  """A collective of a program, on one device.

  `shapes` are those of its results, `bytes` their size; of a reduce-scatter, those of its operands, the larger side.
  `devices` is one group of devices that take part together, `loops` are those around it, the outermost first.
  """

  kind: str
  shapes: tuple[tuple[int, ...], ...]
  bytes: int
  devices: tuple[int, ...]
  loops: tuple[Loop, ...]

  @property
  def wire_bytes(self) -> float:
    """The bytes that a device sends each time, in rings: (n - 1) / n of all, twice for a sum that everyone gets."""
    if self.kind == "collective-permute":
      return float(self.bytes)
    return self.bytes * (1 - 1 / len(self.devices)) * (2 if self.kind == "all-reduce" else 1)

  def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of a mesh (name -> size, the devices in its order) along which the devices differ."""
    places = np.array(np.unravel_index(self.devices, tuple(mesh.values())))
    return tuple(axis for axis, along in zip(mesh, places, strict=True) if len(set(along.tolist())) > 1)


def collectives(text: str, *, one_branch: bool = False) -> list[Collective]:
  """List the collectives of a compiled program, given as `compiled.as_text()`; each once for every loop around it.

  `one_branch`: of a condition, those of one branch, as one runs; see `Module.walk`.
  """
  module = parse(text)
  # an asynchronous collective may stand in several computations of its fusion, by the same channel and name
  copies: dict[Any, dict[str, list[Collective]]] = {}
  begun, steps = set(), []
  for where, instruction, loops in module.walk(one_branch=one_branch):
    kind = instruction.kind.removesuffix("-start")
    if kind in KINDS:
      key = tuple(re.findall(r'channel_id=\d+|op_name="[^"]*"', instruction.rest))
      found = _collective(kind, instruction, loops, module.n_devices)
      if kind == "all-reduce" and where.startswith("all-reduce-scatter"):  # a TPU's fusion with the slice that it takes
        found = found._replace(kind="reduce-scatter")
      copies.setdefault((key, found), {}).setdefault(where, []).append(found)
      whole = key, found._replace(loops=())
      if where.startswith(STEP) and key:
        steps.append((whole, (key, found), where))
      else:
        begun.add(whole)
  # a TPU takes steps of one beside other work, also in a loop that it merely waits for: they are not sent again
  for whole, copy, where in steps:
    if whole in begun:
      copies[copy].pop(where, None)
  return [found for of in copies.values() for found in max(of.values(), key=len, default=())]


def _collective(kind: str, instruction: Instruction, loops: tuple[Loop, ...], n_devices: int) -> Collective:
  arrays = instruction.arrays
  if instruction.kind == "all-gather-start":  # its type lists the operands first
    arrays = arrays[len(arrays) // 2 :]
  if instruction.kind == "collective-permute-start":
    arrays = arrays[1:2]
  devices = _devices(f"{instruction.type} {instruction.kind}({instruction.rest}", n_devices)
  times = len(devices) if kind == "reduce-scatter" else 1
  size = sum(array.width * math.prod(array.shape) for array in arrays)
  return Collective(kind, tuple(array.shape for array in arrays), int(size * times), devices, loops)


def _devices(line: str, n_devices: int) -> tuple[int, ...]:
  """Return the first group of devices that an instruction names."""
  if iota := _IOTA.search(line):
    _, size, dims, order = iota.groups()
    return tuple(_counted(dims, order)[: int(size)].tolist())
  if named := _NAMED.search(line):
    axes, dims, order, along = named.groups()
    sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    ids = _counted(dims or str(n_devices), order).reshape(tuple(sizes.values()))
    return tuple(ids[tuple(slice(None) if f"'{axis}'" in along else 0 for axis in sizes)].ravel().tolist())
  if listed := _LISTED.search(line):
    return tuple(int(n) for n in listed[1].split(","))
  if "replica_groups={}" in line:
    return tuple(range(n_devices))
  raise ValueError(f"the devices of a collective are written in a way that is not known: {line.strip()[:300]}")


def _counted(dims: str, order: str | None) -> np.ndarray:
  """Return 0, 1, 2 … in an array of `dims`, its axes in another order, flat."""
  numbers = lambda text: [int(n) for n in text.split(",")]
  ids = np.arange(np.prod(numbers(dims))).reshape(numbers(dims))
  return (ids.transpose(numbers(order)) if order else ids).ravel()

"""What a compiled program sends between devices, and in which of its loops: read from the text of its HLO.

The compiler's cost model counts the body of a loop once and knows no interconnect. The text has both: every collective
with its shapes and its groups of devices, and every `while` with the computations that it calls.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_OPERATION = re.compile(r" ([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
_LOOP = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)[a-z\d]*)\[([\d,]*)\]")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(
  r"replica_groups=mesh\[((?:'\w+'=\d+,?)+)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{((?:'\w+',?)*)\}"
)
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}")


class Loop(NamedTuple):
  """A `while` of a program: where it stands in the traced code, and its iterations (None: only running it tells)."""

  name: str
  trips: int | None


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


def collectives(text: str) -> list[Collective]:
  """List the collectives of a compiled program, given as `compiled.as_text()`; each once for every loop around it."""
  partitions = re.search(r"num_partitions=(\d+)", text.split("\n", 1)[0])
  n_devices = int(partitions[1]) if partitions else 1
  computations: dict[str, list[str]] = {}
  name = entry = ""
  for line in text.splitlines():
    if opening := _COMPUTATION.match(line):
      name = opening[2]
      entry = name if opening[1] else entry
      computations[name] = []
    elif line.startswith("  ") and name:
      computations[name].append(line)
  if not entry:
    raise ValueError("the text is no HLO of a compiled program: it has no ENTRY computation")
  # an asynchronous collective may stand in several computations of its fusion, by the same channel and name
  copies: dict[Any, dict[str, list[Collective]]] = {}
  for where, key, found in _walk(computations, entry, (), n_devices):
    copies.setdefault((key, found), {}).setdefault(where, []).append(found)
  return [found for by_computation in copies.values() for found in max(by_computation.values(), key=len)]


def _walk(
  computations: Mapping[str, list[str]], name: str, loops: tuple[Loop, ...], n_devices: int
) -> Iterator[tuple[str, tuple[str, ...], Collective]]:
  """Yield the computation of every collective, what its copies have in common, and itself."""
  for line in computations[name]:
    right = line.partition(" = ")[2]
    operation = _OPERATION.search(f" {right}")
    if operation is None:
      continue
    if operation[1] == "while" and (parts := _LOOP.search(line)):
      trips = _TRIPS.search(line)
      traced = re.search(r'op_name="([^"]*)"', line)
      loop = Loop(traced[1] if traced else parts[2], int(trips[1]) if trips else None)
      for part in parts.groups():
        yield from _walk(computations, part, (*loops, loop), n_devices)
      continue
    for called in _CALLED.findall(line):
      for part in re.findall(r"[\w.\-]+", called):
        yield from _walk(computations, part, loops, n_devices)
    kind = operation[1].removesuffix("-start")
    if kind in KINDS:
      key = tuple(re.findall(r'channel_id=\d+|op_name="[^"]*"', line))
      yield name, key, _collective(kind, operation, right, loops, n_devices)


def _collective(kind: str, operation: re.Match, line: str, loops: tuple[Loop, ...], n_devices: int) -> Collective:
  arrays = [
    (int(bits or 8) / 8, tuple(int(n) for n in sizes.split(",") if n))
    for _, bits, sizes in _ARRAY.findall(line[: operation.start()])
  ]
  if operation[1] == "all-gather-start":  # its type lists the operands first
    arrays = arrays[len(arrays) // 2 :]
  if operation[1] == "collective-permute-start":
    arrays = arrays[1:2]
  devices = _devices(line, n_devices)
  times = len(devices) if kind == "reduce-scatter" else 1
  size = sum(width * int(np.prod(shape, dtype=np.int64)) for width, shape in arrays)
  return Collective(kind, tuple(shape for _, shape in arrays), int(size * times), devices, loops)


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

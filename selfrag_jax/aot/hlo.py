"""The text of a compiled program (HLO): its instructions, and the loops that they stand in."""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
_LOOP = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)[a-z\d]*)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_KERNEL = re.compile(r'custom_call_target="(tpu_custom_call|__cudnn\$\w+)"')


class Array(NamedTuple):
  """A type of an array. `space` is the memory that it lies in: 0 the large one, others are caches and registers."""

  width: float  # bytes of an element
  shape: tuple[int, ...]
  space: int
  bytes: int  # with the padding of its tiles


class Instruction(NamedTuple):
  """One line of a computation."""

  name: str
  kind: str
  type: str
  rest: str  # behind the opening bracket of the operands
  is_root: bool

  @property
  def arrays(self) -> list[Array]:
    """The arrays of its result."""
    return arrays(self.type)

  @property
  def operands(self) -> list[str]:
    """The names of its operands."""
    depth, end = 1, len(self.rest)
    for i, character in enumerate(self.rest):
      depth += (character == "(") - (character == ")")
      if not depth:
        end = i
        break
    return re.findall(r"%([\w.\-]+)", self.rest[:end])

  @property
  def called(self) -> list[str]:
    """The names of the computations that it runs, but for those of a loop."""
    return [part for called in _CALLED.findall(self.rest) for part in re.findall(r"[\w.\-]+", called)]

  @property
  def loop(self) -> "tuple[Loop, tuple[str, ...]] | None":
    """The loop that it is, with the names of its condition and its body; None for all but a `while`."""
    parts = _LOOP.search(self.rest) if self.kind == "while" else None
    if parts is None:
      return None
    trips, traced = _TRIPS.search(self.rest), re.search(r'op_name="([^"]*)"', self.rest)
    return Loop(traced[1] if traced else parts[2], int(trips[1]) if trips else None), parts.groups()


class Loop(NamedTuple):
  """A `while` of a program: where it stands in the traced code, and its iterations (None: only running it tells)."""

  name: str
  trips: int | None


def path_of(loops: tuple[Loop, ...]) -> tuple[str, int]:
  """Return the path of the loops of unknown length, such as "while/while", and the turns of the others."""
  unknown = [loop for loop in loops if loop.trips is None]
  return "/".join(["while"] * len(unknown)), math.prod(loop.trips for loop in loops if loop.trips is not None)


@dataclasses.dataclass(frozen=True)
class Module:
  """A compiled program: the instructions of each computation, and the name of the first one to run."""

  computations: Mapping[str, list[Instruction]]
  entry: str
  n_devices: int

  @functools.cached_property
  def types(self) -> dict[str, dict[str, list[Array]]]:
    """The arrays of each result, by the name of the computation and the instruction."""
    return {name: {one.name: one.arrays for one in of} for name, of in self.computations.items()}

  def walk(
    self,
    into: tuple[str, ...] | None = None,
    name: str = "",
    loops: tuple[Loop, ...] = (),
    *,
    one_branch: bool = False,
  ) -> Iterator[tuple[str, Instruction, tuple[Loop, ...]]]:
    """Yield every instruction that runs, with its computation and the loops around it, the outermost first.

    An instruction that calls computations comes after theirs; `into`: only those of these kinds are entered, and loops.
    With `one_branch`, of the branches of a condition only the one that makes the largest arrays is entered.
    """
    name = name or self.entry
    for instruction in self.computations[name]:
      if found := instruction.loop:
        loop, (condition, body) = found
        loop = loop._replace(trips=self._trips(condition)) if loop.trips is None else loop
        for part in (condition, body):
          yield from self.walk(into, part, (*loops, loop), one_branch=one_branch)
      elif into is None or instruction.kind in into:
        parts = instruction.called
        if one_branch and instruction.kind == "conditional":
          parts = [max(parts, key=self._size_of)]
        for part in parts:
          yield from self.walk(into, part, loops, one_branch=one_branch)
      yield name, instruction, loops

  @functools.cached_property
  def kernels(self) -> Counter[str]:
    """How many calls of each Pallas kernel for TPUs and of each function of cuDNN it has, loops not unrolled."""
    called: Counter[str] = Counter()
    for _, one, _ in self.walk():
      if one.kind == "custom-call" and (target := _KERNEL.search(one.rest)):
        called[one.name.split(".")[0] if target[1] == "tpu_custom_call" else target[1].strip("_")] += 1
    return called

  def _size_of(self, computation: str) -> int:
    """Return the bytes of all that a computation makes."""
    size = 0
    for _, instruction, loops in self.walk((), computation, one_branch=True):
      size += path_of(loops)[1] * sum(array.bytes for array in instruction.arrays)
    return size

  def _trips(self, condition: str) -> int | None:
    """Return the turns of a loop that goes on while a number is below a constant: as every scan, it counts from 0."""
    of = {one.name: one for one in self.computations[condition]}
    root = next(one for one in of.values() if one.is_root)
    limit = of.get(root.operands[-1]) if root.kind == "compare" and "direction=LT" in root.rest else None
    number = re.match(r"\d+", limit.rest) if limit is not None and limit.kind == "constant" else None
    return int(number[0]) if number else None


def parse(text: str) -> Module:
  """Read a compiled program, given as `compiled.as_text()`. Raises ValueError for another text."""
  partitions = re.search(r"num_partitions=(\d+)", text.split("\n", 1)[0])
  computations: dict[str, list[Instruction]] = {}
  name = entry = ""
  for line in text.splitlines():
    if opening := _COMPUTATION.match(line):
      name = opening[2]
      entry = name if opening[1] else entry
      computations[name] = []
    elif name and (found := _INSTRUCTION.match(line)):
      computations[name].append(Instruction(found[1], found[3], found[2], found[4], line.startswith("  ROOT ")))
  if not entry:
    raise ValueError("the text is no HLO of a compiled program: it has no ENTRY computation")
  return Module(computations, entry, int(partitions[1]) if partitions else 1)


def arrays(type_: str) -> list[Array]:
  """Return the arrays of a type."""
  found = []
  for _, bits, sizes, order, layout in _ARRAY.findall(type_):
    shape, width = tuple(int(n) for n in sizes.split(",") if n), int(bits or 8) / 8
    tile, space = _TILE.search(layout), _SPACE.search(layout)
    stored = [shape[int(i)] for i in order.split(",")] if order else list(shape[::-1])  # the axis that runs first first
    for i, n in enumerate(reversed(tile[1].split(",")) if tile else ()):
      if i < len(stored):
        stored[i] = -(-stored[i] // int(n)) * int(n)
    found.append(Array(width, shape, int(space[1]) if space else 0, int(width * math.prod(stored))))
  return found

"""Programs that are compiled and not run: the memory that each needs, and what it sends between devices."""

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from selfrag_jax import flops
from selfrag_jax.chips import Chip
from selfrag_jax.hlo import Collective, collectives
from selfrag_jax.model.config import ModelConfig, count_params
from selfrag_jax.train.phases.base import GradientPhase
from selfrag_jax.typing import Params

SPARE = 0.1  # of a device's memory: what a program must leave free, for fragmentation and for what else runs there


class Program(NamedTuple):
  """A compiled program. Sizes are in bytes on one device; results that take the place of arguments count as these."""

  name: str
  arguments: int
  temporary: int
  results: int
  seconds: float  # that it took to compile
  text: str  # of its HLO
  work: flops.Work  # of all devices together

  @property
  def memory(self) -> int:
    """The bytes that a device needs to run it."""
    return self.arguments + self.temporary + self.results

  def seconds_of_products(self, mesh: Mapping[str, int], chip: Chip) -> dict[str, float]:
    """Return the least time of the products, at the chip's peak: of the program, and of one turn of each loop."""
    peak = math.prod(mesh.values()) * chip.flops
    return {path: flops / peak for path, flops in sorted(self.work.items())}


class Traffic(NamedTuple):
  """The collectives of one kind, along the same axes of the mesh and within the same loops."""

  kind: str
  axes: tuple[str, ...]
  loop: str  # empty: outside of all loops
  trips: int | None  # of all loops around them; None: only the running program knows
  number: int
  bytes: float  # that a device sends, each time


def compile_phases(phases: Mapping[str, GradientPhase]) -> list[Program]:
  """Compile the programs of a step of each phase for the devices of its mesh, which need not exist."""
  programs = []
  for name, phase in phases.items():
    for program, traced in phase.trace().items():
      started = time.monotonic()
      compiled = traced.lower().compile()
      memory: Any = compiled.memory_analysis()
      results = memory.output_size_in_bytes - memory.alias_size_in_bytes
      sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes, results
      seconds = time.monotonic() - started
      work = flops.count(traced.jaxpr)
      programs.append(Program(f"{name} {program}", *sizes, seconds, compiled.as_text() or "", work))
  return programs


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


def advice(program: Program, chip: Chip) -> str:
  """Return what to change where a program does not fit into a device with `SPARE` of its memory left; else nothing."""
  room = (1 - SPARE) * chip.memory
  if program.memory <= room:
    return ""
  if program.arguments + program.results > room:
    return "parameters and state alone are too large: set mesh.fsdp, or more devices"
  return "activations are too large: set model.remat to full, more accumulate, a smaller batch, or mesh.tensor"


def as_json(programs: list[Program], mesh: Mapping[str, int], chip: Chip) -> list[dict[str, Any]]:
  """Return the programs as JSON types."""
  return [
    {
      "program": program.name,
      "bytes": {
        "arguments": program.arguments,
        "temporary": program.temporary,
        "results": program.results,
        "memory": program.memory,
        "device": int(chip.memory),
      },
      "fits": not advice(program, chip),
      "compile_seconds": round(program.seconds, 1),
      "flops": dict(program.work),
      "seconds_of_products": program.seconds_of_products(mesh, chip),
      "collectives": [row._asdict() for row in traffic(program, mesh)],
    }
    for program in programs
  ]


def print_chip_plan(programs: list[Program], mesh: Mapping[str, int], chip: Chip) -> None:
  """Print how the programs fit into the devices of a chip, and what they send."""
  print_memory(programs)
  n = math.prod(mesh.values())
  for program in programs:
    share = program.memory / chip.memory
    fits = advice(program, chip) or f"fits, {1 - share:.0%} to spare"
    print(f"\n{program.name}: {share:.1%} of a device's {chip.memory / 2**30:.0f} GiB, {fits}")
    for path, seconds in program.seconds_of_products(mesh, chip).items():
      turn = f"a turn of {path}" if path else "outside of loops"
      print(f"  {program.work[path]:10.3g} FLOPs of products {turn}, at least {seconds * 1e3:.3g} ms on {n} devices")
    rows = traffic(program, mesh)
    if not rows:
      print("  sends nothing")
    for row in rows:
      where = f"in {row.loop}, {'?' if row.trips is None else row.trips} times" if row.loop else "once"
      print(f"  {row.number:4} {row.kind:18} along {' x '.join(row.axes):22} {_size(row.bytes):>10}  {where}")


def print_plan(mesh: Mesh, model: ModelConfig, phases: Mapping[str, GradientPhase]) -> None:
  """Print the mesh, the parameters and block pattern of a language model, and the memory of its programs."""
  print_model(mesh, model)
  print_memory(compile_phases(phases))


def print_encoder_plan(mesh: Mesh, params: Params, phases: Mapping[str, GradientPhase]) -> None:
  """Print the mesh, the parameters of an encoder, and the memory of its programs."""
  print_mesh(mesh)
  print(f"parameters  {sum(leaf.size for leaf in jax.tree.leaves(params)):,}")
  print_memory(compile_phases(phases))


def print_model(mesh: Mesh, model: ModelConfig) -> None:
  """Print the mesh, and the parameters and block pattern of a language model."""
  counts = count_params(model)
  print_mesh(mesh)
  print(f"parameters  {', '.join(f'{name} {count:,}' for name, count in counts.items() if count)}")
  print(f"pattern     {model.to_dict()['block_pattern']}")


def print_memory(programs: list[Program]) -> None:
  """Print the memory that each program needs on a device."""
  width = max(len(program.name) for program in programs) + 2
  print(f"{'a device':{width}}{'arguments':>12}{'temporary':>12}{'results':>12}  MiB")
  for program in programs:
    sizes = program.arguments, program.temporary, program.results
    print(f"{program.name:{width}}" + "".join(f"{size / 2**20:12.1f}" for size in sizes))


def print_mesh(mesh: Mesh) -> None:
  """Print the mesh and its devices."""
  print(f"mesh        {dict(mesh.shape)} on {mesh.devices.size} {mesh.devices.flat[0].device_kind} devices")


def _size(n: float) -> str:
  for unit in ("B", "KiB", "MiB"):
    if n < 1024:
      return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
    n /= 1024
  return f"{n:.1f} GiB"

"""What compiled programs need of their devices, as a table and as JSON."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from selfrag_jax.aot.programs import Program, Traceable, compile_phases
from selfrag_jax.aot.roofline import bounds, speed, traffic, utilization
from selfrag_jax.chips import Chip
from selfrag_jax.model.config import ModelConfig, count_params
from selfrag_jax.typing import Params

SPARE = 0.1  # of a device's memory: what a program must leave free, for fragmentation and for what else runs there


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
      "kernels": dict(program.module.kernels),
      "model": program.useful and program.useful._asdict(),
      "seconds": {path: bound._asdict() for path, bound in bounds(program, mesh, chip).items()},
      "mfu": dict(zip(("overlapped", "in_turn"), utilization(program, mesh, chip) or (), strict=False)),
      "tokens_per_second": dict(zip(("overlapped", "in_turn"), speed(program, mesh, chip) or (), strict=False)),
      "collectives": [row._asdict() for row in traffic(program, mesh)],
    }
    for program in programs
  ]


def print_chip_plan(programs: list[Program], mesh: Mapping[str, int], chip: Chip) -> None:
  """Print how the programs fit into the devices of a chip, and what they send."""
  print_memory(programs)
  for program in programs:
    share = program.memory / chip.memory
    fits = advice(program, chip) or f"fits, {1 - share:.0%} to spare"
    print(f"\n{program.name}: {share:.1%} of a device's {chip.memory / 2**30:.0f} GiB, {fits}")
    for path, bound in bounds(program, mesh, chip).items():
      turn = f"a turn of {path}" if path else "outside of loops"
      times = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in bound._asdict().items())
      print(f"  at least, {turn}: {times} ({program.work[path]:.3g} FLOPs on {program.module.n_devices} devices)")
    if utilized := utilization(program, mesh, chip):
      rates = [f"{tokens:.3g}" for tokens in speed(program, mesh, chip) or ()]
      said = [f"{share:.0%}, {rate} tokens/s" for share, rate in zip(utilized, rates, strict=True)]
      print(f"  MFU at most {said[0]}; {said[1]} if nothing is computed while something is sent")
    if program.useful:
      tokens = program.useful.tokens
      print(
        f"  FLOPs a token: {program.useful.flops / tokens:.3g} of the model, {program.work[''] / tokens:.3g} compiled"
      )
    if kernels := program.module.kernels:
      print("  kernels: " + ", ".join(f"{number} {name}" for name, number in sorted(kernels.items())))
    rows = traffic(program, mesh)
    if not rows:
      print("  sends nothing")
    for row in rows:
      where = f"in {row.loop}, {'?' if row.trips is None else row.trips} times" if row.loop else "once"
      print(f"  {row.number:4} {row.kind:18} along {' x '.join(row.axes):22} {_size(row.bytes):>10}  {where}")


def print_plan(mesh: Mesh, model: ModelConfig, phases: Mapping[str, Traceable]) -> None:
  """Print the mesh, the parameters and block pattern of a language model, and the memory of its programs."""
  print_model(mesh, model)
  print_memory(compile_phases(phases))


def print_encoder_plan(mesh: Mesh, params: Params, phases: Mapping[str, Traceable]) -> None:
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

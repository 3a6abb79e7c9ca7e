"""The printed plan of a dry run: the mesh, the size of the model, and the memory of each compiled program."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from selfrag_jax.model.config import ModelConfig, count_params
from selfrag_jax.train.phases.base import GradientPhase
from selfrag_jax.typing import Params


def print_plan(mesh: Mesh, model: ModelConfig, phases: Mapping[str, GradientPhase]) -> None:
  """Print the mesh, the parameters and block pattern of a language model, and the memory of its programs."""
  counts = count_params(model)
  _print_mesh(mesh)
  print(f"parameters  {', '.join(f'{name} {count:,}' for name, count in counts.items() if count)}")
  print(f"pattern     {model.to_dict()['block_pattern']}")
  print_programs(phases)


def print_encoder_plan(mesh: Mesh, params: Params, phases: Mapping[str, GradientPhase]) -> None:
  """Print the mesh, the parameters of an encoder, and the memory of its programs."""
  _print_mesh(mesh)
  print(f"parameters  {sum(leaf.size for leaf in jax.tree.leaves(params)):,}")
  print_programs(phases)


def print_programs(phases: Mapping[str, GradientPhase]) -> None:
  """Print the memory that each compiled program of the phases needs."""
  rows = []
  for name, phase in phases.items():
    for program, lowered in phase.lower().items():
      memory: Any = lowered.compile().memory_analysis()
      sizes = (memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes)
      rows.append((f"{name} {program}", sizes))
  width = max(len(title) for title, _ in rows) + 2
  print(f"{'a device':{width}}{'arguments':>12}{'temporary':>12}{'results':>12}  MiB")
  for title, sizes in rows:
    print(f"{title:{width}}" + "".join(f"{size / 2**20:12.1f}" for size in sizes))


def _print_mesh(mesh: Mesh) -> None:
  print(f"mesh        {dict(mesh.shape)} on {mesh.devices.size} {jax.devices()[0].platform} devices")

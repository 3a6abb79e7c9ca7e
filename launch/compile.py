"""Compile a training for devices that are not there: does it fit, and what does it send?

  python launch/compile.py --config=configs/refrag.py --topology=v5e:4x4 --config.mesh.fsdp=4 [--json=plan.json]

Topologies are v5e, v5p, v6e and tpu7x with a shape such as 4x4 or 2x2x4, and h100 with a number of devices. The real
programs of each phase are compiled, by the compiler of that hardware (`pip install 'jax[tpu]'`); nothing runs.
"""

import os
from pathlib import Path

from absl import flags
from command import read, run

flags.declare_key_flag("config")
TOPOLOGY = flags.DEFINE_string("topology", None, "The devices to compile for, such as v5e:4x4, v5p:2x2x4 or h100:8.")
JSON = flags.DEFINE_string("json", None, "Also write the plan to this file.")


def main(argv: list[str]) -> None:
  """Compile every program of the config's phases and print what it needs."""
  os.environ.setdefault("JAX_PLATFORMS", "cpu")  # what is built on the way needs no accelerator, and may find none
  config = read(argv)
  if TOPOLOGY.value is None:
    raise ValueError("which devices? --topology=v5e:4x4, or another one; --help lists them")
  from selfrag_jax.aot.chips import topology
  from selfrag_jax.mesh import absent, configure_xla

  configure_xla()
  chip, devices = topology(TOPOLOGY.value)
  import bm25s  # noqa: F401  # its import runs a JAX operation, which must not meet a mesh of absent devices
  import jax

  from selfrag_jax.aot.programs import compile_phases
  from selfrag_jax.aot.table import as_json, print_chip_plan, print_mesh
  from selfrag_jax.experiments.base import find
  from selfrag_jax.storage.atomic import write_json

  module = find(config["experiment"])
  plan = getattr(module, "planned", None)
  if plan is None:
    raise ValueError(
      f"config.experiment is {config['experiment']!r}: it trains nothing, so there is nothing to compile"
    )
  with absent(devices):
    experiment = module.build(config)
    with jax.set_mesh(experiment.mesh):
      print_mesh(experiment.mesh)
      programs = compile_phases(plan(experiment))
  mesh = dict(experiment.mesh.shape)
  print_chip_plan(programs, mesh, chip)
  if JSON.value:
    about = {"topology": TOPOLOGY.value, "mesh": mesh, "programs": as_json(programs, mesh, chip)}
    write_json(Path(JSON.value), about)


if __name__ == "__main__":
  run(main)

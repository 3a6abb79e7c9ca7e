"""Compile a training for devices that are not there: does it fit, and what does it send?

  python launch/compile.py --config=configs/refrag.py --topology=v5e:4x4 --config.mesh.fsdp=4 [--json=plan.json]

Topologies are v5e, v5p, v6e and tpu7x with a shape such as 4x4 or 2x2x4 (4x4*2: two slices), and h100 with a number of
devices. The real programs of each phase are compiled, by the compiler of that hardware (`pip install 'jax[tpu]'`);
nothing runs, and a pretrained model needs no weights.

`--sweep=mesh --sweep=remat` compiles every combination of data and fsdp, and of what the backward pass computes again,
and ranks them by the least time of a step of every phase; `--sweep=mesh.tensor=1,2,4` tries values of any key. Each
takes as long as a plan; with `--json=FILE`, a sweep that was stopped goes on.
"""

import os
from functools import partial
from importlib import metadata
from pathlib import Path

from absl import flags
from command import MESH, read, run

for shared in ("config", "mesh"):
  flags.declare_key_flag(shared)
TOPOLOGY = flags.DEFINE_string("topology", None, "The devices to compile for, such as v5e:4x4, v5p:2x2x4 or h100:8.")
JSON = flags.DEFINE_string("json", None, "Also write the plan to this file.")
SWEEP = flags.DEFINE_multi_string("sweep", [], "Rank plans: KEY=VALUE,VALUE, or mesh, or remat; may come repeatedly.")


def main(argv: list[str]) -> None:
  """Compile every program of the config's phases and print what it needs, or rank plans."""
  os.environ.setdefault("JAX_PLATFORMS", "cpu")  # what is built on the way needs no accelerator, and may find none
  config = read(argv)
  if TOPOLOGY.value is None:
    raise ValueError("which devices? --topology=v5e:4x4, or another one; --help lists them")
  from selfrag_jax.aot.chips import topology
  from selfrag_jax.mesh import configure_xla

  configure_xla()
  if JSON.value and not Path(JSON.value).absolute().parent.is_dir():
    raise ValueError(f"--json={JSON.value}: there is no folder {Path(JSON.value).parent}")
  chip, devices = topology(TOPOLOGY.value)
  from selfrag_jax.aot import sweep
  from selfrag_jax.aot.table import as_json, print_chip_plan
  from selfrag_jax.experiments.base import plan
  from selfrag_jax.storage.atomic import write_json
  from selfrag_jax.storage.json_lines import read_json_object

  if SWEEP.value:
    if MESH.value and any(key.startswith("mesh") for key in SWEEP.value):
      raise ValueError(f"--mesh={MESH.value} sets every size of the mesh; give it, or a sweep of them")
    choices = sweep.candidates(config, SWEEP.value, len(devices))
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib")}
    about = {
      "topology": TOPOLOGY.value,
      "config": config,
      "versions": versions,
      "flags": os.environ.get("LIBTPU_INIT_ARGS", ""),
    }
    sweep.print_ranking(sweep.sweep(config, choices, chip, partial(plan, devices=devices), about, JSON.value or ""))
    return
  if JSON.value and Path(JSON.value).exists() and "plans" in read_json_object(Path(JSON.value), "a plan"):
    raise ValueError(f"{JSON.value} holds a sweep, which took longer than a plan; give another --json")
  mesh, programs = plan(config, devices)
  print_chip_plan(programs, mesh, chip)
  if JSON.value:
    write_json(Path(JSON.value), {"topology": TOPOLOGY.value, "mesh": mesh, "programs": as_json(programs, mesh, chip)})


if __name__ == "__main__":
  run(main)

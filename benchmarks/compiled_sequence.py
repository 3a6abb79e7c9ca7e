"""What a chip sends in a training step whose rows are split over chips, over what it sends where whole rows are.

  python benchmarks/compiled_sequence.py [--topology=v5e:4x4] [--layers=6]

Compiles the update of `configs/pretrain.py:hybrid_1b_v5e256` with `sequence` of 1 and of 2, for devices that are not
there: as many shards of the parameters, and as many tokens a chip. The bound is 2.
"""

import sys
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compiled_flops import LAYERS, TOPOLOGY, compile_update
from selfrag_jax.aot.chips import topology
from selfrag_jax.aot.roofline import bounds, traffic
from selfrag_jax.mesh import configure_xla

BOUND = 2.0
flags.set_default(TOPOLOGY, "v5e:4x4")
flags.set_default(LAYERS, 6)


def main(_) -> None:
  """Compile both and print what they send."""
  configure_xla()
  chip, devices = topology(TOPOLOGY.value)
  sent = {}
  print(f"{'sequence':>8}{'MiB a chip':>12}{'wire, ms':>10}{'keys, values, states, MiB':>28}", flush=True)
  for parts in (1, 2):
    sizes = {"data": 1, "fsdp": len(devices) // parts, "sequence": parts}
    program, experiment = compile_update(devices, sizes)
    mesh = dict(experiment.mesh.shape)
    rows = [(row, row.bytes * (row.trips or 1) / 2**20) for row in traffic(program, mesh)]
    sent[parts] = sum(bytes_ for _, bytes_ in rows)
    of_rows = sum(bytes_ for row, bytes_ in rows if row.axes == ("sequence",) and row.loop)
    wire = 1e3 * bounds(program, mesh, chip)[""].wire
    print(f"{parts:8}{sent[parts]:12.0f}{wire:10.1f}{of_rows:28.0f}", flush=True)
  print(f"ratio {sent[2] / sent[1]:.2f}, bound {BOUND:.0f}")
  sys.exit(sent[2] > BOUND * sent[1])


if __name__ == "__main__":
  app.run(main)

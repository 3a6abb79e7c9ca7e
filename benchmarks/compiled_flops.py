"""The FLOPs of products in a compiled training step, over those of the formula: how much a compiler adds.

  python benchmarks/compiled_flops.py [--topology=v5p:8x8x4] [--layers=30]

Compiles the update of `configs/pretrain.py:hybrid_1b_v5e256` for devices that are not there, without Pallas kernels,
whose products the compiler does not see; the formula counts attention in full, too, as XLA computes it. The bounds are
1.05 without rematerialisation (`none`) and 1.40 with all of it (`full`), of which the formula knows nothing.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.pretrain import LARGE, get_config
from selfrag_jax.aot.chips import topology
from selfrag_jax.aot.programs import Program, compile_phases
from selfrag_jax.experiments.self_rag import Experiment, build, planned
from selfrag_jax.mesh import absent, configure_xla
from selfrag_jax.model.config import flops_per_token

TOPOLOGY = flags.DEFINE_string("topology", "v5p:8x8x4", "The devices to compile for; activations of `none` must fit.")
LAYERS = flags.DEFINE_integer("layers", 30, "Layers of the model, a multiple of 6.")


def compile_update(devices: Sequence[Any], mesh: Mapping[str, int], **model: Any) -> tuple[Program, Experiment]:
  """Compile the update of a billion parameters, changed, for devices that are not there; any text serves."""
  with tempfile.TemporaryDirectory() as folder:
    text = Path(folder, "text.txt")
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 20_000)
    config = get_config(LARGE)
    config.data.path, config.workdir = str(text), folder
    config.model.update({"n_layers": LAYERS.value, **model})
    config.model.block_pattern = f"MMMMMT*{LAYERS.value // 6}"
    config.mesh.update(mesh)
    with absent(devices):
      experiment = build(config.to_dict())
      with jax.set_mesh(experiment.mesh):
        [program] = compile_phases(planned(experiment))
  return program, experiment


def main(_) -> None:
  """Compile each policy of rematerialisation and print its FLOPs."""
  configure_xla()
  _, devices = topology(TOPOLOGY.value)
  print(f"{'remat':8}{'a token, formula':>20}{'compiled':>12}{'ratio':>8}{'bound':>8}", flush=True)
  within = True
  for remat, bound in (("none", 1.05), ("full", 1.40)):
    program, experiment = compile_update(devices, {"data": -1, "fsdp": 16}, remat=remat, kernels="xla")
    row_tokens = experiment.config["data"]["row_tokens"]
    tokens = experiment.config["pretrain"]["batch_size"] * row_tokens
    expected = 3 * flops_per_token(experiment.model, row_tokens)
    found = program.work[""] / tokens
    print(f"{remat:8}{expected:20.4g}{found:12.4g}{found / expected:8.3f}{bound:8.2f}", flush=True)
    within &= found <= bound * expected
  sys.exit(not within)


if __name__ == "__main__":
  app.run(main)

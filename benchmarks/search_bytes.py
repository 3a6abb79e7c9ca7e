"""The bytes that a search moves on a TPU, over the bytes of the embeddings: the kernel beside XLA's search.

  python benchmarks/search_bytes.py [--topology=v5e:2x2] [--rows=1048576] [--width=384] [--k=8]

Compiles `configs/search.py` for a TPU that is not there, with `rows` on each chip, and adds up what the text of the
program reads from the chip's memory and writes to it. `kernel` is its Pallas kernel alone, whose blocks are read once.
"""

import sys
from pathlib import Path
from unittest import mock

from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TOPOLOGY = flags.DEFINE_string("topology", "v5e:2x2", "The devices to compile for.")
ROWS = flags.DEFINE_integer("rows", 2**20, "Rows of the memory on each chip.")
WIDTH = flags.DEFINE_integer("width", 384, "Their width.")
K = flags.DEFINE_integer("k", 8, "Rows to find.")


def main(_) -> None:
  """Compile each search and print its bytes."""
  import numpy as np

  from configs.search import get_config
  from selfrag_jax.aot.chips import topology
  from selfrag_jax.aot.hbm import moved, moved_by
  from selfrag_jax.aot.programs import compile_phases
  from selfrag_jax.experiments.search import build
  from selfrag_jax.memory import topk_tpu
  from selfrag_jax.mesh import absent

  chip, devices = topology(TOPOLOGY.value)
  print(f"{'':24}{'kernel':>10}{'search':>10}{'ms':>8}{'XLA':>10}{'ms':>8}{'approx':>10}{'ms':>8}")
  for dtype in ("float32", "bfloat16", "int8"):
    for queries in (1, 32):
      config = get_config()
      config.memory.update({"rows": ROWS.value * len(devices), "width": WIDTH.value, "dtype": dtype})
      config.search.update({"queries": queries, "k": K.value})
      embeddings = ROWS.value * WIDTH.value * np.dtype(dtype).itemsize
      of = {}
      for name, method, has_kernel in (
        ("search", "exact", True),
        ("XLA", "exact", False),
        ("approx", "approx", False),
      ):
        config.search.method = method
        with absent(devices), mock.patch.object(topk_tpu, "fits", topk_tpu.fits if has_kernel else lambda state: False):
          of[name] = compile_phases({"search": build(config.to_dict())})[0].module
      kernel = moved_by(of["search"], "custom-call", "bin_maxima")
      print(f"{dtype:12}{queries:4} queries{kernel / embeddings:10.3f}", end="")
      for module in of.values():
        size = moved(module)[""]
        print(f"{size / embeddings:10.3f}{1e3 * size / chip.bandwidth:8.3f}", end="")
      print(flush=True)


if __name__ == "__main__":
  app.run(main)

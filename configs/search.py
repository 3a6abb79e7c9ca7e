"""Search of a memory of random rows, split over all devices: its time here, or its plan for a pod that is not there.

  python launch/eval.py --config=configs/search.py --config.memory.rows=1000000 --config.memory.dtype=int8
  python launch/compile.py --config=configs/search.py:v5e_1b --topology=v5e:16x16

Variants: `here`; `v5e_10m`, `v5e_100m` and `v5e_1b` with that many rows of 384 numbers in int8. The first command fills
a memory, and writes search.json and .csv: `ms` of a search for 32 queries at a time, `gb_per_second` of embeddings, and
`found`, the share of the queries that found the row that they were made of. The second prints bytes and milliseconds.
"""

import ml_collections

from selfrag_jax.experiments import search
from selfrag_jax.settings import full_config

ROWS = {"here": 100_000, "v5e_10m": 10_000_000, "v5e_100m": 100_000_000, "v5e_1b": 1_000_000_000}


def get_config(variant: str = "here") -> ml_collections.ConfigDict:
  """Return the config of a variant."""
  if variant not in ROWS:
    raise ValueError(f"configs/search.py has the variants {', '.join(ROWS)}, not {variant!r}")
  differences = {
    "experiment": "search",
    "seed": 0,
    "workdir": f"runs/search_{variant}",
    "memory": {"rows": ROWS[variant], "dtype": "float32" if variant == "here" else "int8"},
  }
  return full_config(search.SECTIONS, differences)

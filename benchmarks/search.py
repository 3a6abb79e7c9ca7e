"""Exact search on the device beside ScaNN's brute force and faiss's IndexFlatIP, on the same vectors.

  python benchmarks/search.py [--rows=100000] [--width=384] [--repeats=15]

All use every core and take turns in one process. Prints the median time of each, and ours as a ratio to the best peer.
Exit code 1 if one of them finds other rows. faiss comes with `pip install -e '.[peers]'`.
"""

import importlib.util
import os
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np
from absl import app, flags

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # faiss's idle threads must not spin through the turns of others
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROWS = flags.DEFINE_integer("rows", 100_000, "Vectors in the memory.")
WIDTH = flags.DEFINE_integer("width", 384, "Their width.")
REPEATS = flags.DEFINE_integer("repeats", 15, "Timed turns.")
BATCHES, K = (1, 32, 256), 10


def main(_) -> None:
  """Time all and print the table."""
  from selfrag_jax.memory.state import init_memory, write
  from selfrag_jax.memory.topk import search
  from selfrag_jax.mesh import configure_xla

  configure_xla()
  rng = np.random.default_rng(0)
  vectors = rng.normal(size=(ROWS.value, WIDTH.value)).astype(np.float32)
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  state = jax.jit(write)(init_memory(ROWS.value, WIDTH.value), vectors)
  find = jax.jit(lambda state, queries: search(state, queries, K, metric="dot"))
  methods = {"selfrag_jax": lambda queries: jax.device_get(find(state, queries).slots)}

  import scann

  brute_force = scann.scann_ops_pybind.builder(vectors, K, "dot_product").score_brute_force().build()
  methods["ScaNN"] = lambda queries: (
    brute_force.search_batched_parallel(queries)[0] if len(queries) > 1 else brute_force.search(queries[0])[0]
  )
  if importlib.util.find_spec("faiss"):
    import faiss

    flat = faiss.IndexFlatIP(WIDTH.value)
    flat.add(vectors)
    methods["faiss"] = lambda queries: flat.search(queries, K)[1]

  wrong = []
  print(f"{ROWS.value:,} x {WIDTH.value} float32, top {K}, median of {REPEATS.value} in ms")
  print(f"{'batch':>6}" + "".join(f"{name:>14}" for name in methods) + f"{'to the best':>14}")
  for batch in BATCHES:
    queries = rng.normal(size=(batch, WIDTH.value)).astype(np.float32)
    times: dict[str, list[float]] = {name: [] for name in methods}
    found = {name: np.asarray(method(queries)) for name, method in methods.items()}
    for _ in range(REPEATS.value):
      for name, method in methods.items():
        start = time.perf_counter()
        method(queries)
        times[name].append(time.perf_counter() - start)
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    ours = medians.pop("selfrag_jax")
    ratio = ours / min(medians.values())
    print(f"{batch:6}{ours:14.2f}" + "".join(f"{value:14.2f}" for value in medians.values()) + f"{ratio:13.2f}x")
    for name, slots in found.items():
      same = np.mean(np.sort(slots.reshape(batch, K)) == np.sort(found["selfrag_jax"]))
      if same < 0.999:
        wrong.append(f"batch {batch}: {name} finds {same:.3f} of the same rows")
  if wrong:
    raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
  app.run(main)

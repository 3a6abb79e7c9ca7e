"""Exact search on the device beside torch there, ScaNN's brute force and faiss's IndexFlatIP, on the same vectors.

  python benchmarks/search.py [--rows=100000] [--width=384] [--turns=10]

Each library has a process of its own, with its default threads; they take turns, and only one works at a time. A turn
is one search that is not timed and three that are. Prints the median time of each library, and ours as a ratio to the
best peer. Exit code 1 if a library finds other rows. A library that is not installed is left out; faiss comes with
`pip install -e '.[peers]'`. On a GPU, torch is on it, too.
"""

import importlib.util
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROWS = flags.DEFINE_integer("rows", 100_000, "Vectors in the memory.")
WIDTH = flags.DEFINE_integer("width", 384, "Their width.")
TURNS = flags.DEFINE_integer("turns", 10, "Of each method.")
BATCHES, K, TIMED = (1, 32, 256), 10, 3
PAUSE = 0.3  # seconds between turns, until the idle threads of the turn before have stopped spinning

Search = Callable[[np.ndarray], np.ndarray]


def ours(vectors: np.ndarray) -> Search:
  """Search a `MemoryState`."""
  import jax

  from selfrag_jax.memory.state import init_memory, write
  from selfrag_jax.memory.topk import search
  from selfrag_jax.mesh import configure_xla

  configure_xla()
  state = jax.jit(write)(init_memory(*vectors.shape), vectors)
  find = jax.jit(lambda state, queries: search(state, queries, K, metric="dot"))
  return lambda queries: jax.device_get(find(state, queries).slots)


def scann(vectors: np.ndarray) -> Search:
  """Search with ScaNN, which uses all cores for a batch and one core for a single query."""
  import scann

  index = scann.scann_ops_pybind.builder(vectors, K, "dot_product").score_brute_force().build()
  return lambda queries: (
    index.search_batched_parallel(queries)[0] if len(queries) > 1 else index.search(queries[0])[0][None]
  )


def faiss(vectors: np.ndarray) -> Search:
  """Search with faiss."""
  import faiss

  index = faiss.IndexFlatIP(vectors.shape[1])
  index.add(vectors)
  return lambda queries: index.search(queries, K)[1]


def torch(vectors: np.ndarray) -> Search:
  """Search with a product and a top-k of torch, on a GPU if there is one."""
  import torch

  device = "cuda" if torch.cuda.is_available() else "cpu"
  rows = torch.from_numpy(vectors).to(device).T
  return lambda queries: torch.topk(torch.from_numpy(queries).to(device) @ rows, K).indices.cpu().numpy()


METHODS = {"selfrag_jax": ours, "torch": torch, "ScaNN": scann, "faiss": faiss}


def work(name: str, rows: int, width: int, pipe: Connection) -> None:
  """Answer batches of queries, with the times of the counted searches."""
  rng = np.random.default_rng(0)
  vectors = rng.normal(size=(rows, width)).astype(np.float32)
  find = METHODS[name](vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
  while (queries := pipe.recv()) is not None:
    found, times = find(queries), []
    for _ in range(TIMED):
      start = time.perf_counter()
      find(queries)
      times.append(time.perf_counter() - start)
    pipe.send((np.asarray(found), times))


def main(_) -> None:
  """Time all libraries and print the table."""
  context = multiprocessing.get_context("spawn")
  names = [name for name in METHODS if importlib.util.find_spec(name.lower())]
  pipes, workers = {}, []
  for name in names:
    pipes[name], end = context.Pipe()
    workers.append(context.Process(target=work, args=(name, ROWS.value, WIDTH.value, end), daemon=True))
    workers[-1].start()
    end.close()
  rng, wrong = np.random.default_rng(1), []
  print(f"{ROWS.value:,} x {WIDTH.value} float32, top {K}, median of {TURNS.value} x {TIMED} in ms")
  print(f"{'batch':>6}" + "".join(f"{name:>14}" for name in names) + f"{'to the best':>14}")
  for batch in BATCHES:
    times: dict[str, list[float]] = {name: [] for name in names}
    found = {}
    for turn in range(TURNS.value + 1):  # the first one compiles
      queries = rng.normal(size=(batch, WIDTH.value)).astype(np.float32)
      for name, pipe in pipes.items():
        time.sleep(PAUSE)
        pipe.send(queries)
        found[name], taken = pipe.recv()
        times[name] += taken if turn else []
      for name in names:
        same = np.mean(np.sort(found[name]) == np.sort(found["selfrag_jax"]))
        if same < 0.999:
          wrong.append(f"batch {batch}: {name} finds {same:.3f} of the same rows")
    medians = [1e3 * statistics.median(times[name]) for name in names]
    ratio = medians[0] / min(medians[1:])
    print(f"{batch:6}" + "".join(f"{value:14.2f}" for value in medians) + f"{ratio:13.2f}x", flush=True)
  for pipe, worker in zip(pipes.values(), workers, strict=True):
    pipe.send(None)
    worker.join()
  if wrong:
    raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
  app.run(main)

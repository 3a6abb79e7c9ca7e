"""The speed at which a `MemoryStore` in a folder takes chunks, and the number of programs that this compiles.

  python benchmarks/store.py [--chunks=10000] [--batch=64] [--width=384]

Chunks come with their embeddings, in batches, with the log on; after every tenth batch, a search updates the memory on
the device. Each backend starts from an empty folder. Prints the chunks per second, with and without the searches, and
the number of programs that XLA compiled after the first search.
"""

import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CHUNKS = flags.DEFINE_integer("chunks", 10_000, "Chunks to add.")
BATCH = flags.DEFINE_integer("batch", 64, "Chunks added at once.")
WIDTH = flags.DEFINE_integer("width", 384, "Width of their embeddings.")


def main(_) -> None:
  """Fill a store with each backend and print the table."""
  from selfrag_jax.memory.store import MemoryStore

  compiled: list[float] = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compiled.append(seconds) if event.endswith("backend_compile_duration") else None
  )
  rng = np.random.default_rng(0)
  embeddings = rng.normal(size=(CHUNKS.value, WIDTH.value)).astype(np.float32)
  texts = [f"chunk {i} says something" for i in range(CHUNKS.value)]
  tokens = [[i % 97 + 1] * 32 for i in range(CHUNKS.value)]
  print(f"{CHUNKS.value:,} chunks of width {WIDTH.value} in batches of {BATCH.value}, log on")
  print(f"{'backend':>8}{'chunks/s':>12}{'with searches':>16}{'programs':>10}{'later':>8}")
  for backend in ("numpy", "exact"):
    adding = searching = 0.0
    first = 0
    compiled.clear()
    with (
      tempfile.TemporaryDirectory() as folder,
      MemoryStore(WIDTH.value, CHUNKS.value, path=f"{folder}/store", backend=backend) as store,
    ):
      for number, start in enumerate(range(0, CHUNKS.value, BATCH.value)):
        part = slice(start, start + BATCH.value)
        began = time.perf_counter()
        store.add_many(texts[part], embeddings[part], token_ids=tokens[part])
        added = time.perf_counter()
        if number % 10 == 0:
          store.search_batched(embeddings[:1], 5)
        adding, searching = adding + added - began, searching + time.perf_counter() - added
        if not number:
          first, searching = len(compiled), 0.0  # compiling is not counted
      assert store.size == CHUNKS.value
    rates = CHUNKS.value / adding, CHUNKS.value / (adding + searching)
    print(f"{backend:>8}{rates[0]:12,.0f}{rates[1]:16,.0f}{first:10}{len(compiled) - first:8}")


if __name__ == "__main__":
  app.run(main)

"""The ScaNN backend of `MemoryStore` beside the exact one, on embeddings of real sentences.

  python benchmarks/approximate.py --data=FOLDER --encoder=MINILM_FOLDER [--cache=vectors.npy]

Cuts the .txt, .json and .jsonl files below the folder into sentences and embeds them with all-MiniLM-L6-v2 (mean
pooling, transformers on torch). A hundredth of the sentences are queries, the others are the memory. Prints recall@10
of the approximate search against the exact one, and the queries per second of both, which search in turns, one query at
a time. Embedding 80,000 sentences takes minutes; `--cache` keeps the vectors.
"""

import json
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DATA = flags.DEFINE_string("data", None, "Text files.", required=True)
ENCODER = flags.DEFINE_string(
  "encoder", "sentence-transformers/all-MiniLM-L6-v2", "Its folder, or its name on the hub."
)
CACHE = flags.DEFINE_string("cache", None, "A file for the embeddings.")
SENTENCES = flags.DEFINE_integer("sentences", 100_000, "At most.")
REPEATS = flags.DEFINE_integer("repeats", 5, "Timed turns of 200 queries each.")
K = 10


def texts(value: Any) -> Iterator[str]:
  """Yield every text of a JSON value."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, list | dict):
    for part in value.values() if isinstance(value, dict) else value:
      yield from texts(part)


def sentences(folder: Path) -> list[str]:
  """List the distinct sentences of at least five words."""
  found: dict[str, None] = {}
  for file in sorted(folder.rglob("*")):
    if file.suffix == ".txt":
      whole = iter([file.read_text(encoding="utf-8")])
    elif file.suffix in (".json", ".jsonl"):
      documents = [file.read_text(encoding="utf-8")] if file.suffix == ".json" else file.open(encoding="utf-8")
      whole = (text for document in documents for text in texts(json.loads(document)))
    else:
      continue
    for text in whole:
      for sentence in re.split(r"(?<=[.!?])\s+|\n+", text):
        if len(sentence.split()) >= 5:
          found[sentence.strip()] = None
  return list(found)[: SENTENCES.value]


def embed(lines: list[str]) -> np.ndarray:
  """Embed sentences as unit vectors."""
  import torch
  from transformers import AutoModel, AutoTokenizer

  tokenizer, model = AutoTokenizer.from_pretrained(ENCODER.value), AutoModel.from_pretrained(ENCODER.value).eval()
  order, out = sorted(range(len(lines)), key=lambda i: len(lines[i])), np.zeros((len(lines), 384), np.float32)
  with torch.inference_mode():
    for start in range(0, len(order), 128):
      part = order[start : start + 128]
      batch = tokenizer([lines[i] for i in part], padding=True, truncation=True, max_length=64, return_tensors="pt")
      states, mask = model(**batch).last_hidden_state, batch["attention_mask"][:, :, None]
      pooled = (states * mask).sum(1) / mask.sum(1)
      out[part] = torch.nn.functional.normalize(pooled, dim=1).numpy()
      if start // 128 % 100 == 0:
        print(f"embedded {start:,} of {len(order):,}", file=sys.stderr, flush=True)
  return out


def main(_) -> None:
  """Fill both stores, compare and time them."""
  from selfrag_jax.memory.store import MemoryStore
  from selfrag_jax.mesh import configure_xla

  configure_xla()
  cache = Path(CACHE.value) if CACHE.value else None
  if cache and cache.exists():
    vectors = np.load(cache, allow_pickle=False)
  else:
    vectors = embed(sentences(Path(DATA.value)))
    if cache:
      np.save(cache, vectors, allow_pickle=False)
  vectors = np.random.default_rng(0).permutation(vectors)
  n_queries = len(vectors) // 100
  queries, rows = vectors[:n_queries], vectors[n_queries:]
  stores = {}
  for backend in ("exact", "scann"):
    stores[backend] = store = MemoryStore(384, len(rows), chunk_size=0, backend=backend)
    for start in range(0, len(rows), 4096):
      part = rows[start : start + 4096]
      store.add_many(["sentence"] * len(part), part)
  stores["scann"].wait_for_index()
  found = {
    name: [[chunk.id for chunk in row] for row in store.search_batched(queries, K)] for name, store in stores.items()
  }
  positions = {name: {id: i for i, id in enumerate(store.ids)} for name, store in stores.items()}
  hits = [
    len({positions["exact"][id] for id in exact} & {positions["scann"][id] for id in approximate})
    for exact, approximate in zip(found["exact"], found["scann"], strict=True)
  ]
  rates: dict[str, list[float]] = {name: [] for name in stores}
  for _ in range(REPEATS.value):
    for name, store in stores.items():
      start = time.perf_counter()
      for query in queries[:200]:
        store.search_batched(query[None], K)
      rates[name].append(len(queries[:200]) / (time.perf_counter() - start))
  exact, scann = (statistics.median(rates[name]) for name in ("exact", "scann"))
  print(f"{len(rows):,} sentences, {n_queries:,} queries, recall@{K} {np.mean(hits) / K:.4f}")
  print(f"one query at a time: exact {exact:,.0f}/s, ScaNN {scann:,.0f}/s: {scann / exact:.1f}x")


if __name__ == "__main__":
  app.run(main)

"""BM25 beside bm25s with its numba backend on the same passages: the same scores, and the time of a query.

  python benchmarks/bm25.py [--passages=60000] [--queries=2000] [--turns=7]

Passages have 40 to 160 words, queries 5 to 12; the frequencies of words fall like those of a language. Both libraries
answer queries one at a time, from text to ids and scores, in one process, in turns. Prints the median time of a query
in the fastest turn of each, and ours as a ratio. Exit code 1 if scores differ.
"""

import logging
import random
import sys
import time
from pathlib import Path

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PASSAGES = flags.DEFINE_integer("passages", 60_000, "Passages.")
QUERIES = flags.DEFINE_integer("queries", 2000, "Queries of a turn.")
TURNS = flags.DEFINE_integer("turns", 7, "Turns of each.")
K = 10


def texts(n: int, shortest: int, longest: int, seed: int) -> list[str]:
  """Make texts of Zipf-like words."""
  rng = random.Random(0)
  syllables = [a + b for a in "bcdfglmnprst" for b in "aeiou"]
  words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(50_000)]
  weights = [1 / (rank + 3) for rank in range(len(words))]
  rng = random.Random(seed)
  return [" ".join(rng.choices(words, weights, k=rng.randint(shortest, longest))) for _ in range(n)]


def main(_: list[str]) -> None:
  """Index with both libraries, compare their scores, and time them in turns."""
  import bm25s
  from Stemmer import Stemmer

  from selfrag_jax.retrieval.bm25 import BM25Retriever
  from selfrag_jax.retrieval.document import Document

  logging.getLogger("bm25s").setLevel(logging.WARNING)
  passages, queries = texts(PASSAGES.value, 40, 160, 1), texts(QUERIES.value, 5, 12, 2)
  retriever = BM25Retriever()
  retriever.add_documents(Document(str(i), content=text) for i, text in enumerate(passages))
  stemmer = Stemmer("english")
  index = bm25s.BM25(method="lucene", k1=1.5, b=0.75, backend="numba")
  index.index(bm25s.tokenize(passages, stopwords="en", stemmer=stemmer, show_progress=False), show_progress=False)

  def theirs(query: str) -> np.ndarray:
    tokens = bm25s.tokenize(query, stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False)
    return index.retrieve(tokens, k=K, show_progress=False).scores[0]

  def ours(query: str) -> np.ndarray:
    return np.array([document.score for document in retriever.retrieve(query, K)])

  peers = {"selfrag_jax": ours, "bm25s": theirs}
  for query in queries[:200]:
    a, b = ours(query), theirs(query)
    if not np.allclose(a, b[b > 0][: len(a)], rtol=2e-5):
      sys.exit(f"other scores for {query!r}: {a}, {b}")
  medians: dict[str, list[float]] = {name: [] for name in peers}
  for _ in range(TURNS.value):
    for name, ask in peers.items():
      times = []
      for query in queries:
        start = time.perf_counter()
        ask(query)
        times.append(time.perf_counter() - start)
      medians[name].append(1000 * float(np.median(times)))
  for name, found in medians.items():
    print(f"{name:12} {min(found):.3f} ms a query   turns: {' '.join(f'{ms:.3f}' for ms in found)}")
  print(f"ours takes {min(medians['selfrag_jax']) / min(medians['bm25s']):.2f} times as long")


if __name__ == "__main__":
  app.run(main)

"""all-MiniLM-L6-v2 here beside float32 sentence-transformers on torch: the same vectors, the same quality, less time.

  python benchmarks/encoder.py --data=FOLDER [--timed=800] [--turns=3]

FOLDER holds folders in the layout of BEIR; `--sets` names them. Each library has a process of its own, with its default
threads, and they take turns. First both embed all passages and queries: prints the largest difference of a number, and
nDCG@10 of both. Then both embed the same passages, a sample over all sets, in turns: prints the passages per second of
the fastest turn, and ours as a ratio. Exit code 1 if vectors differ by more than 1e-4.
sentence-transformers comes with `pip install -e '.[peers]'`.
"""

import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DATA = flags.DEFINE_string("data", None, "Folder of the sets.", required=True)
SETS = flags.DEFINE_list("sets", ["multihop_hotpotqa", "multihop_musique", "ir_squad_dev_half"], "Folders in it.")
TIMED = flags.DEFINE_integer("timed", 800, "Passages of a timed turn.")
TURNS = flags.DEFINE_integer("turns", 3, "Timed turns of each.")
PAUSE = 0.5  # seconds between turns, until the idle threads of the turn before have stopped spinning

Embed = Callable[[Sequence[str]], np.ndarray]


def ours() -> Embed:
  """Embed in JAX, on the devices of this machine."""
  from selfrag_jax.encoders.load import load_encoder
  from selfrag_jax.mesh import configure_xla

  configure_xla()
  return load_encoder("all-MiniLM-L6-v2", "float32")


def theirs() -> Embed:
  """Embed with sentence-transformers, as it does by default."""
  import os

  os.environ["TQDM_DISABLE"] = "1"
  from sentence_transformers import SentenceTransformer

  from selfrag_jax.encoders.bert import locate_bert

  model = SentenceTransformer(str(locate_bert("all-MiniLM-L6-v2")))
  return lambda texts: model.encode(list(texts), show_progress_bar=False)


PEERS = {"selfrag_jax": ours, "sentence-transformers": theirs}


def work(name: str, pipe: Connection) -> None:
  """Embed the texts that come through the pipe, and send back the vectors and the time."""
  embed = PEERS[name]()
  while (texts := pipe.recv()) is not None:
    start = time.perf_counter()
    rows = np.asarray(embed(texts))
    pipe.send((rows, time.perf_counter() - start))


def quality(documents: np.ndarray, queries: np.ndarray, ids: Sequence[str], qrels: Sequence[dict[str, float]]) -> float:
  """Return the mean nDCG@10 of the exact ranking by inner product."""
  from selfrag_jax.metrics.retrieval import ndcg

  order = np.argsort(-(queries @ documents.T), axis=1, kind="stable")[:, :10]
  return float(np.mean([ndcg([ids[i] for i in row], grades, 10) for row, grades in zip(order, qrels, strict=True)]))


def main(_: list[str]) -> None:
  """Compare and time."""
  from selfrag_jax.retrieval.beir import read_beir

  sets = {name: read_beir(Path(DATA.value) / name) for name in SETS.value}
  context = multiprocessing.get_context("spawn")
  pipes = {}
  for name in PEERS:
    pipes[name], far = context.Pipe()
    context.Process(target=work, args=(name, far), daemon=True).start()

  def ask(name: str, texts: Sequence[str]) -> tuple[np.ndarray, float]:
    pipes[name].send(list(texts))
    found = pipes[name].recv()
    time.sleep(PAUSE)
    return found

  worst, passages = 0.0, []
  for name, data in sets.items():
    texts, queries = [document.text for document in data.documents], list(data.queries.values())
    ids, qrels = [document.id for document in data.documents], list(data.qrels.values())
    rows = {peer: (ask(peer, texts)[0], ask(peer, queries)[0]) for peer in PEERS}
    gap = max(float(np.abs(a - b).max()) for a, b in zip(*rows.values(), strict=True))
    scores = [quality(*found, ids, qrels) for found in rows.values()]
    worst, passages = max(worst, gap), passages + texts
    print(f"{name}: {len(texts) + len(queries):,} texts, largest difference {gap:.1e}, nDCG@10 {scores[0]:.4f} here, "
          f"{scores[1]:.4f} there", flush=True)  # fmt: skip
  sample = [passages[i] for i in np.random.default_rng(0).permutation(len(passages))[: TIMED.value]]
  for name in PEERS:
    ask(name, sample)  # compiles the programs for new shapes
  times: dict[str, list[float]] = {name: [] for name in PEERS}
  for _ in range(TURNS.value):
    for name in PEERS:
      times[name].append(ask(name, sample)[1])
  for name in PEERS:
    turns = " ".join(f"{seconds:.2f}" for seconds in times[name])
    print(f"{name:22} {len(sample) / min(times[name]):8.1f} passages/s   turns of {turns} s")
  print(f"ours is {min(times['sentence-transformers']) / min(times['selfrag_jax']):.2f} times as fast")
  for pipe in pipes.values():
    pipe.send(None)
  sys.exit(worst > 1e-4)


if __name__ == "__main__":
  app.run(main)

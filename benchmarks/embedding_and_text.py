"""Language models as encoders and as language models: nDCG@10 on judged collections, and the perplexity of a text.

  python benchmarks/embedding_and_text.py --run=WORKDIR --run=OTHER --data=FOLDER --data=OTHER --text=FILE

Every model ranks the passages of each collection, a folder in the layout of BEIR, for all of its questions, and
predicts the text in windows of 1,024 tokens that do not overlap. The token bag ranks too. A run is a workdir of
`configs/encoder.py:smollm2_135m`; it is compared, by paired 95 % intervals, with its model as it was before its
training, fitted to the same passages and questions. Of several runs that began with the same model and data, the mean
difference has an interval over other runs and other questions. `--output` keeps nDCG@10 of every question.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from selfrag_jax.encoders.language_model import LMEncoder
from selfrag_jax.experiments import encoder as experiment
from selfrag_jax.experiments.retrieval import score
from selfrag_jax.metrics.statistics import bootstrap_difference, bootstrap_interval, crossed_interval
from selfrag_jax.model.likelihood import sequence_log_probs
from selfrag_jax.model.pretrained import load_pretrained, without_appended
from selfrag_jax.retrieval.beir import Judged, read_beir
from selfrag_jax.retrieval.dense import DenseRetriever
from selfrag_jax.storage.arrays import npz_bytes
from selfrag_jax.storage.atomic import write_bytes_atomic

DATA = flags.DEFINE_multi_string("data", [], "judged collections in the layout of BEIR")
TEXT = flags.DEFINE_string("text", None, "a text in UTF-8", required=True)
RUNS = flags.DEFINE_multi_string("run", None, "workdirs of trainings", required=True)
SCALE = flags.DEFINE_bool("fit_scale", False, "fit scale and weights of every model to the collection that it searches")
ROUNDED = flags.DEFINE_bool("bfloat16", False, "Round the inputs of products to bfloat16, where that is faster.")
OUTPUT = flags.DEFINE_string("output", None, "a file .npz for nDCG@10 of every question, by run and collection")
WINDOWS = flags.DEFINE_integer("windows", None, "score the first so many windows; None: all", lower_bound=1)
WINDOW = 1024


def perplexity(encoder: LMEncoder, vocab_size: int, text: str) -> tuple[float, int]:
  """Return the perplexity of a text, of the tokens after the first of each window, and the number of windows."""
  config, params = without_appended(encoder.config, encoder.params["model"], vocab_size)
  ids = encoder.tokenizer.encode(text)
  windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW)][: WINDOWS.value]
  total = jax.jit(lambda params, row: sequence_log_probs(config, params, row, jnp.ones_like(row)).sum())
  scores = [float(total(params, np.array([window]))) for window in windows]
  return math.exp(-sum(scores) / (len(windows) * (WINDOW - 1))), len(windows)


def untrained(config: dict[str, Any]) -> LMEncoder:
  """Return the model of a run as it was before the training, to compute in the same dtype as a trained one."""
  encoder = experiment.build(config).encoder
  encoder.config = dataclasses.replace(encoder.config, dtype="float32")
  return encoder


def ranked(retriever: DenseRetriever, data: Judged) -> np.ndarray:
  """Return nDCG@10 of each question."""
  retriever.add_documents(data.documents)
  return score(retriever, data)["ndcg@10"]


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise app.UsageError(f"unknown arguments {argv[1:]}")
  collections, text = {Path(path).name: read_beir(path) for path in DATA.value}, Path(TEXT.value).read_text("utf-8")
  for name, data in collections.items():
    found = ranked(DenseRetriever("token-bag"), data)
    print("token bag, {}: nDCG@10 {:.3f} [{:.3f}, {:.3f}]".format(name, found.mean(), *bootstrap_interval(found)))
  reports = [json.loads((Path(run) / "encoder.json").read_text("utf-8")) for run in RUNS.value]
  before: dict[str, dict[str, np.ndarray]] = {}
  after: dict[str, dict[str, dict[str, np.ndarray]]] = {}
  for run, config in zip(RUNS.value, (report["config"] for report in reports), strict=True):
    vocab_size = load_pretrained(config["init"]).base_vocab_size  # ids that were appended write nothing
    start = json.dumps([config["init"], config["data"]])  # runs with the same start share its scores
    if start not in before:
      before[start] = scored(f"before {run}", untrained(config), collections, text, vocab_size, {})
    trained = LMEncoder.load(Path(run) / "encoder", dtype="float32")
    after.setdefault(start, {})[run] = scored(run, trained, collections, text, vocab_size, before[start])
  for start, runs in after.items():
    for name in collections if len(runs) > 1 else ():
      gained = np.stack([found[name] for found in runs.values()]) - before[start][name]
      said = f"{len(runs)} runs from the same start, {name}: {gained.mean():+.3f} to before"
      print("{} [{:+.3f}, {:+.3f}] over other runs and other questions".format(said, *crossed_interval(gained)))
  if OUTPUT.value:
    kept = {f"before {i}": found for i, found in enumerate(before.values())}
    kept |= {Path(run).name: found for runs in after.values() for run, found in runs.items()}
    arrays = {f"{run}: {name}": found for run, each in kept.items() for name, found in each.items()}
    write_bytes_atomic(Path(OUTPUT.value), npz_bytes(arrays))


def scored(
  name: str,
  encoder: LMEncoder,
  collections: Mapping[str, Judged],
  text: str,
  vocab_size: int,
  before: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
  """Print the scores of a model, and differences to those `before`; return nDCG@10 of each question, by collection."""
  if ROUNDED.value:
    encoder = encoder.multiplying("bfloat16")
  scores = {}
  for collection, data in collections.items():
    if SCALE.value:
      encoder.fit_scale([document.text for document in data.documents])
    scores[collection] = found = ranked(DenseRetriever(encoder=encoder), data)
    said = "{}, {}: nDCG@10 {:.3f} [{:.3f}, {:.3f}]".format(name, collection, found.mean(), *bootstrap_interval(found))
    if collection in before:
      low, high = bootstrap_difference(found, before[collection])
      said += f", {(found - before[collection]).mean():+.3f} [{low:+.3f}, {high:+.3f}] to before"
    print(said, flush=True)
  found, n = perplexity(encoder, vocab_size, text)
  print(f"{name}: perplexity {found:.3f} over {n} windows of {WINDOW} tokens", flush=True)
  return scores


if __name__ == "__main__":
  app.run(main)

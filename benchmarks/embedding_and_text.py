"""Language models as encoders and as language models: nDCG@10 on judged collections, and the perplexity of a text.

  python benchmarks/embedding_and_text.py --data=FOLDER --data=OTHER --train=FOLDER --text=FILE [--model=FOLDER ...]

Every model ranks the passages of each collection, a folder in the layout of BEIR, for all of its questions, and
predicts the text in windows of 1,024 tokens that do not overlap. The token bag ranks too. The first model, an untrained
one, is what the others are compared with, by paired 95 % intervals. It is fitted, as they were before their training,
to the documents and questions with which `configs/encoder.py:smollm2_135m` trains on the folder `--train` and, where
that had them, on the passages of `--unlabelled`.
"""

import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.encoder import get_config
from selfrag_jax.encoders.language_model import LMEncoder
from selfrag_jax.experiments import encoder as experiment
from selfrag_jax.experiments.retrieval import score
from selfrag_jax.metrics.statistics import bootstrap_difference, bootstrap_interval
from selfrag_jax.model.likelihood import sequence_log_probs
from selfrag_jax.model.pretrained import load_pretrained, without_appended
from selfrag_jax.retrieval.beir import Judged, read_beir
from selfrag_jax.retrieval.dense import DenseRetriever

DATA = flags.DEFINE_multi_string("data", [], "judged collections in the layout of BEIR")
TRAIN = flags.DEFINE_string("train", None, "the collection of the training", required=True)
UNLABELLED = flags.DEFINE_string("unlabelled", "", "config.data.unlabelled of the training")
TEXT = flags.DEFINE_string("text", None, "a text in UTF-8", required=True)
MODELS = flags.DEFINE_multi_string("model", [], "folders of trained encoders, beside the first model")
FIRST = flags.DEFINE_string("first", "smollm2-135m", "the untrained model")
SCALE = flags.DEFINE_bool("fit_scale", False, "fit scale and weights of every model to the collection that it searches")
ROUNDED = flags.DEFINE_bool("bfloat16", False, "Round the inputs of products to bfloat16, where that is faster.")
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


def untrained() -> LMEncoder:
  """Return the first model as it is before the training."""
  config = get_config("smollm2_135m")
  config.init, config.data.path, config.data.unlabelled = FIRST.value, TRAIN.value, UNLABELLED.value
  return experiment.build(config.to_dict()).encoder


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
  before: dict[str, np.ndarray] = {}
  vocab_size = load_pretrained(FIRST.value).base_vocab_size  # ids that were appended write nothing
  for place, source in enumerate([FIRST.value, *MODELS.value]):
    encoder = LMEncoder.load(source, dtype="float32") if place else untrained()
    if ROUNDED.value:
      encoder = encoder.multiplying("bfloat16")
    for name, data in collections.items():
      if SCALE.value:
        encoder.fit_scale([document.text for document in data.documents])
      found = ranked(DenseRetriever(encoder=encoder), data)
      said = "{}, {}: nDCG@10 {:.3f} [{:.3f}, {:.3f}]".format(source, name, found.mean(), *bootstrap_interval(found))
      if name in before:
        low, high = bootstrap_difference(found, before[name])
        said += f", {(found - before[name]).mean():+.3f} [{low:+.3f}, {high:+.3f}] to the first"
      before.setdefault(name, found)
      print(said, flush=True)
    found, n = perplexity(encoder, vocab_size, text)
    print(f"{source}: perplexity {found:.3f} over {n} windows of {WINDOW} tokens", flush=True)


if __name__ == "__main__":
  app.run(main)

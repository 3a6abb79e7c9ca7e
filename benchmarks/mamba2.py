"""A Mamba-2 layer here beside that of transformers on torch: the same weights, a forward and a backward pass.

  python benchmarks/mamba2.py [--tokens=2048] [--repeats=7]

One layer with 8 heads of width 64 and 64 states, one row, float32, on this machine's cores. Transformers runs its code
in plain torch, which is what a CPU has of it. Both compute the gradient of the same sum by all parameters, in turn, in
one process; medians. Prints the largest difference of the hidden states, and the ratio of the times.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TOKENS = flags.DEFINE_integer("tokens", 2048, "Tokens of the row.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 7, "Timed runs of each.", lower_bound=1)
WIDTH, VOCABULARY = 256, 128


def main(_) -> None:
  """Time both and print the table."""
  import torch
  from transformers import Mamba2Config, Mamba2ForCausalLM

  from selfrag_jax.mesh import configure_xla
  from selfrag_jax.model.lm import LM
  from selfrag_jax.model.pretrained import load_pretrained

  configure_xla()
  torch.manual_seed(0)
  sizes = dict(hidden_size=WIDTH, num_hidden_layers=1, expand=2, num_heads=8, head_dim=64, state_size=64, n_groups=1)
  theirs = Mamba2ForCausalLM(Mamba2Config(vocab_size=VOCABULARY, chunk_size=256, **sizes)).eval()
  with tempfile.TemporaryDirectory() as folder:
    theirs.save_pretrained(folder)
    ours = load_pretrained(folder)
  tokens = np.random.default_rng(0).integers(0, VOCABULARY, (1, TOKENS.value))
  weights = np.cos(np.arange(WIDTH)).astype(np.float32)
  lm = LM(ours.config)

  @jax.jit
  def gradient(params):
    def total(params):
      hidden = lm.apply(params, jnp.asarray(tokens))
      return (hidden * weights).sum(), hidden

    return jax.grad(total, has_aux=True)(params)

  def run_ours():
    return np.asarray(jax.block_until_ready(gradient(ours.params))[1])

  def run_theirs():
    theirs.zero_grad()
    hidden = theirs.backbone(torch.tensor(tokens), use_cache=False).last_hidden_state
    (hidden * torch.tensor(weights)).sum().backward()
    return hidden.detach().numpy()

  runs = {"here": run_ours, "transformers": run_theirs}
  first, second = (run() for run in runs.values())  # compiles, and warms torch up
  seconds: dict[str, list[float]] = {name: [] for name in runs}
  for _ in range(REPEATS.value):
    for name, run in runs.items():
      started = time.perf_counter()
      run()
      seconds[name].append(time.perf_counter() - started)
  mine, peer = (statistics.median(times) for times in seconds.values())
  print(f"{TOKENS.value} tokens, largest difference of hidden states {np.abs(first - second).max():.1e}")
  print(f"here {mine * 1e3:.1f} ms   transformers {peer * 1e3:.1f} ms   transformers / here {peer / mine:.2f}")


if __name__ == "__main__":
  app.run(main)

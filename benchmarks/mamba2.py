"""A Mamba-2 layer here beside that of transformers on torch: the same weights, a forward and a backward pass.

  python benchmarks/mamba2.py [--tokens=2048] [--chunk=128] [--repeats=7]

One layer of Mamba-2 130M (24 heads of width 64, 128 states), one row, float32, on this machine's cores. Transformers
runs its code in plain torch, which is what a CPU has of it, in its chunks of 256 tokens; ours may be of another length,
which changes no result. Both compute the gradient of the same sum by all parameters, in turn, in one process; medians.
The time of the projections, which both leave to a library, is printed beside: `SSD` is the rest. Prints the largest
difference of the hidden states, and the ratios.
"""

import dataclasses
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
CHUNK = flags.DEFINE_integer("chunk", 128, "Tokens of our chunks.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 7, "Timed runs of each.", lower_bound=1)
WIDTH, VOCABULARY = 768, 128


def products(config):
  """Return functions that run the two products of a layer, forward and backward, here and in torch."""
  import torch

  into = 2 * config.ssm_inner + 2 * config.ssm_state + config.ssm_heads
  shapes = (TOKENS.value, WIDTH), (WIDTH, into), (config.ssm_inner, WIDTH)
  arrays = [np.random.default_rng(1).standard_normal(shape).astype(np.float32) for shape in shapes]

  def projected(x, one, other):
    return ((x @ one)[:, : len(other)] @ other).sum()

  gradient = jax.jit(jax.grad(projected, argnums=(0, 1, 2)))

  def run_theirs():
    projected(*(torch.tensor(x, requires_grad=True) for x in arrays)).backward()

  return lambda: jax.block_until_ready(gradient(*arrays)), run_theirs


def main(_) -> None:
  """Time both and print the table."""
  import torch
  from transformers import Mamba2Config, Mamba2ForCausalLM

  from selfrag_jax.mesh import configure_xla
  from selfrag_jax.model.lm import LM
  from selfrag_jax.model.pretrained import load_pretrained

  configure_xla()
  torch.manual_seed(0)
  sizes = dict(hidden_size=WIDTH, num_hidden_layers=1, expand=2, num_heads=24, head_dim=64, state_size=128, n_groups=1)
  theirs = Mamba2ForCausalLM(Mamba2Config(vocab_size=VOCABULARY, chunk_size=256, **sizes)).eval()
  with tempfile.TemporaryDirectory() as folder:
    theirs.save_pretrained(folder)
    ours = load_pretrained(folder)
  tokens = np.random.default_rng(0).integers(0, VOCABULARY, (1, TOKENS.value))
  weights = np.cos(np.arange(WIDTH)).astype(np.float32)
  config = dataclasses.replace(ours.config, ssm_chunk=CHUNK.value, remat="none")
  lm = LM(config)
  run_our_products, run_their_products = products(config)

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

  runs = {
    "here": run_ours,
    "transformers": run_theirs,
    "our products": run_our_products,
    "their products": run_their_products,
  }
  first, second, *_ = [run() for run in runs.values()]  # compiles, and warms torch up
  seconds: dict[str, list[float]] = {name: [] for name in runs}
  for _ in range(REPEATS.value):
    for name, run in runs.items():
      started = time.perf_counter()
      run()
      seconds[name].append(time.perf_counter() - started)
  mine, peer, our_products, their_products = (statistics.median(times) * 1e3 for times in seconds.values())
  print(f"{TOKENS.value} tokens, largest difference of hidden states {np.abs(first - second).max():.1e}")
  table = {"layer": (mine, peer), "products": (our_products, their_products)}
  table["SSD"] = mine - our_products, peer - their_products
  for name, (ours_ms, theirs_ms) in table.items():
    print(f"{name:9} here {ours_ms:7.1f} ms   transformers {theirs_ms:7.1f} ms   ratio {theirs_ms / ours_ms:5.2f}")


if __name__ == "__main__":
  app.run(main)

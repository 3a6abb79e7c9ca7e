"""A training step of a Llama of 135M parameters by remat policy, over one with all logits and without remat.

  python benchmarks/step_memory.py [--turns=3] [--rows=4 --tokens=1024] [--policies=dots,mixed,full]

Compiles the gradient of the language loss for rows of this size and for one row of 8,192 tokens, and prints the memory
of activations and gradients that the compiler plans (its temporaries), as a ratio. Then it runs the smaller one in
turn, in one process, and prints the ratio of the medians, and by how much the gradients of 64 rows of the embedding
differ. The weights are random.
"""

import dataclasses
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TURNS = flags.DEFINE_integer("turns", 3, "Timed runs of each; 0: compile alone.", lower_bound=0)
ROWS = flags.DEFINE_integer("rows", 4, "Rows of the timed step.", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", 1024, "Tokens of its rows.", lower_bound=2)
POLICIES = flags.DEFINE_list("policies", ["dots", "mixed", "full"], "Remat policies.")
LONG = 8192  # tokens of the other row
MIB = 2**20


def main(_) -> None:
  """Compile, run and print the tables."""
  from selfrag_jax.mesh import configure_xla
  from selfrag_jax.model.config import ModelConfig
  from selfrag_jax.model.likelihood import sequence_log_probs
  from selfrag_jax.model.lm import init_params
  from selfrag_jax.train.losses import masked_lm_loss

  configure_xla()
  # of SmolLM2-135M
  sizes = dict(vocab_size=49_152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, mlp_dim=1536)
  model = ModelConfig(**sizes, rope_base=100_000.0, remat="none")

  def whole(params, tokens):
    """All logits at once, and nothing computed again."""
    segment_ids = jnp.ones_like(tokens)
    return -sequence_log_probs(model, params, tokens, segment_ids, chunk=tokens.shape[1]).sum()

  def by_policy(config, params, tokens):
    mask = jnp.ones(tokens.shape, bool).at[:, 0].set(False)
    return masked_lm_loss(config, params, {"tokens": tokens, "segment_ids": jnp.ones_like(tokens), "mask": mask}).loss

  losses = {"all logits, none": whole} | {
    f"chunks, {policy}": partial(by_policy, dataclasses.replace(model, remat=policy)) for policy in POLICIES.value
  }
  shapes = jax.eval_shape(lambda: nn.unbox(init_params(model, jax.random.key(0))))
  compiled = {}
  for rows, time_ in ((ROWS.value, TOKENS.value), (1, LONG)):
    tokens = jax.ShapeDtypeStruct((rows, time_), jnp.int32)
    planned = {}
    for name, loss in losses.items():
      program = jax.jit(jax.grad(loss)).lower(shapes, tokens).compile()
      planned[name] = program.memory_analysis().temp_size_in_bytes
      if time_ == TOKENS.value:
        compiled[name] = program
      first = next(iter(planned.values()))
      print(f"{rows} x {time_:,}  {name:18} {planned[name] / MIB:9,.0f} MiB  {planned[name] / first:5.2f}", flush=True)
  if not TURNS.value:
    return
  params = nn.unbox(init_params(model, jax.random.key(0)))
  rows = np.random.default_rng(0).integers(model.vocab_size, size=(ROWS.value, TOKENS.value))
  tokens = jnp.asarray(rows, jnp.int32)
  seconds: dict[str, list[float]] = {name: [] for name in compiled}
  found = {}
  for turn in range(TURNS.value + 1):
    for name, run in compiled.items():
      started = time.perf_counter()
      gradient = jax.block_until_ready(run(params, tokens))
      if turn:
        seconds[name].append(time.perf_counter() - started)
      found[name] = np.asarray(gradient["params"]["embed"][:64])
      del gradient
  medians = {name: statistics.median(times) for name, times in seconds.items()}
  first, *_ = medians.values()
  base = next(iter(found.values()))
  for name, median in medians.items():
    error = np.abs(found[name] - base).max() / np.abs(base).max()
    times = f"{median:7.1f} s  {median / first:5.2f}"
    print(f"{ROWS.value} x {TOKENS.value:,}  {name:18} {times}  gradients differ by {error:.0e}")


if __name__ == "__main__":
  app.run(main)

"""Time per token of the chunked SSD and of attention in a window on rows of growing length, beside causal attention.

  python benchmarks/ssd.py [--lengths=512,1024,2048,4096,8192,16384,32768] [--window=128] [--repeats=5]

All have 8 heads of width 64 and one row. Forward and backward passes are compiled and timed in one process, first all
of one kernel, then all of the next (in turn, the gigabytes that attention frees would slow the others down); medians. A
recurrence and a window cost the same for every token, so their columns stay flat; attention's column grows with the
row, and ends where its scores would no longer fit into the memory of a laptop.
"""

import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LENGTHS = flags.DEFINE_list("lengths", [str(512 << i) for i in range(7)], "Tokens of a row.")
WINDOW = flags.DEFINE_integer("window", 128, "Tokens that a token sees in a window.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 5, "Timed runs of each.")
HEADS, WIDTH, STATES = 8, 64, 64
LONGEST = 8192  # tokens of a row of attention


def main(_) -> None:
  """Time all three at every length and print the table."""
  from selfrag_jax.mesh import configure_xla
  from selfrag_jax.model.attention import attend_in_window
  from selfrag_jax.model.ssd import ssd_chunked

  configure_xla()

  def ssd(x, dt, B, C):
    return ssd_chunked(x, dt, -jnp.ones(HEADS), B, C)[0].sum()

  def attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).sum()

  def in_window(q, k, v):
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    return attend_in_window(q, k, v, jnp.ones((1, q.shape[2]), jnp.int32), WINDOW.value).sum()

  window_gradient = jax.jit(jax.grad(in_window, argnums=(0, 1, 2)))
  ssd_gradient = jax.jit(jax.grad(ssd, argnums=(0, 1, 2, 3)))
  attention_gradient = jax.jit(jax.grad(attention, argnums=(0, 1, 2)))
  rng = np.random.default_rng(0)
  print(f"{'us/token':8} {'SSD':>10} {'window':>10} {'attention':>10} {'attention / SSD':>16} {'/ window':>10}")
  for length in map(int, LENGTHS.value):
    heads, scalars, states = (
      jnp.asarray(rng.standard_normal((1, length, *shape)), jnp.float32)
      for shape in ((HEADS, WIDTH), (HEADS,), (1, STATES))
    )
    runs = {
      ssd_gradient: (heads, jax.nn.softplus(scalars), states, states),
      window_gradient: (heads, heads, heads),
      **({attention_gradient: (heads, heads, heads)} if length <= LONGEST else {}),
    }
    seconds = {run: [] for run in runs}
    for run, arguments in runs.items():
      for turn in range(REPEATS.value + 1):
        started = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        if turn:  # the first compiles
          seconds[run].append(time.perf_counter() - started)
    ours, window, *others = (statistics.median(times) / length * 1e6 for times in seconds.values())
    ratios = (f"{theirs:10.2f} {theirs / ours:16.2f} {theirs / window:10.2f}" for theirs in others)
    print(f"{length:8} {ours:10.2f} {window:10.2f}", *ratios, flush=True)


if __name__ == "__main__":
  app.run(main)

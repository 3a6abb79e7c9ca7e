"""Time per token of the chunked SSD on rows of growing length, beside causal attention of the same width.

  python benchmarks/ssd.py [--lengths=512,1024,2048,4096,8192,16384,32768] [--repeats=5]

Both have 8 heads of width 64 and one row. Forward and backward passes are compiled and timed in one process, first all
of one kernel, then all of the other (in turn, the gigabytes that attention frees would slow the SSD down); medians. A
recurrence costs the same for every token, so its column stays flat; attention's column grows with the row, and ends
where its scores would no longer fit into the memory of a laptop.
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
REPEATS = flags.DEFINE_integer("repeats", 5, "Timed runs of each.")
HEADS, WIDTH, STATES = 8, 64, 64
LONGEST = 8192  # tokens of a row of attention


def main(_) -> None:
  """Time both at every length and print the table."""
  from selfrag_jax.mesh import configure_xla
  from selfrag_jax.model.ssd import ssd_chunked

  configure_xla()

  def ssd(x, dt, B, C):
    return ssd_chunked(x, dt, -jnp.ones(HEADS), B, C)[0].sum()

  def attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).sum()

  ssd_gradient = jax.jit(jax.grad(ssd, argnums=(0, 1, 2, 3)))
  attention_gradient = jax.jit(jax.grad(attention, argnums=(0, 1, 2)))
  rng = np.random.default_rng(0)
  print(f"{'tokens':>8} {'SSD us/token':>14} {'attention us/token':>20} {'attention / SSD':>16}")
  for length in map(int, LENGTHS.value):
    heads, scalars, states = (
      jnp.asarray(rng.standard_normal((1, length, *shape)), jnp.float32)
      for shape in ((HEADS, WIDTH), (HEADS,), (1, STATES))
    )
    runs = {
      ssd_gradient: (heads, jax.nn.softplus(scalars), states, states),
      **({attention_gradient: (heads, heads, heads)} if length <= LONGEST else {}),
    }
    seconds = {run: [] for run in runs}
    for run, arguments in runs.items():
      for turn in range(REPEATS.value + 1):
        started = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        if turn:  # the first compiles
          seconds[run].append(time.perf_counter() - started)
    ours, *others = (statistics.median(times) / length * 1e6 for times in seconds.values())
    print(f"{length:8} {ours:14.2f}", *(f"{theirs:20.2f} {theirs / ours:16.2f}" for theirs in others), flush=True)


if __name__ == "__main__":
  app.run(main)

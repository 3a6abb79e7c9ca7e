"""The candidates of an exact search on a TPU, in one pass over the memory that never writes the scores to its HBM.

Rows fall into bins of `BIN`. A Pallas kernel scores a block of rows and keeps the highest score of each bin; the n best
rows lie in the n bins with the highest of these, whose rows alone are scored again. XLA instead writes every score.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from selfrag_jax.memory.state import MemoryRows
from selfrag_jax.typing import Array

LANES = 128
BIN = 16  # rows; every LANES-th of a block
ROWS = BIN * LANES  # of a block
QUERIES = 256  # at a time: their scores of a block take 2 MiB
VMEM = 64 << 20  # bytes for two blocks of rows and what is computed from one
Score = Callable[[MemoryRows, Array, Array | None, Array | None], Array]


def fits(state: MemoryRows) -> bool:
  """Tell whether the kernel can search a memory: at least a block, which is small enough, of what a TPU computes."""
  C, D = state.embeddings.shape
  return C >= ROWS and state.norms.dtype == jnp.float32 and 4 * ROWS * D * 4 <= VMEM


def candidates(
  score: Score,
  state: MemoryRows,
  queries: Array,
  group_ids: Array | None,
  bias: Array | None,
  n: int,
  interpret: bool = False,
) -> Array:
  """Return slots int32[B, m], ascending, that hold the n best rows of each query by a score, all m >= n different.

  Slots from C on, if any, are those of no row.

  Of equal rows, those with the lowest slots are among them unless more than n bins have the same highest score.
  `score(rows, queries, group_ids, bias)` yields [B, C] for any C rows. `interpret` runs the kernel on any device.
  """
  maxima = bin_maxima(score, state, queries, group_ids, bias, interpret)
  _, bins = lax.top_k(maxima, min(n, maxima.shape[1]))
  first = bins // LANES * ROWS + bins % LANES
  slots = first[..., None] + LANES * jnp.arange(BIN, dtype=jnp.int32)[None, None]
  return jnp.sort(slots.reshape(len(queries), -1), axis=1)


def bin_maxima(
  score: Score,
  state: MemoryRows,
  queries: Array,
  group_ids: Array | None,
  bias: Array | None,
  interpret: bool = False,
) -> Array:
  """Return the highest score of each bin, f32[B, C' / BIN], C' = C rounded up to whole blocks.

  Bin i has the rows i // LANES * ROWS + i % LANES + j LANES. Arguments are those of `candidates`.
  """
  (C, D), B = state.embeddings.shape, len(queries)
  n_blocks = pl.cdiv(C, ROWS)
  per_row = {
    "scales": state.scales,
    "norms": state.norms,
    "valid": state.valid.astype(jnp.float32),
    "group_ids": None if group_ids is None else state.group_ids,
    "bias": bias,
  }
  per_row = {name: x[None] for name, x in per_row.items() if x is not None}
  groups = {} if group_ids is None else {"groups": jnp.asarray(group_ids)[:, None]}

  def kernel(*refs):
    *given, out = refs
    q, rows, *others = (ref[...] for ref in given)
    of = dict(zip([*per_row, *groups], others, strict=True))
    of = {name: x[:, 0] if name == "groups" else x[0] for name, x in of.items()}
    groups_of_queries, bias_of_rows = of.pop("groups", None), of.pop("bias", None)
    # the last block may end within
    is_row = lax.broadcasted_iota(jnp.int32, (1, ROWS), 1)[0] < C - pl.program_id(0) * ROWS
    block = state.replace(embeddings=rows, **(of | {"valid": (of["valid"] > 0) & is_row}))
    scores = score(block, q, groups_of_queries, bias_of_rows)
    best = scores[:, :LANES]
    for j in range(1, BIN):
      best = jnp.maximum(best, scores[:, j * LANES : (j + 1) * LANES])
    out[...] = best

  whole = lambda x: pl.BlockSpec(x.shape, lambda i: (0, 0))
  return pl.pallas_call(
    kernel,
    grid=(n_blocks,),
    in_specs=[
      whole(queries),
      pl.BlockSpec((ROWS, D), lambda i: (i, 0)),
      *[pl.BlockSpec((1, ROWS), lambda i: (0, i))] * len(per_row),
      *map(whole, groups.values()),
    ],
    out_specs=pl.BlockSpec((B, LANES), lambda i: (0, i)),
    out_shape=jax.ShapeDtypeStruct(
      (B, n_blocks * LANES), jnp.float32, manual_axis_type=jax.typeof(state.embeddings).manual_axis_type
    ),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=VMEM),
    interpret=interpret,
    name="bin_maxima",
  )(queries, state.embeddings, *per_row.values(), *groups.values())

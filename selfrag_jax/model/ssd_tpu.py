"""SSD on a TPU by the kernels of `ssd_kernels`: where they fit, their grids and blocks, and their gradient.

Chunks follow one another and hand the state over in VMEM. HBM is read for the inputs and written for the results alone,
and for a gradient also for the state that enters each chunk.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from selfrag_jax.mesh import BATCH_AXES, on_each_device, platform, splits_evenly
from selfrag_jax.model import ssd_kernels
from selfrag_jax.model.layers import MIXED
from selfrag_jax.model.ssd import initial_state, number_runs
from selfrag_jax.model.ssd_kernels import Sizes
from selfrag_jax.typing import Array

LANES, SUBLANES = 128, 8
VMEM = 48 << 20  # bytes for the blocks of a step and the states of all heads; v5p and tpu7x have 64 MiB


def block_heads(n_heads: int, n_groups: int, width: int) -> int | None:
  """Return the heads of a block: whole sublanes and lanes of one group, or all heads; None where neither fits."""
  of_group = n_heads // n_groups
  for heads in range(SUBLANES, of_group + 1, SUBLANES):
    if of_group % heads == 0 and heads * width % LANES == 0:
      return heads
  return n_heads if n_groups == 1 else None


def fits(x_BxTxHxP: Array, B_BxTxGxN: Array, chunk_size: int) -> bool:
  """Tell whether the program is for TPUs, rows are whole chunks, and the mesh splits rows, heads and groups evenly."""
  (batch, time, heads, width), (groups, states) = x_BxTxHxP.shape, B_BxTxGxN.shape[2:]
  columns = dict(jax.sharding.get_abstract_mesh().shape).get("tensor", 1)
  if platform() != "tpu" or not splits_evenly(batch, heads, *([groups] if groups > 1 else [])):
    return False
  heads, groups = heads // columns, max(groups // columns, 1)
  whole = time % chunk_size == chunk_size % LANES == 0 and (groups == 1 or states % LANES == 0)
  block = block_heads(heads, groups, width)
  if block is None or not whole or x_BxTxHxP.dtype not in (jnp.float32, jnp.bfloat16):
    return False
  # of float32, in the backward pass: states, arrays of a chunk by itself, and of a chunk by a block's columns
  needed = heads * width * states + 8 * chunk_size**2 + 12 * chunk_size * block * width
  return 4 * needed <= VMEM


def ssd(
  x_BxTxHxP: Array,
  dt_BxTxH: Array,
  A_H: Array,
  B_BxTxGxN: Array,
  C_BxTxGxN: Array,
  *,
  segment_ids_BxT: Array | None = None,
  initial_state_BxHxPxN: Array | None = None,
  chunk_size: int = 128,
  interpret: bool = False,
) -> tuple[Array, Array]:
  """Run the recurrence as `ssd.ssd_chunked` does, with its arguments and results, for sizes that `fits` allows.

  `interpret` runs the kernels on any device.
  """
  dt_BxTxH = dt_BxTxH.astype(jnp.float32)
  runs_BxT = number_runs(segment_ids_BxT, x_BxTxHxP.shape)
  chunks_BxZxL = runs_BxT.reshape(len(runs_BxT), -1, chunk_size)
  before_BxZ = jnp.pad(chunks_BxZxL[:, :-1, -1], ((0, 0), (1, 0)))  # the initial state belongs to run 0
  enters_BxT = (chunks_BxZxL == before_BxZ[..., None]).reshape(runs_BxT.shape)
  arguments = (
    jnp.stack([runs_BxT, enters_BxT.astype(jnp.int32)], 1),
    x_BxTxHxP,
    jnp.moveaxis(dt_BxTxH, 2, 1),
    jnp.moveaxis(dt_BxTxH * A_H.astype(jnp.float32)[None, None], 2, 1),
    B_BxTxGxN,
    C_BxTxGxN,
    initial_state(initial_state_BxHxPxN, x_BxTxHxP, B_BxTxGxN),
  )

  def of_device(marks, x, dt, log_decay, B, C, state) -> Any:
    n_batch, time, n_heads, width = x.shape
    heads = block_heads(n_heads, B.shape[2], width)
    assert heads is not None
    flat = lambda a: a.reshape(n_batch, time, -1)
    sizes = Sizes(chunk_size, heads, width)
    found: Any = _scan(
      sizes, interpret, marks, flat(x), dt, log_decay, flat(B), flat(C), state.reshape(n_batch, -1, state.shape[-1])
    )
    return found[0].reshape(x.shape), found[1].reshape(state.shape)

  by = lambda *axes: P(BATCH_AXES, *axes)
  groups = by(None, "tensor" if B_BxTxGxN.shape[2] > 1 else None)
  heads = by(None, "tensor")
  specs = (by(), heads, by("tensor"), by("tensor"), groups, groups, by("tensor"))
  return on_each_device(of_device, specs, (heads, by("tensor")))(*arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scan(sizes, interpret, marks, x, dt, log_decay, B, C, state):
  """Return y [B, T, H P] and the state [B, H P, N] after the last token.

  `marks` int32[B, 2, T]: the document of each token, and whether it is that of the token before the chunk. `dt` and
  `log_decay` f32[B, H, T].
  """
  return _forward(sizes, interpret, False, marks, x, dt, log_decay, B, C, state)


def _scan_forward(sizes, interpret, *arguments):
  y, last, entering = _forward(sizes, interpret, True, *arguments)
  return (checkpoint_name(y, MIXED), last), (arguments, checkpoint_name(entering, MIXED))


def _scan_backward(sizes, interpret, residuals, cotangents):
  return (None, *_backward(sizes, interpret, *residuals, *cotangents))


_scan.defvjp(_scan_forward, _scan_backward)


class Grid(NamedTuple):
  """The steps of a kernel, rows before chunks before blocks of heads, and the blocks of each kind of array."""

  grid: tuple[int, int, int]
  marks: pl.BlockSpec
  columns: pl.BlockSpec  # [B, T, H P]
  rows: pl.BlockSpec  # [B, H, T]
  groups: pl.BlockSpec  # [B, T, G N]
  entering: pl.BlockSpec  # [B, Z, H P, N]
  first: pl.BlockSpec  # [B, H P, N], needed in the steps of the first chunk alone
  last: pl.BlockSpec  # the same, of the last chunk


def _grid(sizes: Sizes, x, B, n_states: int, reverse: bool) -> Grid:
  L, J, width = sizes
  n_batch, time, columns = x.shape
  n_chunks, n_blocks = time // L, columns // (J * width)
  per_group = n_blocks // (B.shape[2] // n_states)
  at = (lambda z: n_chunks - 1 - z) if reverse else (lambda z: z)
  state = (1, J * width, n_states)
  return Grid(
    (n_batch, n_chunks, n_blocks),
    pl.BlockSpec((1, 2, L), lambda b, z, h: (b, 0, at(z))),
    pl.BlockSpec((1, L, J * width), lambda b, z, h: (b, at(z), h)),
    pl.BlockSpec((1, J, L), lambda b, z, h: (b, h, at(z))),
    pl.BlockSpec((1, L, n_states), lambda b, z, h: (b, at(z), h // per_group)),
    pl.BlockSpec((1, *state), lambda b, z, h: (b, at(z), h, 0)),
    # a block whose index stays is neither read nor written again
    pl.BlockSpec(state, lambda b, z, h: (b, jnp.where(z == 0, h, n_blocks - 1), 0)),
    pl.BlockSpec(state, lambda b, z, h: (b, jnp.where(z == n_chunks - 1, h, 0), 0)),
  )


def _forward(sizes, interpret, with_entering, marks, x, dt, log_decay, B, C, state):
  n_states = state.shape[2]
  grid = _grid(sizes, x, B, n_states, reverse=False)
  n_batch, n_chunks, n_blocks = grid.grid

  outs = [
    (grid.columns, jax.ShapeDtypeStruct(x.shape, x.dtype)),
    (grid.last, jax.ShapeDtypeStruct(state.shape, state.dtype)),
  ]
  if with_entering:
    outs.append((grid.entering, jax.ShapeDtypeStruct((n_batch, n_chunks, *state.shape[1:]), x.dtype)))
  specs, shapes = zip(*outs, strict=True)
  return pl.pallas_call(
    functools.partial(ssd_kernels.forward, sizes),
    grid=grid.grid,
    in_specs=[grid.marks, grid.columns, grid.rows, grid.rows, grid.groups, grid.groups, grid.first],
    out_specs=specs,
    out_shape=shapes,
    scratch_shapes=[pltpu.VMEM((n_blocks, sizes.heads * sizes.width, n_states), jnp.float32)],
    compiler_params=COMPILER,
    interpret=interpret,
    name="ssd_forward",
  )(marks, x, dt, log_decay, B, C, state)


def _backward(sizes, interpret, arguments, entering, dy, dlast):
  marks, x, dt, log_decay, B, C, state = arguments
  (L, J, width), n_states = sizes, state.shape[2]
  grid = _grid(sizes, x, B, n_states, reverse=True)
  n_blocks = grid.grid[2]

  like = lambda *arrays: [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
  return pl.pallas_call(
    functools.partial(ssd_kernels.backward, sizes, n_blocks // (B.shape[2] // n_states)),
    grid=grid.grid,
    in_specs=[
      grid.marks, grid.columns, grid.rows, grid.rows, grid.groups, grid.groups, grid.entering, grid.columns, grid.first,
    ],
    out_specs=[grid.columns, grid.rows, grid.rows, grid.groups, grid.groups, grid.last],
    out_shape=like(x, dt, log_decay, B, C, state),
    scratch_shapes=[
      pltpu.VMEM((n_blocks, J * width, n_states), jnp.float32),
      *[pltpu.VMEM((L, n_states), jnp.float32)] * 2,
      pltpu.VMEM((L, J * width), jnp.float32),
    ],
    compiler_params=COMPILER,
    interpret=interpret,
    name="ssd_backward",
  )(marks, x, dt, log_decay, B, C, entering, dy, dlast)  # fmt: skip


COMPILER = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM)

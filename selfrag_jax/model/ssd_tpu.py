"""SSD on a TPU: Pallas kernels that keep the scores, the decays and the states of a chunk in the core.

The sums of `ssd.ssd_chunked` for chunks of L tokens, which follow one another and hand the state over in VMEM. HBM is
read for the inputs and written for the results alone, and for a gradient also for the state that enters each chunk.
Heads go in blocks of J, which share a group; merged with their width they are the F = J P columns of a block. Of what
is one number for a head and token, a block has rows [J, L]; a product with `spread` [J, F] widens them to [L, F], and
one with its transpose adds columns up.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from selfrag_jax.mesh import BATCH_AXES, on_each_device, platform, splits_evenly
from selfrag_jax.model.layers import MIXED
from selfrag_jax.model.ssd import initial_state, number_runs
from selfrag_jax.typing import Array

LANES, SUBLANES = 128, 8
VMEM = 48 << 20  # bytes for the blocks of a step and the states of all heads; v5p and tpu7x have 64 MiB


class Sizes(NamedTuple):
  """Tokens of a chunk, heads of a block, and the width of a head."""

  chunk: int
  heads: int
  width: int


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

  def kernel(marks, x, dt, log_decay, B, C, state, y, last, *rest):
    *entering, states = rest
    z, h = pl.program_id(1), pl.program_id(2)

    @pl.when(z == 0)
    def _():
      states[h] = state[0]

    chunk = _Chunk(sizes, marks, x, dt, log_decay, B, C)
    low = states[h].astype(x.dtype)
    if entering:
      entering[0][0, 0] = low
    carried = chunk.widen(chunk.to_token) * _dot(chunk.C, low, (1, 1))
    for j in range(sizes.heads):
      columns = slice(j * sizes.width, (j + 1) * sizes.width)
      weights = (chunk.scores * chunk.decay(j)).astype(x.dtype)
      y[0, :, columns] = (carried[:, columns] + _dot(weights, chunk.dtx_low[:, columns], (1, 0))).astype(y.dtype)
    states[h] = chunk.to_end * states[h] + _dot(chunk.left_x, chunk.B, (0, 0))

    @pl.when(z == n_chunks - 1)
    def _():
      last[0] = states[h]

  outs = [
    (grid.columns, jax.ShapeDtypeStruct(x.shape, x.dtype)),
    (grid.last, jax.ShapeDtypeStruct(state.shape, state.dtype)),
  ]
  if with_entering:
    outs.append((grid.entering, jax.ShapeDtypeStruct((n_batch, n_chunks, *state.shape[1:]), x.dtype)))
  specs, shapes = zip(*outs, strict=True)
  return pl.pallas_call(
    kernel,
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
  _, n_chunks, n_blocks = grid.grid
  per_group = n_blocks // (B.shape[2] // n_states)

  def kernel(
    marks, x, dt, log_decay, B, C, entering, dy, dlast, dx, ddt, dlog, dB, dC, dfirst, dstates, dB_sum, dC_sum, ddtx
  ):
    z, h = pl.program_id(1), pl.program_id(2)
    dtype = x.dtype

    @pl.when(z == 0)
    def _():
      dstates[h] = dlast[0]

    @pl.when(h % per_group == 0)
    def _():
      dB_sum[...] = jnp.zeros_like(dB_sum)
      dC_sum[...] = jnp.zeros_like(dC_sum)

    chunk = _Chunk(sizes, marks, x, dt, log_decay, B, C)
    low, dstate, dy_low = entering[0, 0], dstates[h], dy[0]
    dstate_low, dy_wide = dstate.astype(dtype), dy_low.astype(jnp.float32)

    # what the entering state gives to the tokens, and to the state after them
    dcarried = (chunk.widen(chunk.to_token) * dy_wide).astype(dtype)
    dC_sum[...] += _dot(dcarried, low, (1, 0))
    dto_token = chunk.add_up(dy_wide * _dot(chunk.C, low, (1, 1)))
    kept = jnp.sum(dstate * low.astype(jnp.float32), axis=1, keepdims=True)
    dto_end = _exactly(chunk.spread, kept, (1, 0))
    dstates[h] = chunk.to_end * dstate + _dot(dcarried, chunk.C, (0, 0))

    # what the tokens give to the state after them
    dleft_x = _dot(chunk.B, dstate_low, (1, 1))
    dB_sum[...] += _dot(chunk.left_x, dstate_low, (1, 0))
    dleft = chunk.add_up(dleft_x * chunk.dtx) * chunk.left
    ddtx[...] = chunk.widen(chunk.left) * dleft_x

    # what the tokens give to each other
    dscores = jnp.zeros((L, L), jnp.float32)
    dsums = (dto_token + jnp.where(chunk.is_last, dto_end, 0)) * chunk.to_token - dleft
    dsums += jnp.where(chunk.is_last, jnp.sum(dleft, axis=1, keepdims=True), 0)
    of_queries = jnp.zeros((L, J), jnp.float32)
    for j in range(J):
      columns = slice(j * width, (j + 1) * width)
      decay = chunk.decay(j)
      dweights = _dot(dy_low[:, columns], chunk.dtx_low[:, columns], (1, 1)) * decay
      dscores += dweights
      weights = chunk.scores * decay
      ddtx[:, columns] += _dot(weights.astype(dtype), dy_low[:, columns], (0, 0))
      ddecay = dweights * chunk.scores
      of_queries = jnp.where(_iota((L, J), 1) == j, jnp.sum(ddecay, axis=1, keepdims=True), of_queries)
      dsums -= jnp.where(_iota((J, L), 0) == j, jnp.sum(ddecay, axis=0, keepdims=True), 0)
    dsums += _exactly(_eye(J), of_queries, (1, 1))
    dscores = dscores.astype(dtype)
    dB_sum[...] += _dot(dscores, chunk.C, (0, 0))
    dC_sum[...] += _dot(dscores, chunk.B, (1, 0))

    dlog[0] = _exactly(dsums, chunk.sees.astype(jnp.float32), (1, 0))
    ddt[0] = chunk.add_up(ddtx[...] * chunk.x)
    dx[0] = (chunk.widen(chunk.dt) * ddtx[...]).astype(dtype)

    @pl.when(h % per_group == per_group - 1)
    def _():
      dB[0] = dB_sum[...].astype(dB.dtype)
      dC[0] = dC_sum[...].astype(dC.dtype)

    @pl.when(z == n_chunks - 1)
    def _():
      dfirst[0] = dstates[h]

  like = lambda *arrays: [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
  return pl.pallas_call(
    kernel,
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


class _Chunk:
  """What both passes compute of a block of heads in a chunk; see `ssd._chunk`."""

  def __init__(self, sizes: Sizes, marks, x, dt, log_decay, B, C):
    L, J, width = sizes
    self.B, self.C, self.dt, self.x = B[0], C[0], dt[0], x[0].astype(jnp.float32)
    run, enters = marks[0, 0:1], marks[0, 1:2]
    self.spread = (_iota((J, J * width), 1) // width == _iota((J, J * width), 0)).astype(jnp.float32)
    same = _column(run.astype(jnp.float32)) == run.astype(jnp.float32)
    self.sees = same & (_iota((L, L), 0) >= _iota((L, L), 1))
    self.is_last = _iota((1, L), 1) == L - 1
    # log decay since the document's first token in this chunk
    self.sums = _exactly(log_decay[0], self.sees.astype(jnp.float32), (1, 1))
    self.sums_of_queries = _exactly(self.sums, _eye(J), (0, 0))
    to_last = self.sums[:, L - 1 :] - self.sums
    self.left = jnp.exp(jnp.where(run == run[:, L - 1 :], to_last, -jnp.inf))
    self.to_token = jnp.exp(jnp.where(enters > 0, self.sums, -jnp.inf))
    self.to_end = _exactly(self.spread, self.to_token[:, L - 1 :], (0, 0))
    self.dtx = self.widen(self.dt) * self.x
    self.dtx_low = self.dtx.astype(x.dtype)
    self.left_x = (self.widen(self.left) * self.dtx).astype(x.dtype)
    self.scores = _dot(self.C, self.B, (1, 1))

  def decay(self, j: int):
    """Return the decay [L, L] from each token to each that sees it, of head j."""
    log_decay = self.sums_of_queries[:, j : j + 1] - self.sums[j : j + 1]
    return jnp.exp(jnp.where(self.sees, log_decay, -jnp.inf))

  def widen(self, rows_JxL):
    return _exactly(rows_JxL, self.spread, (0, 0))

  def add_up(self, columns_LxF):
    return _exactly(self.spread, columns_LxF, (1, 1))


def _dot(a, b, axes: tuple[int, int], precision=None):
  dimensions = (((axes[0],), (axes[1],)), ((), ()))
  return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _exactly(a, b, axes: tuple[int, int]):
  """Multiply in float32, where a TPU would round to bfloat16: log decays are summed, and numbers moved by 0 and 1."""
  return _dot(a, b, axes, lax.Precision.HIGHEST)


def _iota(shape: tuple[int, int], axis: int):
  return lax.broadcasted_iota(jnp.int32, shape, axis)


def _eye(n: int):
  return (_iota((n, n), 0) == _iota((n, n), 1)).astype(jnp.float32)


def _column(row_1xL):
  return _exactly(row_1xL, jnp.ones((1, 1), jnp.float32), (0, 0))

"""The Pallas kernels of SSD on a TPU: the scores, decays and states of a chunk stay in the core.

The sums of `ssd.ssd_chunked`, for a block of J heads of a group in a chunk of L tokens. Merged with their width P, the
heads are F = J P columns [L, F]. Of what is one number for a head and token, a block has rows [J, L]; a product with
`spread` [J, F] widens them to columns, and one with its transpose adds columns up.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


class Sizes(NamedTuple):
  """Tokens of a chunk, heads of a block, and the width of a head."""

  chunk: int
  heads: int
  width: int


def forward(sizes: Sizes, marks, x, dt, log_decay, B, C, state, y, last, *rest):
  """Mix a block of heads of a chunk; `rest` are the states that enter the chunks, if they are kept, and the scratch."""
  *entering, states = rest
  z, h = pl.program_id(1), pl.program_id(2)

  @pl.when(z == 0)
  def _():
    states[h] = state[0]

  chunk = Chunk(sizes, marks, x, dt, log_decay, B, C)
  low = states[h].astype(x.dtype)
  if entering:
    entering[0][0, 0] = low
  carried = chunk.widen(chunk.to_token) * _dot(chunk.C, low, (1, 1))
  for j in range(sizes.heads):
    columns = slice(j * sizes.width, (j + 1) * sizes.width)
    weights = (chunk.scores * chunk.decay(j)).astype(x.dtype)
    y[0, :, columns] = (carried[:, columns] + _dot(weights, chunk.dtx_low[:, columns], (1, 0))).astype(y.dtype)
  states[h] = chunk.to_end * states[h] + _dot(chunk.left_x, chunk.B, (0, 0))

  @pl.when(z == pl.num_programs(1) - 1)
  def _():
    last[0] = states[h]


def backward(
  sizes: Sizes, per_group: int, marks, x, dt, log_decay, B, C, entering, dy, dlast, dx, ddt, dlog, dB, dC, dfirst,
  dstates, dB_sum, dC_sum, ddtx,
):  # fmt: skip
  """Write the gradients of a block of heads of a chunk, the last chunk first; `per_group` blocks share a group."""
  z, h = pl.program_id(1), pl.program_id(2)
  dtype = x.dtype

  @pl.when(z == 0)
  def _():
    dstates[h] = dlast[0]

  @pl.when(h % per_group == 0)
  def _():
    dB_sum[...] = jnp.zeros_like(dB_sum)
    dC_sum[...] = jnp.zeros_like(dC_sum)

  chunk = Chunk(sizes, marks, x, dt, log_decay, B, C)
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
  dscores, dsums = _between_tokens(sizes, chunk, dy_low, ddtx)
  dsums += (dto_token + jnp.where(chunk.is_last, dto_end, 0)) * chunk.to_token - dleft
  dsums += jnp.where(chunk.is_last, jnp.sum(dleft, axis=1, keepdims=True), 0)
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

  @pl.when(z == pl.num_programs(1) - 1)
  def _():
    dfirst[0] = dstates[h]


def _between_tokens(sizes: Sizes, chunk: "Chunk", dy_low, ddtx):
  """Return the gradients of the scores [L, L] and of the sums of log decays [J, L], and add to that of dt x."""
  L, J, width = sizes
  dscores, of_queries, of_keys = (jnp.zeros(shape, jnp.float32) for shape in ((L, L), (L, J), (J, L)))
  for j in range(J):
    columns = slice(j * width, (j + 1) * width)
    decay = chunk.decay(j)
    dweights = _dot(dy_low[:, columns], chunk.dtx_low[:, columns], (1, 1)) * decay
    dscores += dweights
    weights = (chunk.scores * decay).astype(dy_low.dtype)
    ddtx[:, columns] += _dot(weights, dy_low[:, columns], (0, 0))
    ddecay = dweights * chunk.scores
    of_queries = jnp.where(_iota((L, J), 1) == j, jnp.sum(ddecay, axis=1, keepdims=True), of_queries)
    of_keys = jnp.where(_iota((J, L), 0) == j, jnp.sum(ddecay, axis=0, keepdims=True), of_keys)
  return dscores, _exactly(_eye(J), of_queries, (1, 1)) - of_keys


class Chunk:
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

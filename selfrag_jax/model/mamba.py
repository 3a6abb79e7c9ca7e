"""The Mamba-2 mixer around `ssd.py`: projections, causal convolution, gated norm (arXiv 2405.21060, section 7)."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from selfrag_jax.mesh import constrain
from selfrag_jax.model import sequence, ssd_tpu
from selfrag_jax.model.cache import SSMCache
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.layers import MIXED, RMSNorm, accumulation_dtype, linear, output_scale, projection, weight
from selfrag_jax.model.ssd import decay_of_first_run, read_state, ssd_chunked, ssd_step
from selfrag_jax.typing import Array, PRNGKey


def _init_dt_bias(key: PRNGKey, shape: tuple[int, ...], dtype) -> Array:
  """Draw biases whose softplus, the time step, is log-uniform in [1e-3, 1e-1]."""
  dt = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(1e-3), jnp.log(1e-1)))
  dt = jnp.maximum(dt, 1e-4)
  return dt + jnp.log(-jnp.expm1(-dt))


def _init_a_log(key: PRNGKey, shape: tuple[int, ...], dtype) -> Array:
  return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def causal_conv(x_BxTxC: Array, kernel_WxC: Array, bias_C: Array, segment_ids_BxT: Array) -> Array:
  """Convolve each channel with its last W inputs of the same segment; tap W - 1 is the token itself."""
  taps = len(kernel_WxC)
  out = x_BxTxC * kernel_WxC[None, None, taps - 1] + bias_C[None, None]
  for back in range(1, taps):
    is_same = sequence.shifted(segment_ids_BxT, back, fill=-1) == segment_ids_BxT
    before = jnp.where(is_same[:, :, None], sequence.shifted(x_BxTxC, back), 0)
    out += before * kernel_WxC[None, None, taps - 1 - back]
  return out


class Mamba(nn.Module):
  """The Mamba-2 mixer. [B, T, D] -> [B, T, D]."""

  config: ModelConfig

  def setup(self):
    c = self.config
    projected = c.ssm_inner + c.conv_channels + c.ssm_heads  # in the order z, x, B, C, dt
    self.in_proj = projection(self, c, "in_proj", (c.d_model, projected), ("embed", "ssm_inner"))
    self.out_proj = projection(self, c, "out_proj", (c.ssm_inner, c.d_model), ("ssm_inner", "embed"), output_scale(c))
    self.conv_kernel = weight(
      self, c, "conv_kernel", (c.ssm_conv, c.conv_channels), ("width", "ssm_inner"), c.ssm_conv**-0.5
    )
    vector = lambda name, init, n: self.param(
      name, nn.with_logical_partitioning(init, ("width",)), (n,), jnp.dtype(c.param_dtype)
    )
    self.conv_bias = vector("conv_bias", nn.initializers.zeros, c.conv_channels)
    self.a_log = vector("A_log", _init_a_log, c.ssm_heads)
    self.skip = vector("D", nn.initializers.ones, c.ssm_heads)
    self.dt_bias = vector("dt_bias", _init_dt_bias, c.ssm_heads)
    self.norm = RMSNorm(c, groups=c.ssm_groups)

  def _project(self, u_BxTxD: Array, real_BxT: Array) -> tuple[Array, Array, Array]:
    """Return the gate z, the convolution's input xBC, and the time steps dt, which are 0 on pads."""
    c = self.config
    projected = linear(u_BxTxD, self.in_proj, dtype=c.matmul_dtype)
    z, xbc, dt = jnp.split(projected, [c.ssm_inner, c.ssm_inner + c.conv_channels], axis=-1)
    # dt * A is summed over a chunk and exponentiated: float32 even when the rest is bfloat16
    wide = accumulation_dtype(dt.dtype)
    dt = jax.nn.softplus(dt.astype(wide) + self.dt_bias.astype(wide)[None, None])
    return z, constrain(xbc, "batch", "time", "ssm_inner"), jnp.where(real_BxT[:, :, None], dt, 0)

  def _split(self, xbc: Array) -> tuple[Array, Array, Array]:
    c = self.config
    x, b, cc = jnp.split(nn.silu(xbc), [c.ssm_inner, c.ssm_inner + c.ssm_groups * c.ssm_state], axis=-1)
    groups = (*x.shape[:-1], c.ssm_groups, c.ssm_state)
    return x.reshape(*x.shape[:-1], c.ssm_heads, c.ssm_head_dim), b.reshape(groups), cc.reshape(groups)

  def _finish(self, y_BxTxHxP: Array, x_BxTxHxP: Array, z: Array) -> Array:
    y = y_BxTxHxP + x_BxTxHxP * self.skip.astype(x_BxTxHxP.dtype)[None, None, :, None]
    return linear(self.norm(y.reshape(z.shape) * nn.silu(z)), self.out_proj, dtype=self.config.matmul_dtype)

  def _ssd(self, x_BxTxHxP: Array, dt_BxTxH: Array, b: Array, cc: Array, **options: Any) -> tuple[Array, Array]:
    chunk = self.config.ssm_chunk
    has_kernel = self.config.kernels == "auto" and ssd_tpu.fits(x_BxTxHxP, b, chunk)
    ssd = ssd_tpu.ssd if has_kernel else ssd_chunked
    y, state = ssd(x_BxTxHxP, dt_BxTxH, self._decay, b, cc, chunk_size=chunk, **options)
    return checkpoint_name(y, MIXED), state

  @property
  def _decay(self) -> Array:
    return -jnp.exp(self.a_log.astype(accumulation_dtype(self.a_log.dtype)))

  def __call__(
    self, u_BxTxD: Array, positions_BxT: Array, segment_ids_BxT: Array, lengths_B: Array | None = None
  ) -> Array:
    """Mix packed rows. Segment 0 is padding; nothing passes between segments. The rest, for attention, is unused."""
    z, xbc, dt = self._project(u_BxTxD, segment_ids_BxT != 0)
    xbc = causal_conv(xbc, self.conv_kernel, self.conv_bias.astype(xbc.dtype), segment_ids_BxT)
    x, b, cc = self._split(xbc)
    y, state = self._ssd(x, dt, b, cc, segment_ids_BxT=segment_ids_BxT)
    if sequence.n_parts() > 1:
      left = decay_of_first_run(dt, self._decay, segment_ids_BxT)
      # kept, or a backward pass would run the kernel again for `state`
      entering = checkpoint_name(sequence.entering_state(state, left[:, -1], segment_ids_BxT), MIXED)
      y += read_state(entering, left, cc).astype(y.dtype)
    return self._finish(y, x, z)

  def extend(self, u_BxTxD: Array, positions_BxT: Array, real_BxT: Array, cache: SSMCache) -> tuple[Array, SSMCache]:
    """Continue from the cache over the real tokens, which come first in each row; a row of pads keeps every bit."""
    c, time = self.config, u_BxTxD.shape[1]
    z, xbc, dt = self._project(u_BxTxD, real_BxT)
    inputs = jnp.concatenate([cache.conv, xbc], axis=1)
    convolved = sum(inputs[:, tap : tap + time] * self.conv_kernel[None, None, tap] for tap in range(c.ssm_conv))
    x, b, cc = self._split(convolved + self.conv_bias.astype(xbc.dtype)[None, None])
    if time == 1:
      y, state = ssd_step(cache.state, x[:, 0], dt[:, 0], self._decay, b[:, 0], cc[:, 0])
      y = y[:, None]
    else:
      y, state = self._ssd(x, dt, b, cc, initial_state_BxHxPxN=cache.state)
    lengths = jnp.sum(real_BxT, axis=1)
    tail = jax.vmap(lambda row, n: jax.lax.dynamic_slice_in_dim(row, n, c.ssm_conv - 1))(inputs, lengths)
    # selected, because -0 * 1 + 0 is +0 and an empty row must keep its state to the bit
    state = jnp.where((lengths > 0)[:, None, None, None], state, cache.state)
    return self._finish(y, x, z), SSMCache(tail, state)

"""Grouped-query attention under one mask: causal, within the segment, within the window."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from selfrag_jax.mesh import constrain, platform
from selfrag_jax.model import attention_gpu, attention_tpu, sequence
from selfrag_jax.model.cache import KVCache
from selfrag_jax.model.config import LayerSpec, ModelConfig
from selfrag_jax.model.layers import (
  MIXED,
  RMSNorm,
  accumulation_dtype,
  linear,
  output_scale,
  projection,
  rotary_embedding,
)
from selfrag_jax.model.products import FEW
from selfrag_jax.typing import Array


def causal_mask(query_index: Array, key_index: Array, window: int | None = None) -> Array:
  """Return bool [..., T, S]: key s is not after query t, and less than `window` tokens before it."""
  distance = query_index[..., :, None] - key_index[..., None, :]
  mask = distance >= 0
  return mask if window is None else mask & (distance < window)


def attend(
  q_BxHxTxE: Array,
  k_BxKxSxE: Array,
  v_BxKxSxE: Array,
  mask_BxTxS: Array,
  softcap: float | None = None,
  scale: float | None = None,
) -> Array:
  """Attend with grouped queries; head h reads key/value head h // (H / K). Returns [B, H, T, E] in the dtype of q.

  `scale` multiplies the scores; None: E ** -0.5.

  Every query must see at least one key. Softmax in at least float32. Heads come before time, and the queries of a group
  follow each other, so that both products are plain batched matrix multiplications: XLA's CPU backend is half as fast
  with any other order, and the keys of a cache need not be transposed for every token.
  """
  batch, heads, time, width = q_BxHxTxE.shape
  kv_heads = k_BxKxSxE.shape[1]
  q = q_BxHxTxE.reshape(batch, kv_heads, -1, width)
  # bf16 loses the small probabilities that the sum needs: scores and softmax stay in float32
  accumulated = accumulation_dtype(q.dtype)
  if q.shape[2] <= FEW and platform() == "cpu":
    # like `product`: the longer factor first, and a barrier without which XLA would swap them again
    scores = jnp.einsum("BKSE,BKRE->BKSR", k_BxKxSxE, q, preferred_element_type=accumulated)
    scores = jnp.swapaxes(jax.lax.optimization_barrier(scores), 2, 3)
  else:
    scores = jnp.einsum("BKRE,BKSE->BKRS", q, k_BxKxSxE, preferred_element_type=accumulated)
  scores = scores.reshape(batch, heads, time, -1) * (width**-0.5 if scale is None else scale)
  if softcap is not None:
    scores = softcap * jnp.tanh(scores / softcap)
  probs = jax.nn.softmax(jnp.where(mask_BxTxS[:, None], scores, jnp.finfo(scores.dtype).min), axis=-1)
  probs = probs.reshape(batch, kv_heads, -1, probs.shape[-1]).astype(v_BxKxSxE.dtype)
  return jnp.einsum("BKRS,BKSE->BKRE", probs, v_BxKxSxE).reshape(batch, heads, time, width)


def attend_in_window(
  q_BxHxTxE: Array,
  k_BxKxTxE: Array,
  v_BxKxTxE: Array,
  segment_ids_BxT: Array,
  window: int,
  softcap: float | None = None,
  scale: float | None = None,
) -> Array:
  """Attend to the last `window` tokens of the same segment, the query's own included, as `attend` would: [B, H, T, E].

  Rows are cut into blocks of `window` tokens; each sees itself and the one before: 2 T `window` scores, not T².
  """
  batch, _, time, _ = q_BxHxTxE.shape
  n = -(-time // window)

  def blocks(x: Array, axis: int, fill: int = 0) -> Array:
    """Return x [B, ..., T, ...] as [B, n, ..., window, ...]; what is missing at the end is `fill`."""
    pads = [(0, n * window - time if i == axis else 0) for i in range(x.ndim)]
    padded = jnp.pad(x, pads, constant_values=fill)
    return jnp.moveaxis(padded.reshape(*x.shape[:axis], n, window, *x.shape[axis + 1 :]), axis, 1)

  def with_before(x: Array, axis: int, fill: int = 0) -> Array:
    before = jnp.pad(x, [(0, 0), (1, 0), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)[:, :-1]
    return jnp.concatenate([before, x], axis=axis)

  fold = lambda x: x.reshape(batch * n, *x.shape[2:])
  segments = blocks(segment_ids_BxT, 1, fill=-1)  # pads see pads: every query must see a key
  mask = segments[..., :, None] == with_before(segments, 2, fill=-2)[..., None, :]
  mask &= causal_mask(window + jnp.arange(window), jnp.arange(2 * window), window)[None, None]
  k, v = (with_before(blocks(x, 2), 3) for x in (k_BxKxTxE, v_BxKxTxE))
  attended = attend(fold(blocks(q_BxHxTxE, 2)), fold(k), fold(v), fold(mask), softcap, scale)
  in_order = jnp.moveaxis(attended.reshape(batch, n, *attended.shape[1:]), 1, 2)
  return in_order.reshape(*q_BxHxTxE.shape[:2], n * window, -1)[:, :, :time]


class Attention(nn.Module):
  """Causal grouped-query self-attention, with rotary embedding or without (arXiv 2305.13245). [B, T, D] to the same."""

  config: ModelConfig
  spec: LayerSpec

  def setup(self):
    c = self.config
    heads, width = ("embed", "heads", "head_width"), c.head_width
    kv_shape, kv_axes = (c.d_model, c.kv_heads, width), ("embed", "kv_heads", "head_width")
    self.query = projection(self, c, "q", (c.d_model, c.n_heads, width), heads)
    self.key = projection(self, c, "k", kv_shape, kv_axes)
    self.value = projection(self, c, "v", kv_shape, kv_axes)
    self.output = projection(
      self, c, "o", (c.n_heads, width, c.d_model), ("heads", "head_width", "embed"), output_scale(c)
    )
    if c.qk_norm:
      self.query_norm, self.key_norm = RMSNorm(c), RMSNorm(c)

  def _project(self, x_BxTxD: Array, positions_BxT: Array) -> tuple[Array, Array, Array]:
    dtype = self.config.matmul_dtype
    q, k, v = (jnp.swapaxes(linear(x_BxTxD, w, dtype=dtype), 1, 2) for w in (self.query, self.key, self.value))
    if self.config.qk_norm:
      q, k = self.query_norm(q), self.key_norm(k)
    if (base := self.spec.rope_base) is not None:
      q, k = (rotary_embedding(y, positions_BxT, base) for y in (q, k))
    return constrain(q, "batch", "heads", "time", None), k, v

  def _finish(self, attended_BxHxTxE: Array) -> Array:
    return linear(jnp.swapaxes(attended_BxHxTxE, 1, 2), self.output, contracted=2, dtype=self.config.matmul_dtype)

  def __call__(
    self, x_BxTxD: Array, positions_BxT: Array, segment_ids_BxT: Array, lengths_B: Array | None = None
  ) -> Array:
    q, k, v = self._project(x_BxTxD, positions_BxT)
    k, v = (sequence.every(x, 2, heads=1) for x in (k, v))
    segment_ids_BxS = sequence.every(segment_ids_BxT, 1)
    window, how = self.spec.window, (self.config.attention_softcap, self.config.attention_multiplier)
    has_kernels = self.config.kernels == "auto"
    if has_kernels and attention_tpu.fits(q, k):
      return self._finish(attention_tpu.attend(q, k, v, segment_ids_BxT, segment_ids_BxS, window, *how))
    if has_kernels and lengths_B is not None and attention_gpu.fits(q, k, softcap=how[0]):
      return self._finish(checkpoint_name(attention_gpu.attend(q, k, v, lengths_B, window, how[1]), MIXED))
    time = x_BxTxD.shape[1]
    # whole blocks, of two windows each: from 2.5 windows on, fewer scores than those of every token for every other
    if window is not None and 5 * window <= 2 * time and sequence.n_parts() == 1:
      return self._finish(checkpoint_name(attend_in_window(q, k, v, segment_ids_BxT, window, *how), MIXED))
    mask = causal_mask(sequence.part() * time + jnp.arange(time), jnp.arange(k.shape[2]), window)[None]
    mask &= segment_ids_BxT[:, :, None] == segment_ids_BxS[:, None, :]
    return self._finish(checkpoint_name(attend(q, k, v, mask, *how), MIXED))

  def extend(self, x_BxTxD: Array, positions_BxT: Array, real_BxT: Array, cache: KVCache) -> tuple[Array, KVCache]:
    """Write the keys and values of the real tokens into the cache, and attend from them to all tokens so far."""
    q, k, v = self._project(x_BxTxD, positions_BxT)
    kv_heads, capacity = cache.keys.shape[1:3]
    # pads get a slot beyond the end, where the scatter drops them: a row of pads keeps every bit of its cache
    slots = jnp.where(real_BxT, positions_BxT, capacity)[:, None, :]
    rows, heads = jnp.arange(x_BxTxD.shape[0])[:, None, None], jnp.arange(kv_heads)[None, :, None]
    keys = cache.keys.at[rows, heads, slots].set(k, mode="drop")
    values = cache.values.at[rows, heads, slots].set(v, mode="drop")
    mask = causal_mask(positions_BxT, jnp.arange(capacity)[None, :], self.spec.window)
    attended = attend(q, keys, values, mask, self.config.attention_softcap, self.config.attention_multiplier)
    return self._finish(attended), KVCache(keys, values)

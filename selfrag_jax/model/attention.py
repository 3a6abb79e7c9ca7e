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

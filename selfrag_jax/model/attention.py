"""Grouped-query attention with one mask meaning: causal, within the segment, within the window."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from selfrag_jax.mesh import constrain
from selfrag_jax.model.cache import KVCache
from selfrag_jax.model.config import LayerSpec, ModelConfig
from selfrag_jax.model.layers import RMSNorm, accumulation_dtype, output_scale, rotary_embedding, weight
from selfrag_jax.typing import Array


def causal_mask(query_index: Array, key_index: Array, window: int | None = None) -> Array:
  """Return bool [..., T, S]: key s is not after query t, and less than `window` tokens before it."""
  distance = query_index[..., :, None] - key_index[..., None, :]
  mask = distance >= 0
  return mask if window is None else mask & (distance < window)


def attend(
  q_BxTxHxE: Array, k_BxSxKxE: Array, v_BxSxKxE: Array, mask_BxTxS: Array, softcap: float | None = None
) -> Array:
  """Attend with grouped queries; head h reads key/value head h // (H / K). Returns [B, T, H, E] in the dtype of q.

  Every query must see at least one key. Softmax in at least float32.
  """
  batch, time, heads, width = q_BxTxHxE.shape
  q = q_BxTxHxE.reshape(batch, time, k_BxSxKxE.shape[2], -1, width)
  # bf16 loses the small probabilities that the sum needs: scores and softmax stay in float32
  scores = jnp.einsum("BTKGE,BSKE->BKGTS", q, k_BxSxKxE, preferred_element_type=accumulation_dtype(q.dtype))
  scores *= width**-0.5
  if softcap is not None:
    scores = softcap * jnp.tanh(scores / softcap)
  probs = jax.nn.softmax(jnp.where(mask_BxTxS[:, None, None], scores, jnp.finfo(scores.dtype).min), axis=-1)
  out = jnp.einsum("BKGTS,BSKE->BTKGE", probs.astype(v_BxSxKxE.dtype), v_BxSxKxE)
  return out.reshape(batch, time, heads, width)


class Attention(nn.Module):
  """Causal grouped-query self-attention with rotary embedding (arXiv 2305.13245). [B, T, D] -> [B, T, D]."""

  config: ModelConfig
  spec: LayerSpec

  def setup(self):
    c = self.config
    heads, width = ("embed", "heads", "head_width"), c.head_width
    kv_shape, kv_axes = (c.d_model, c.kv_heads, width), ("embed", "kv_heads", "head_width")
    self.query = weight(self, c, "q", (c.d_model, c.n_heads, width), heads)
    self.key = weight(self, c, "k", kv_shape, kv_axes)
    self.value = weight(self, c, "v", kv_shape, kv_axes)
    self.output = weight(self, c, "o", (c.n_heads, width, c.d_model), ("heads", "head_width", "embed"), output_scale(c))
    if c.qk_norm:
      self.query_norm, self.key_norm = RMSNorm(c), RMSNorm(c)

  def _project(self, x_BxTxD: Array, positions_BxT: Array) -> tuple[Array, Array, Array]:
    q = jnp.einsum("BTD,DHE->BTHE", x_BxTxD, self.query)
    k = jnp.einsum("BTD,DKE->BTKE", x_BxTxD, self.key)
    v = jnp.einsum("BTD,DKE->BTKE", x_BxTxD, self.value)
    if self.config.qk_norm:
      q, k = self.query_norm(q), self.key_norm(k)
    q, k = (rotary_embedding(y, positions_BxT, self.spec.rope_base) for y in (q, k))
    return constrain(q, "batch", "time", "heads", None), k, v

  def __call__(self, x_BxTxD: Array, positions_BxT: Array, segment_ids_BxT: Array) -> Array:
    q, k, v = self._project(x_BxTxD, positions_BxT)
    index = jnp.arange(x_BxTxD.shape[1])
    same_segment = segment_ids_BxT[:, :, None] == segment_ids_BxT[:, None, :]
    mask = same_segment & causal_mask(index, index, self.spec.window)[None]
    return jnp.einsum("BTHE,HED->BTD", attend(q, k, v, mask, self.config.attention_softcap), self.output)

  def extend(self, x_BxTxD: Array, positions_BxT: Array, real_BxT: Array, cache: KVCache) -> tuple[Array, KVCache]:
    """Append the real tokens at their positions of the cache, and attend to everything up to them."""
    q, k, v = self._project(x_BxTxD, positions_BxT)
    capacity = cache.keys.shape[1]
    # pads are sent beyond the end, where a scatter drops them: their rows keep every bit
    slots = jnp.where(real_BxT, positions_BxT, capacity)
    rows = jnp.arange(x_BxTxD.shape[0])[:, None]
    keys = cache.keys.at[rows, slots].set(k, mode="drop")
    values = cache.values.at[rows, slots].set(v, mode="drop")
    mask = causal_mask(positions_BxT, jnp.arange(capacity)[None, :], self.spec.window)
    attended = attend(q, keys, values, mask, self.config.attention_softcap)
    return jnp.einsum("BTHE,HED->BTD", attended, self.output), KVCache(keys, values)

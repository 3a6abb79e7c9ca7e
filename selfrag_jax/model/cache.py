"""The caches of decoding, as pytrees: keys and values of attention; convolution inputs and state of Mamba-2."""

import jax.numpy as jnp
from flax import struct

from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.layers import accumulation_dtype
from selfrag_jax.typing import Array


@struct.dataclass
class KVCache:
  """Keys (already rotated) and values of one attention layer, [B, K, S, E] each."""

  keys: Array
  values: Array


@struct.dataclass
class SSMCache:
  """The last W - 1 inputs of the convolution [B, W-1, channels], and the state [B, H, P, N] in at least float32."""

  conv: Array
  state: Array


@struct.dataclass
class Cache:
  """The caches of all layers, and the number of tokens that they hold of each row, int32 [B]."""

  lengths: Array
  layers: tuple[KVCache | SSMCache, ...]


def init_cache(config: ModelConfig, batch: int, capacity: int) -> Cache:
  """Return empty caches for `batch` rows of at most `capacity` tokens.

  The caller must keep `lengths <= capacity`: tokens beyond it are dropped silently.
  """
  c = config

  def layer(kind: str) -> KVCache | SSMCache:
    if kind == "T":
      keys = jnp.zeros((batch, c.kv_heads, capacity, c.head_width), c.dtype)
      return KVCache(keys, jnp.zeros_like(keys))
    # the state sums thousands of decayed terms: bfloat16 would lose the small ones
    state = jnp.zeros((batch, c.ssm_heads, c.ssm_head_dim, c.ssm_state), accumulation_dtype(c.dtype))
    return SSMCache(jnp.zeros((batch, c.ssm_conv - 1, c.conv_channels), c.dtype), state)

  return Cache(jnp.zeros((batch,), jnp.int32), tuple(layer(spec.kind) for spec in c.layers))

"""The steps of an embedding: hidden states without the head, their mean, and scaling to unit norm."""

import jax
import jax.numpy as jnp

from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.layers import accumulation_dtype
from selfrag_jax.model.lm import packed_states
from selfrag_jax.ragged import length_mask
from selfrag_jax.typing import Array, ArrayLike, Params


def hidden_states(config: ModelConfig, params: Params, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Array:
  """Return the hidden states [B, T, D] of right-padded rows, arbitrary values at pads, whose tokens do not matter."""
  lengths = jnp.asarray(lengths_B)
  tokens = jnp.where(length_mask(lengths, jnp.shape(tokens_BxT)[1], jnp), tokens_BxT, 0)
  return packed_states(config, params, tokens, lengths_B=lengths)


def mean_pool(hidden_BxTxD: Array, mask_BxT: ArrayLike) -> Array:
  """Return the mean [B, D] of the states where `mask` [B, T], in at least float32; zeros for an empty row."""
  weights = jnp.asarray(mask_BxT, accumulation_dtype(hidden_BxTxD.dtype))
  states = hidden_BxTxD.astype(weights.dtype)
  total = jnp.einsum("bt,btd->bd", weights, states, precision=jax.lax.Precision.HIGHEST)
  return total / jnp.maximum(weights.sum(axis=1, keepdims=True), 1)


def unit(rows_BxD: Array) -> Array:
  """Scale rows to norm 1; zeros stay zeros, with a gradient of 0."""
  square = jnp.sum(rows_BxD**2, axis=1, keepdims=True)
  return rows_BxD * jax.lax.rsqrt(jnp.maximum(square, 1e-24))

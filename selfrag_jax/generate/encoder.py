"""The language model as an encoder: its pooled hidden state, standardised, as a function of token ids and mask."""

import jax
import jax.numpy as jnp
from flax import struct

from selfrag_jax.encoders import token_bag
from selfrag_jax.encoders.token_bag import TokenBag
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.pooling import hidden_states, mean_pool
from selfrag_jax.typing import Array, ArrayLike, Params


@struct.dataclass
class LMEncoder:
  """A frozen language model, and the mean and spread of its pooled states over the documents, [D] each."""

  params: Params
  mean: Array
  scale: Array
  config: ModelConfig = struct.field(pytree_node=False)


def init_lm_encoder(
  config: ModelConfig, params: Params, tokens_NxT: Array, mask_NxT: Array, batch: int = 64
) -> LMEncoder:
  """Make an encoder whose dimensions have mean 0 and variance 1 over the given documents.

  A language model's states share a few huge dimensions; unstandardised, every document looks like every other.
  """
  pool = jax.jit(lambda params, tokens, mask: mean_pool(hidden_states(config, params, tokens, mask), mask))
  slices = [slice(start, start + batch) for start in range(0, len(tokens_NxT), batch)]
  states = jnp.concatenate([pool(params, tokens_NxT[rows], mask_NxT[rows]) for rows in slices])
  return LMEncoder(params, states.mean(axis=0), 1 / jnp.maximum(states.std(axis=0), 1e-6), config)


@jax.jit
def encode(encoder: TokenBag | LMEncoder, token_ids: ArrayLike, mask: ArrayLike) -> Array:
  """Embed token_ids int32 [B, T] where mask bool [B, T] with either encoder: [B, D], zeros for an empty row."""
  if isinstance(encoder, TokenBag):
    return token_bag.embed(encoder, token_ids, mask)
  tokens, real = jnp.asarray(token_ids), jnp.asarray(mask)
  states = mean_pool(hidden_states(encoder.config, encoder.params, tokens, real), real)
  standard = (states - encoder.mean[None]) * encoder.scale[None]
  return jnp.where(real.any(axis=1)[:, None], standard, 0)

"""The reward model: a language model with a scalar head, which scores whole conversations (arXiv 2203.02155)."""

import jax.numpy as jnp

from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.layers import accumulation_dtype
from selfrag_jax.model.lm import init_params
from selfrag_jax.model.pooling import hidden_states
from selfrag_jax.ragged import last_entries
from selfrag_jax.typing import Array, ArrayLike, Params, PRNGKey


def init_reward_model(config: ModelConfig, key: PRNGKey) -> Params:
  """Draw the parameters of a language model, with a head that scores everything 0."""
  return add_head(config, init_params(config, key))


def add_head(config: ModelConfig, model: Params) -> Params:
  """Put a zero head, float32, beside the parameters of a language model: `{"model": …, "head": …}`."""
  return {"model": model, "head": {"kernel": jnp.zeros(config.d_model), "bias": jnp.zeros(())}}


def score(config: ModelConfig, params: Params, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Array:
  """Score right-padded conversations, [B] in at least float32: the head on the hidden state of their last tokens."""
  lengths = jnp.asarray(lengths_B)
  states_BxD = last_entries(hidden_states(config, params["model"], tokens_BxT, lengths), lengths, jnp)
  head, dtype = params["head"], accumulation_dtype(states_BxD.dtype)  # bfloat16 would round close scores to ties
  return jnp.einsum("bd,d->b", states_BxD.astype(dtype), head["kernel"], precision="highest") + head["bias"]

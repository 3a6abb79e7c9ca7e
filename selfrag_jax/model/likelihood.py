"""The likelihood of the last tokens of a text, for rerankers and evaluations."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM
from selfrag_jax.model.pooling import hidden_states
from selfrag_jax.ragged import length_mask
from selfrag_jax.typing import Array, ArrayLike, Params


@partial(jax.jit, static_argnames=("config", "most"))
def ending_log_probs(
  config: ModelConfig,
  params: Params,
  tokens_BxT: ArrayLike,
  lengths_B: ArrayLike,
  counts_B: ArrayLike,
  *,
  most: int,
) -> tuple[Array, Array]:
  """Return the log-probability of the last `counts` (at most `most`) tokens of right-padded rows, f32 [B].

  And whether each of these tokens is the likeliest, bool [B].
  """
  tokens, lengths, counts = (jnp.asarray(x) for x in (tokens_BxT, lengths_B, counts_B))
  hidden = hidden_states(config, params, tokens, length_mask(lengths, tokens.shape[1], jnp))
  targets = jnp.clip(lengths[:, None] - counts[:, None] + jnp.arange(most)[None], 1, tokens.shape[1] - 1)
  # the head, whose vocabulary is most of the cost, is applied only to the states that predict these tokens
  before = jnp.take_along_axis(hidden, (targets - 1)[:, :, None], axis=1)
  logits: Any = LM(config).apply(params, before, method="logits")
  log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
  wanted = jnp.take_along_axis(tokens, targets, axis=1)
  counted = length_mask(counts, most, jnp)
  chosen = jnp.take_along_axis(log_probs, wanted[:, :, None], axis=2)[:, :, 0]
  is_likeliest = (log_probs.argmax(axis=2) == wanted) | ~counted
  return jnp.where(counted, chosen, 0).sum(axis=1), is_likeliest.all(axis=1)

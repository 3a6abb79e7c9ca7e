"""The step of every decode loop: read tokens into the caches, and keep the state of each row's last token."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from selfrag_jax.model.cache import Cache, init_cache
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM
from selfrag_jax.ragged import last_entries
from selfrag_jax.typing import Array, Params


class Position(NamedTuple):
  """Where the rows of a batch stand: the state of each row's last token [B, D], and the caches of all its tokens."""

  hidden: Array
  cache: Cache


def begin(model: ModelConfig, batch: int, capacity: int) -> Position:
  """Return `batch` rows without a token; each has room for `capacity` tokens."""
  return Position(jnp.zeros((batch, model.d_model), model.dtype), init_cache(model, batch, capacity))


def read(model: ModelConfig, params: Params, position: Position, tokens_BxT: Array, lengths_B: Array) -> Position:
  """Extend each row by the first `lengths` of its tokens: a prompt, a document, one written token. Pure.

  `params` are `unstack`ed. A row of length 0 keeps every bit. The caller checks that the tokens fit.
  """
  extended: Any = LM(model, unrolled=True).apply(params, tokens_BxT, lengths_B, position.cache, method="extend")
  hidden, cache = extended
  last = last_entries(hidden, lengths_B, jnp)
  return Position(jnp.where((lengths_B > 0)[:, None], last, position.hidden), cache)


def next_logits(model: ModelConfig, params: Params, position: Position) -> Array:
  """Return the logits [B, V] of each row's next token, in at least float32."""
  return jnp.asarray(LM(model, unrolled=True).apply(params, position.hidden, method="logits"))

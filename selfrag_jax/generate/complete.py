"""Plain completion: read ragged prompts, then write tokens until every row has stopped, as one compiled program."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from selfrag_jax.generate.sampling import SamplingConfig, sample
from selfrag_jax.generate.step import begin, next_logits, read
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.typing import Array, Params, PRNGKey

MOST_NEW = 1 << 20  # tokens; the cache is allocated for the whole text at the start


class Completion(NamedTuple):
  """The continuation of each prompt: tokens int32 [B, N], 0 beyond `lengths` int32 [B], which count the stop token."""

  tokens: Array
  lengths: Array


def check_new_tokens(n: int, context_tokens: int | None = None) -> None:
  """Raise ValueError, with the limit, if a model cannot write n new tokens within `context_tokens` (None: unknown)."""
  if type(n) is not int or not 1 <= n <= MOST_NEW:
    raise ValueError(f"max_new_tokens = {n!r:.40} must be a whole number from 1 to {MOST_NEW:,}")
  if context_tokens is not None and n >= context_tokens:
    raise ValueError(
      f"max_new_tokens = {n} leaves no room for a prompt: this model was made for {context_tokens:,} tokens in all"
    )


def complete(
  model: ModelConfig,
  params: Params,
  prompts_BxT: Array,
  lengths_B: Array,
  key: PRNGKey,
  *,
  max_new_tokens: int,
  sampling: SamplingConfig,
  stop_ids: tuple[int, ...] = (),
) -> Completion:
  """Continue right-padded prompts by at most `max_new_tokens`, until one of `stop_ids`. Pure; jit the caller.

  `params` are `unstack`ed. Rows of length 0 only fill the batch and are not continued. Raises ValueError like
  `check_new_tokens`.
  """
  check_new_tokens(max_new_tokens)
  batch, time = prompts_BxT.shape
  position = read(model, params, begin(model, batch, time + max_new_tokens), prompts_BxT, lengths_B)
  stops = jnp.asarray(stop_ids, jnp.int32)

  def step(carry):
    i, tokens, lengths, running, position = carry
    logits = next_logits(model, params, position)
    token = jnp.where(running, sample(jax.random.fold_in(key, i), logits, sampling), 0)
    tokens = tokens.at[:, i].set(token)
    position = read(model, params, position, token[:, None], running.astype(jnp.int32))
    return i + 1, tokens, lengths + running, running & ~(token[:, None] == stops[None]).any(axis=1), position

  tokens = jnp.zeros((batch, max_new_tokens), jnp.int32)
  start = (jnp.int32(0), tokens, jnp.zeros(batch, jnp.int32), lengths_B > 0, position)
  more = lambda carry: (carry[0] < max_new_tokens) & carry[3].any()
  _, tokens, lengths, *_ = jax.lax.while_loop(more, step, start)
  return Completion(tokens, lengths)

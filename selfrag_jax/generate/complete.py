"""Plain completion: read ragged prompts, then write tokens until every row has stopped, as one compiled program."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from selfrag_jax.generate.sampling import SamplingConfig, sample
from selfrag_jax.model.cache import init_cache
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM
from selfrag_jax.ragged import last_entries
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
  lm = LM(model, unrolled=True)
  batch, time = prompts_BxT.shape
  cache = init_cache(model, batch, time + max_new_tokens)
  hidden, cache = lm.apply(params, prompts_BxT, lengths_B, cache, method="extend")
  hidden = last_entries(jnp.asarray(hidden), lengths_B, jnp)
  stops = jnp.asarray(stop_ids, jnp.int32)

  def step(carry):
    i, tokens, lengths, running, hidden, cache = carry
    logits = jnp.asarray(lm.apply(params, hidden, method="logits"))
    token = jnp.where(running, sample(jax.random.fold_in(key, i), logits, sampling), 0)
    tokens = tokens.at[:, i].set(token)
    extended, cache = lm.apply(params, token[:, None], running.astype(jnp.int32), cache, method="extend")
    hidden = jnp.where(running[:, None], extended[:, 0], hidden)
    lengths += running
    return i + 1, tokens, lengths, running & ~(token[:, None] == stops[None]).any(axis=1), hidden, cache

  tokens = jnp.zeros((batch, max_new_tokens), jnp.int32)
  start = (jnp.int32(0), tokens, jnp.zeros(batch, jnp.int32), lengths_B > 0, hidden, cache)
  more = lambda carry: (carry[0] < max_new_tokens) & carry[3].any()
  _, tokens, lengths, *_ = jax.lax.while_loop(more, step, start)
  return Completion(tokens, lengths)

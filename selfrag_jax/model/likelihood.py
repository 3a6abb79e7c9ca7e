"""The likelihood of tokens: of given logits, of all tokens of a row, and of the last ones of a text."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, packed_states
from selfrag_jax.model.pooling import hidden_states
from selfrag_jax.model.vocabulary import on_own_tokens
from selfrag_jax.ragged import length_mask
from selfrag_jax.typing import Array, ArrayLike, Params

CHUNK = 256  # tokens of a row whose logits exist at once


def token_log_probs(logits: Array, tokens: Array, temperature: float = 1.0) -> Array:
  """Return log p(token) in at least float32: logits [..., V], tokens int [...] -> [...].

  Rollout and update share this function, so that their probability ratio starts at 1. Greedy decoding reports the
  probabilities of temperature 1. The gradient, 1[token] - p with the exponentials of the forward pass, is written by
  hand: automatic differentiation would pass over [..., V] three times more.
  """
  log_probs: Any = _token_log_probs(logits, tokens, temperature)
  return log_probs


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _token_log_probs(logits: Array, tokens: Array, temperature: float) -> Array:
  return _log_probs(logits, tokens, temperature)[0]


def _log_probs(logits: Array, tokens: Array, temperature: float) -> tuple[Array, tuple[Array, Array, Array]]:
  scaled = logits / (temperature or 1.0)
  largest = jnp.max(scaled, axis=-1, keepdims=True)
  exponentials = jnp.exp(scaled - largest)
  total = jnp.sum(exponentials, axis=-1, keepdims=True)
  chosen = jnp.take_along_axis(scaled, tokens[..., None], axis=-1)
  return (chosen - largest - jnp.log(total))[..., 0], (exponentials, total, tokens)


def _log_probs_gradient(temperature: float, saved: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, None]:
  exponentials, total, tokens = saved
  is_token = jax.lax.broadcasted_iota(tokens.dtype, exponentials.shape, exponentials.ndim - 1) == tokens[..., None]
  return (is_token - exponentials / total) * (gradient / (temperature or 1.0))[..., None], None


_token_log_probs.defvjp(_log_probs, _log_probs_gradient)


def sequence_log_probs(
  config: ModelConfig,
  params: Params,
  tokens_BxT: Array,
  segment_ids_BxT: Array,
  *,
  temperature: float = 1.0,
  chunk: int = CHUNK,
) -> Array:
  """Return log p(token t | tokens before it in its segment), [B, T] in at least float32; 0 for the first of a segment.

  The logits [B, chunk, V] exist for one chunk of time at a time, forward and backward: with a vocabulary of 49,152 all
  logits at once would be most of the memory. The backward pass computes them again, unless one chunk covers the row.
  Padding has log-probability 0.
  """
  hidden = packed_states(config, params, tokens_BxT, segment_ids_BxT)
  return log_probs_of_states(config, params, hidden, tokens_BxT, segment_ids_BxT, temperature=temperature, chunk=chunk)


def log_probs_of_states(
  config: ModelConfig,
  params: Params,
  hidden: Array,
  tokens_BxT: Array,
  segment_ids_BxT: Array,
  *,
  temperature: float = 1.0,
  chunk: int = CHUNK,
) -> Array:
  """Return what `sequence_log_probs` does, from the hidden states [B, T, D] of the tokens."""
  lm = LM(config)

  def of_tokens(head: Params, hidden: Array, targets: Array) -> Array:
    def chunk_log_probs(hidden: Array, targets: Array) -> Array:
      logits: Any = lm.apply(head, hidden, method="logits")
      return token_log_probs(logits, targets, temperature)

    if (time := targets.shape[1]) <= chunk:
      return chunk_log_probs(hidden, targets)

    def by_chunk(x: Array) -> Array:
      padded = jnp.pad(x, [(0, 0), (0, -time % chunk), *[(0, 0)] * (x.ndim - 2)])
      return jnp.moveaxis(padded.reshape(len(x), -1, chunk, *x.shape[2:]), 1, 0)

    again = jax.checkpoint(chunk_log_probs)
    _, out = jax.lax.scan(lambda _, xs: (None, again(*xs)), None, (by_chunk(hidden), by_chunk(targets)))
    return jnp.moveaxis(out, 0, 1).reshape(len(hidden), -1)[:, :time]

  log_probs = on_own_tokens(of_tokens, params, hidden, jnp.pad(tokens_BxT[:, 1:], ((0, 0), (0, 1))))
  shifted = jnp.pad(log_probs[:, :-1], ((0, 0), (1, 0)))
  return jnp.where(follows(segment_ids_BxT), shifted, 0)


def follows(segment_ids_BxT: Array) -> Array:
  """Tell of each token [B, T] whether one of its segment stands before it; padding has none."""
  before = jnp.pad(segment_ids_BxT, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
  return (segment_ids_BxT == before) & (segment_ids_BxT != 0)


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
  hidden = hidden_states(config, params, tokens, lengths)
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

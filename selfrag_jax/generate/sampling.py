"""Sampling of the next token (greedy, temperature, top-k, top-p), and the log-probability of a token."""

import dataclasses
import operator

import jax
import jax.numpy as jnp

from selfrag_jax.typing import Array, ArrayLike, PRNGKey

LEAST = 1e-6


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """How tokens are drawn. Temperature 0 is greedy; `top_k` 0 and `top_p` 1 leave the distribution whole.

  Raises ValueError unless temperature is 0 or at least 1e-6, `top_k` at least 0, and `top_p` within [1e-6, 1]: smaller
  values are 0 in float32, or make the logits infinite.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0

  def __post_init__(self):
    try:
      known = self.temperature == 0 or LEAST <= self.temperature < float("inf")
      known = known and operator.index(self.top_k) >= 0 and LEAST <= self.top_p <= 1
    except TypeError:  # a value is not a number
      known = False
    if not known:
      raise ValueError(f"need temperature 0 or >= {LEAST}, top_k >= 0 and {LEAST} <= top_p <= 1, got {self}")


GREEDY = SamplingConfig(temperature=0)


def sample(key: PRNGKey, logits_BxV: Array, config: SamplingConfig) -> Array:
  """Draw one token per row, int32 [B]. Top-p keeps the fewest likeliest tokens that sum to it (arXiv 1904.09751)."""
  if config.temperature == 0:
    return jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
  logits = logits_BxV / config.temperature
  lowest = jnp.finfo(logits.dtype).min
  if config.top_k:
    kth = jax.lax.top_k(logits, min(config.top_k, logits.shape[-1]))[0][:, -1:]
    logits = jnp.where(logits < kth, lowest, logits)
  if config.top_p < 1:
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probs = jax.nn.softmax(ordered, axis=-1)
    # a token stays if the likelier tokens do not reach top_p; the likeliest always stays
    kept = jnp.cumsum(probs, axis=-1) - probs < config.top_p
    least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    logits = jnp.where(logits < least, lowest, logits)
  return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def sample_rows(
  keys_B: PRNGKey, logits_BxV: Array, temperature_B: ArrayLike, top_k_B: ArrayLike, top_p_B: ArrayLike
) -> Array:
  """Draw one token per row, each with a key and settings of its own, int32 [B].

  The settings mean what those of `SamplingConfig` mean. A row's token does not depend on the other rows.
  """
  lowest = jnp.finfo(logits_BxV.dtype).min
  temperature_B, top_k_B, top_p_B = map(jnp.asarray, (temperature_B, top_k_B, top_p_B))
  is_greedy = temperature_B == 0
  scaled = logits_BxV / jnp.where(is_greedy, 1, temperature_B)[:, None].astype(logits_BxV.dtype)

  def cut(logits: Array) -> Array:
    ordered = jnp.sort(logits, axis=-1, descending=True)
    at = jnp.where(top_k_B > 0, jnp.minimum(top_k_B, logits.shape[1]), logits.shape[1]) - 1
    kth = jnp.take_along_axis(ordered, at[:, None], axis=1)
    ordered = jnp.where(ordered < kth, lowest, ordered)
    probs = jax.nn.softmax(ordered, axis=-1)
    kept = jnp.cumsum(probs, axis=-1) - probs < top_p_B[:, None]
    least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < jnp.where((top_p_B < 1)[:, None], least, kth), lowest, logits)

  def draw(logits: Array) -> Array:
    # sorting a vocabulary takes longer than everything else here
    logits = jax.lax.cond(((top_k_B > 0) | (top_p_B < 1)).any(), cut, lambda x: x, logits)
    return jax.vmap(lambda key, row: jax.random.categorical(key, row))(keys_B, logits).astype(jnp.int32)

  greedy = jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
  drawn = jax.lax.cond(is_greedy.all(), lambda _: greedy, draw, scaled)
  return jnp.where(is_greedy, greedy, drawn)

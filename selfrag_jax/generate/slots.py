"""Slots of continuous batching: rows of one batch that begin and end on their own, and how they get in and out.

The device holds a `Position`, the caches of all slots. What a slot may still write, and how it draws, comes from the
host with every call, since the host decides between two calls which rows go on.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from selfrag_jax.generate.sampling import sample_rows
from selfrag_jax.generate.step import Position, next_logits, read
from selfrag_jax.model.cache import Cache, KVCache
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.likelihood import token_log_probs
from selfrag_jax.typing import Array, ArrayLike, Params


class Rows(NamedTuple):
  """How each slot goes on, [B] each.

  `left`: tokens that it may write in this call (0: none); `written`: tokens that its answer has, which number its
  draws; `seeds` uint32 [B, 2]: the data of its random key; `stops` int32 [B, X]: tokens that end it, -1 for none.
  """

  left: ArrayLike
  written: ArrayLike
  seeds: ArrayLike
  stops: ArrayLike
  temperature: ArrayLike
  top_k: ArrayLike
  top_p: ArrayLike


def write(
  model: ModelConfig,
  params: Params,
  position: Position,
  rows: Rows,
  allowed_BxW: Array | None = None,
  *,
  steps: int,
) -> tuple[Position, Array, Array]:
  """Let each slot write at most `left` and `steps` tokens, until one that ends it. Pure.

  `allowed` uint32 [B, V / 32] has a bit for every token that may come next (bit i of word w: token 32 w + i); it holds
  for one step. Returns the position, the tokens int32 [B, steps], -1 where none was written, and the natural logarithms
  of their probabilities f32 [B, steps] under the model's own distribution, without temperature.
  """
  if allowed_BxW is not None and steps != 1:
    raise ValueError(f"the allowed tokens are those of one step, not of {steps}")
  rows = Rows(*map(jnp.asarray, rows))
  batch = len(rows.seeds)

  def step(carry):
    i, running, position, tokens, log_probs = carry
    logits = next_logits(model, params, position)
    drawn = logits if allowed_BxW is None else jnp.where(unpacked(allowed_BxW, logits.shape[1]), logits, -jnp.inf)
    keys = jax.vmap(lambda seed, n: jax.random.fold_in(jax.random.wrap_key_data(seed), n))(rows.seeds, rows.written + i)
    token = sample_rows(keys, drawn, rows.temperature, rows.top_k, rows.top_p)
    tokens = tokens.at[:, i].set(jnp.where(running, token, -1))
    log_probs = log_probs.at[:, i].set(jnp.where(running, token_log_probs(logits, token).astype(jnp.float32), 0))
    position = read(model, params, position, token[:, None], running.astype(jnp.int32))
    running &= (i + 1 < rows.left) & ~(token[:, None] == rows.stops).any(axis=1)
    return i + 1, running, position, tokens, log_probs

  nothing = jnp.full((batch, steps), -1, jnp.int32), jnp.zeros((batch, steps), jnp.float32)
  carry = jnp.int32(0), rows.left > 0, position, *nothing
  if steps == 1:
    carry = step(carry)
  else:
    carry = jax.lax.while_loop(lambda carry: (carry[0] < steps) & carry[1].any(), step, carry)
  return carry[2], carry[3], carry[4]


def unpacked(bits_BxW: Array, size: int) -> Array:
  """Return bool [B, size] from bits uint32 [B, W]; what the words do not reach is False."""
  bits = (bits_BxW[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1
  flat = bits.astype(bool).reshape(len(bits_BxW), -1)[:, :size]
  return jnp.pad(flat, ((0, 0), (0, size - flat.shape[1])))


def resized(position: Position, order: Array, capacity: int) -> Position:
  """Return the rows of slots `order` int32 [B'], with room for `capacity` tokens each; a shorter one cuts the rows."""

  def layer(cache):
    rows = jax.tree.map(lambda x: x[order], cache)
    return jax.tree.map(lambda x: _with_room(x, capacity), rows) if isinstance(cache, KVCache) else rows

  layers = tuple(map(layer, position.cache.layers))
  return Position(position.hidden[order], Cache(position.cache.lengths[order], layers))


def put(position: Position, row: Position, slot: Array) -> Position:
  """Write a row of batch 1, which has at most the capacity of the slots, into a slot."""

  def into(whole: Array, one: Array) -> Array:
    return jax.lax.dynamic_update_slice(whole, one, (slot, *[0] * (whole.ndim - 1)))

  return jax.tree.map(into, position, row)


def shortened(position: Position, length: int) -> Position:
  """Return a row of batch 1 with its first `length` tokens alone; needs a model without Mamba layers.

  The state of its last token is not known: read at least one more token.
  """
  return position._replace(cache=position.cache.replace(lengths=jnp.full((1,), length, jnp.int32)))


def _with_room(x_BxKxSxE: Array, capacity: int) -> Array:
  missing = capacity - x_BxKxSxE.shape[2]
  if missing <= 0:
    return x_BxKxSxE[:, :, :capacity]
  return jnp.pad(x_BxKxSxE, ((0, 0), (0, 0), (0, missing), (0, 0)))

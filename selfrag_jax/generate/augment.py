"""The pure functions of a model with memory: embed a text, put found chunks before an input, read the input's logits.

They run inside compiled steps; the training phases use them over a `MemoryState`.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from selfrag_jax.generate.documents import RetrievedDocuments, compact
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM
from selfrag_jax.model.pooling import hidden_states, mean_pool
from selfrag_jax.ragged import length_mask
from selfrag_jax.text.tokenizer import Tokenizer
from selfrag_jax.typing import Array, Params

Pooling = Literal["mean", "last", "cls"]
Order = Literal["score", "reverse", "edges", "position"]


class MemoryTokens(NamedTuple):
  """The ids that mark remembered chunks."""

  mem: int
  sep: int


def memory_tokens(tokenizer: Tokenizer) -> MemoryTokens:
  """Look the ids of `MemoryTokens` up in a tokenizer."""
  return MemoryTokens(tokenizer.special["[MEM]"], tokenizer.special["[SEP]"])


def embed(
  model: ModelConfig, params: Params, tokens_BxT: Array, lengths_B: Array, ids: MemoryTokens, pooling: Pooling
) -> Array:
  """Embed right-padded rows as [B, D] in at least float32. Padding is ignored; an empty row has the embedding 0.

  `mean` and `last` pool the states of the real tokens. `cls` appends `[SEP]` and takes its state: in a causal model
  only the last token has seen all others.
  """
  tokens, lengths = tokens_BxT, lengths_B
  if pooling == "cls":
    tokens = jnp.pad(tokens, ((0, 0), (0, 1))).at[jnp.arange(len(tokens)), lengths].set(ids.sep)
    lengths = lengths + 1
  hidden = hidden_states(model, params, tokens, lengths)
  position, last = jnp.arange(tokens.shape[1])[None, :], (lengths - 1)[:, None]
  chosen = position <= last if pooling == "mean" else position == last
  return mean_pool(hidden, chosen & (lengths_B > 0)[:, None])


def augment(
  tokens_BxT: Array, lengths_B: Array, found: RetrievedDocuments, ids: MemoryTokens | None, order: Order = "score"
) -> tuple[Array, Array, Array]:
  """Put the found chunks before each input: `[MEM] c1 [MEM] c2 [SEP] input`; a row without any is left as it is.

  Without `ids` the chunks are inserted without marks, as in plain text. tokens int32 [B, T], lengths [B], found: k
  chunks of X tokens, best first. Returns tokens [B, k (X + 1) + 1 + T] padded with 0, their lengths [B], and the start
  of the input in each row [B]. The order `position` sorts the chunks by slot.
  """
  batch, k, size = found.tokens.shape
  ranks = np.arange(k)
  if order == "position":
    placed = jnp.argsort(jnp.asarray(found.slots), axis=1)
  else:
    placed = {"score": ranks, "reverse": ranks[::-1], "edges": np.concatenate([ranks[::2], ranks[1::2][::-1]])}[order]
    placed = jnp.broadcast_to(placed, (batch, k))
  at = jnp.arange(batch)[:, None]
  chunks, sizes, slots = (jnp.asarray(field)[at, placed] for field in found)
  exists = slots >= 0
  marked = ids is not None
  mem, sep = ids or (0, 0)
  marks = jnp.full((batch, k, 1), mem, jnp.int32)
  filled = exists[:, :, None] & length_mask(sizes, size, jnp)
  pieces = jnp.concatenate([marks, chunks], axis=2).reshape(batch, -1)
  valid = jnp.concatenate([exists[:, :, None] & marked, filled], axis=2).reshape(batch, -1)
  separated = exists.any(axis=1, keepdims=True) & marked
  whole = jnp.concatenate([pieces, jnp.full((batch, 1), sep, jnp.int32), tokens_BxT], axis=1)
  valid = jnp.concatenate([valid, separated, length_mask(lengths_B, tokens_BxT.shape[1], jnp)], axis=1)
  tokens, lengths = compact(whole, valid, whole.shape[1])
  return tokens, lengths, lengths - lengths_B


def input_logits(
  model: ModelConfig, params: Params, tokens_BxS: Array, lengths_B: Array, starts_B: Array, time: int
) -> Array:
  """Return the logits [B, time, V] of the input part of augmented rows; it begins at `starts_B`."""
  hidden = hidden_states(model, params, tokens_BxS, lengths_B)
  at = jnp.minimum(starts_B[:, None] + jnp.arange(time)[None, :], tokens_BxS.shape[1] - 1)
  hidden = jnp.take_along_axis(hidden, at[:, :, None], axis=1)
  return jnp.asarray(LM(model).apply(params, hidden, method="logits"))

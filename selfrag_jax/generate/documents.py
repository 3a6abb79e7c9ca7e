"""What a search has found, and how it enters the context of a rollout."""

from typing import NamedTuple

import jax.numpy as jnp

from selfrag_jax.generate.control import ControlTokens
from selfrag_jax.ragged import length_mask
from selfrag_jax.typing import Array, ArrayLike


class RetrievedDocuments(NamedTuple):
  """The result of a search: document bodies int32 [B, k, X], their lengths [B, k] and slots [B, k] (-1: none)."""

  tokens: ArrayLike
  lengths: ArrayLike
  slots: ArrayLike


def gather_documents(tokens_CxX: ArrayLike, lengths_C: ArrayLike, slots_Bxk: ArrayLike) -> RetrievedDocuments:
  """Read the documents in slots of a memory; a slot of -1 gives an empty document."""
  slots = jnp.asarray(slots_Bxk)
  at = jnp.maximum(slots, 0)
  return RetrievedDocuments(tokens_CxX[at], jnp.where(slots >= 0, lengths_C[at], 0), slots)


def unseen(found: RetrievedDocuments, seen_BxN: ArrayLike, k: int) -> RetrievedDocuments:
  """Return the first `k` documents of each row that are not in the slots it has seen; what is missing has slot -1."""
  slots = jnp.asarray(found.slots)
  known = (slots[:, :, None] == jnp.asarray(seen_BxN)[:, None, :]).any(axis=2)
  order = jnp.argsort(known, axis=1, stable=True)[:, :k]
  first = lambda x: jnp.take_along_axis(jnp.asarray(x), order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=1)
  return RetrievedDocuments(first(found.tokens), first(found.lengths), jnp.where(first(known), -1, first(slots)))


def compact(tokens_BxT: Array, valid_BxT: Array, width: int) -> tuple[Array, Array]:
  """Move the valid tokens of each row to its front, in order. Returns tokens [B, width], 0-padded, and lengths [B]."""
  position = jnp.where(valid_BxT, jnp.cumsum(valid_BxT, axis=1) - 1, width)
  rows = jnp.arange(tokens_BxT.shape[0])[:, None]
  out = jnp.zeros((tokens_BxT.shape[0], width), tokens_BxT.dtype).at[rows, position].set(tokens_BxT, mode="drop")
  return out, jnp.minimum(valid_BxT.sum(axis=1, dtype=jnp.int32), width)


def document_block(found: RetrievedDocuments, control: ControlTokens, width: int) -> tuple[Array, Array]:
  """Wrap documents as the chat renderer does: `[RETRIEVAL_START] [DOC_1] body [/DOC_1] … [RETRIEVAL_END]`."""
  batch, k, size = found.tokens.shape
  column = lambda ids: jnp.broadcast_to(jnp.asarray(ids, jnp.int32)[None, :, None], (batch, k, 1))
  exists = (found.slots >= 0)[:, :, None]
  body = exists & length_mask(found.lengths, size, jnp)
  pieces = jnp.concatenate([column(control.doc_start[:k]), found.tokens, column(control.doc_end[:k])], axis=2)
  valid = jnp.concatenate([exists, body, exists], axis=2)
  edge = lambda token: jnp.full((batch, 1), token, jnp.int32)
  tokens = jnp.concatenate(
    [edge(control.retrieval_start), pieces.reshape(batch, -1), edge(control.retrieval_end)], axis=1
  )
  always = jnp.ones((batch, 1), bool)
  return compact(tokens, jnp.concatenate([always, valid.reshape(batch, -1), always], axis=1), width)


def notice_block(control: ControlTokens, batch: int, width: int) -> tuple[Array, Array]:
  """Return the block that answers a search beyond the budget: the notice, and the forced opening of an answer."""
  ids = [control.retrieval_start, *control.notice, control.retrieval_end, control.answer_start]
  row = jnp.asarray(ids + [0] * (width - len(ids)), jnp.int32)
  return jnp.broadcast_to(row[None], (batch, width)), jnp.full((batch,), len(ids), jnp.int32)

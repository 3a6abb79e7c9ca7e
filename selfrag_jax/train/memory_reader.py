"""A reader with a memory, as pure functions: remember a context, embed queries, retrieve, predict with found chunks.

The training phases take gradients through it; the position-recall experiment compares the kinds of `Visibility`.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from selfrag_jax.generate.augment import MemoryTokens, augment, embed, input_logits
from selfrag_jax.generate.documents import RetrievedDocuments, gather_documents
from selfrag_jax.memory.state import MemoryState, delete, init_memory, write
from selfrag_jax.memory.topk import search
from selfrag_jax.mesh import BATCH_AXES
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.likelihood import token_log_probs
from selfrag_jax.model.lm import LM
from selfrag_jax.ragged import kept_first
from selfrag_jax.self_rag import SelfRAGConfig
from selfrag_jax.tasks.context_batch import ContextBatch
from selfrag_jax.typing import Array, ArrayLike, Params

# The chunks of a context that a reader sees. memory: the chunks that it retrieves; deleted: the same, after the needed
# chunks were deleted; tail: the last k; head_tail: the first and the last k / 2; oracle: the needed chunks; random: k
# chunks that are not needed; none: no chunk; full: all n.
Visibility = Literal["memory", "deleted", "tail", "head_tail", "oracle", "random", "none", "full"]


class Retrieved(NamedTuple):
  """The result of s searches: slots [E q, k], the queries' embeddings [E q, s, D] and those of all chunks [E n, D]."""

  slots: Array
  queries: Array
  chunks: Array


def gold_slots(batch: ContextBatch) -> Array:
  """Return the slots of the needed chunks in the memory of the batch, [E q, g]."""
  contexts, n = batch.chunks.shape[:2]
  first = jnp.arange(contexts, dtype=jnp.int32)[:, None, None] * n
  return (batch.gold + first).reshape(-1, batch.gold.shape[2])


def is_found(slots_RxK: ArrayLike, gold_RxG: ArrayLike) -> Array:
  """Tell for each row whether all needed chunks are among the slots, bool [R]."""
  return (jnp.asarray(slots_RxK)[:, :, None] == jnp.asarray(gold_RxG)[:, None, :]).any(axis=1).all(axis=1)


def visible_slots(
  visibility: Visibility, batch: ContextBatch, k: int, rng: np.random.Generator | None = None
) -> np.ndarray:
  """Return the slots [E q, k] that a reader without retrieval sees (`full`: [E q, n]); -1 where there is none.

  `random` and `oracle` read the values of the batch; the others need only its shape, so they can be traced.
  """
  (contexts, n), rows = batch.chunks.shape[:2], batch.inputs.shape[0] * batch.inputs.shape[1]
  first = (np.arange(rows, dtype=np.int32) * contexts // rows * n)[:, None]
  if visibility == "full":
    return first + np.arange(n, dtype=np.int32)
  if visibility == "tail":
    return first + np.arange(n - k, n, dtype=np.int32)
  if visibility == "head_tail":
    return first + np.r_[: k // 2, n - (k - k // 2) : n].astype(np.int32)
  slots = np.full((rows, k), -1, np.int32)
  if visibility == "oracle":
    gold = np.asarray(gold_slots(batch))
    slots[:, : gold.shape[1]] = gold
  elif visibility == "random":
    if rng is None:
      raise ValueError("random chunks take a generator")
    gold = np.asarray(gold_slots(batch)) - first
    for row, needed in enumerate(gold):
      slots[row] = first[row] + rng.choice(np.delete(np.arange(n), needed), k, replace=False)
  return slots


class MemoryReader(NamedTuple):
  """A model with memory. All fields are static; the methods take the parameters."""

  model: ModelConfig
  config: SelfRAGConfig
  ids: MemoryTokens
  mesh: Mesh | None = None

  def remember(self, params: Params, batch: ContextBatch, embedded: Array | None = None) -> tuple[MemoryState, Array]:
    """Write all chunks into a memory, one group per context; return it and the embeddings [E n, D], with gradient.

    `embedded`: the embeddings of the chunks, if they are known already.
    """
    contexts, n, width = batch.chunks.shape
    tokens, lengths = batch.chunks.reshape(-1, width), batch.chunk_lengths.reshape(-1)
    if embedded is None:
      embedded = embed(self.model, params, tokens, lengths, self.ids, self.config.embed_pooling)
    empty = init_memory(contexts * n, embedded.shape[1], chunk_tokens=width, dtype=embedded.dtype)
    groups = jnp.repeat(jnp.arange(contexts, dtype=jnp.int32), n)
    fixed = jax.lax.stop_gradient(embedded)
    return write(empty, fixed, mask=lengths > 0, group_ids=groups, tokens=tokens, lengths=lengths), embedded

  def ask(self, params: Params, batch: ContextBatch, slots: ArrayLike | None = None) -> Array:
    """Embed the query part of each input, [E q, D], with the chunks at `slots` [E q, h] in front of it."""
    tokens, lengths = batch.inputs.reshape(-1, batch.inputs.shape[2]), batch.query_lengths.reshape(-1)
    if slots is not None:
      tokens, lengths, _ = augment(tokens, lengths, _chunks_at(batch, slots), self.ids, self.config.order)
    queries = embed(self.model, params, tokens, lengths, self.ids, self.config.embed_pooling)
    if self.config.retrieval_method == "learned":
      return jnp.asarray(LM(self.model).apply(params, queries, method="project"))
    return queries

  def retrieve(
    self, params: Params, batch: ContextBatch, forgotten: ArrayLike | None = None, embedded: Array | None = None
  ) -> Retrieved:
    """Search the context of each input for the chunks that are most similar to the input's query.

    Each further search puts the best new chunk of every earlier search in front of the query (arXiv 2009.12756), and
    adds chunks that were not found before. The chunks where `forgotten` bool [E n] are deleted before the searches.
    `embedded` is as in `remember`.
    """
    memory, chunks = self.remember(params, batch, embedded)
    if forgotten is not None:
      memory = delete(memory, forgotten)
    contexts, n_rows = len(batch.chunks), batch.inputs.shape[0] * batch.inputs.shape[1]
    groups = jnp.repeat(jnp.arange(contexts, dtype=jnp.int32), n_rows // contexts)
    slots, best = jnp.zeros((n_rows, 0), jnp.int32), None
    queries = []
    for share in self.config.shares:
      queries.append(self.ask(params, batch, best))
      found = search(
        memory,
        jax.lax.stop_gradient(queries[-1]),
        self.config.top_k,
        group_ids=groups,
        metric=self.config.metric,
        mesh=self.mesh if self.mesh is not None and self.mesh.size > 1 else None,
        axis=BATCH_AXES,
      )
      new = _without(jnp.asarray(found.slots), slots)[:, :share]
      slots = jnp.concatenate([slots, new], axis=1)
      best = new[:, :1] if best is None else jnp.concatenate([best, new[:, :1]], axis=1)
    return Retrieved(slots, jnp.stack(queries, axis=1), chunks)

  def read(self, params: Params, batch: ContextBatch, slots: ArrayLike) -> tuple[Array, Array, Array]:
    """Predict the inputs, with the chunks at `slots` in front of those that use a memory.

    Returns log-probabilities, hits and a mask of the tokens that count, [E q, T - 1]; column t is about token t + 1 of
    the input.
    """
    found = _chunks_at(batch, jnp.where(batch.use_memory.reshape(-1, 1), slots, -1))
    inputs, lengths = batch.inputs.reshape(-1, batch.inputs.shape[2]), batch.lengths.reshape(-1)
    tokens, whole, starts = augment(inputs, lengths, found, self.ids, self.config.order)
    logits = input_logits(self.model, params, tokens, whole, starts, inputs.shape[1])[:, :-1]
    targets, at = inputs[:, 1:], jnp.arange(1, inputs.shape[1])[None, :]
    counted = (at >= batch.query_lengths.reshape(-1)[:, None]) & (at < lengths[:, None])
    return token_log_probs(logits, targets), logits.argmax(axis=-1) == targets, counted


def _chunks_at(batch: ContextBatch, slots_RxK: ArrayLike) -> RetrievedDocuments:
  """Return the chunks in slots of a batch's memory."""
  return gather_documents(batch.chunks.reshape(-1, batch.chunks.shape[2]), batch.chunk_lengths.reshape(-1), slots_RxK)


def _without(slots_RxK: Array, known_RxH: Array) -> Array:
  """Return the slots of each row that are not known, in their order, followed by -1."""
  is_known = (slots_RxK[:, :, None] == known_RxH[:, None, :]).any(axis=2)
  return jnp.take_along_axis(jnp.where(is_known, -1, slots_RxK), kept_first(~is_known, jnp), axis=1)

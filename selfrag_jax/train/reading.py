"""Reading with a memory, as pure functions: remember a context, ask, retrieve, and predict with what was found.

The training phases take gradients through it; the position-recall experiment compares what can be seen (`Sight`).
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from selfrag_jax.generate.rollout import Found
from selfrag_jax.generate.sampling import token_log_probs
from selfrag_jax.memory.state import MemoryState, delete, init_memory, write
from selfrag_jax.memory.topk import search
from selfrag_jax.mesh import BATCH_AXES
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM
from selfrag_jax.self_rag import MemoryTokens, SelfRAGConfig, augment, embed, input_logits
from selfrag_jax.tasks.sequences import Sequences
from selfrag_jax.typing import Array, Params, PRNGKey

# What a reader sees of a context of n chunks: those that it retrieves; the same after the needed ones were deleted; the
# last k; the first and last k / 2; the needed ones; k others; nothing; everything.
Sight = Literal["memory", "deleted", "tail", "head_tail", "oracle", "random", "none", "full"]


class Reading(NamedTuple):
  """Of each input [E q]: mean loss of a predicted token, whether all are right, and whether the chunk that is to be
  found first was seen first and at all."""

  loss: Any
  right: Any
  first: Any
  found: Any


class Retrieved(NamedTuple):
  """What a search found: slots [E q, k]; and the embeddings of the queries [E q, D] and of all chunks [E n, D]."""

  slots: Array
  queries: Array
  chunks: Array


def gold_slots(batch: Sequences) -> Array:
  """Return where the needed chunks stand in the memory of the batch, [E q, g]."""
  contexts, n = batch.chunks.shape[:2]
  first = jnp.arange(contexts, dtype=jnp.int32)[:, None, None] * n
  return (batch.gold + first).reshape(-1, batch.gold.shape[2])


def seen(sight: Sight, batch: Sequences, k: int, key: PRNGKey | None) -> Array:
  """Return the slots [E q, k] that a reader without retrieval sees (`full`: [E q, n]); -1 where there is none."""
  contexts, n = batch.chunks.shape[:2]
  gold = gold_slots(batch)
  rows = len(gold)
  first = (jnp.arange(rows, dtype=jnp.int32) * contexts // rows * n)[:, None]
  if sight == "full":
    return first + jnp.arange(n)
  if sight == "tail":
    return first + jnp.arange(n - k, n)
  if sight == "head_tail":
    return first + jnp.concatenate([jnp.arange(k // 2), jnp.arange(n - (k - k // 2), n)])
  if sight == "random":
    assert key is not None
    needed = (first[:, :, None] + jnp.arange(n)[None, :, None] == gold[:, None, :]).any(axis=2)
    draws = jnp.where(needed, -1.0, jax.random.uniform(key, (rows, n)))
    return first + jax.lax.top_k(draws, k)[1]
  nothing = jnp.full((rows, k), -1, jnp.int32)
  return nothing.at[:, : gold.shape[1]].set(gold) if sight == "oracle" else nothing


class Reader(NamedTuple):
  """A model with memory as the phases see it: static, but for the parameters."""

  model: ModelConfig
  config: SelfRAGConfig
  ids: MemoryTokens
  mesh: Mesh | None = None

  def score(self, params: Params, batch: Sequences, sight: Sight, key: PRNGKey) -> Reading:
    """Answer the inputs with what `sight` shows of their contexts."""
    if sight in ("memory", "deleted"):
      slots = self.retrieve(params, batch, without_gold=sight == "deleted").slots
    else:
      slots = seen(sight, batch, self.config.top_k, key)
    log_probs, hits, counted = self.read(params, batch, slots)
    gold = gold_slots(batch)[:, :1]
    return Reading(
      loss=-jnp.sum(jnp.where(counted, log_probs, 0), axis=1) / counted.sum(axis=1),
      right=(hits | ~counted).all(axis=1),
      first=slots[:, 0] == gold[:, 0],
      found=(slots == gold).any(axis=1),
    )

  def remember(self, params: Params, batch: Sequences) -> tuple[MemoryState, Array]:
    """Write all chunks into a memory, each context its group; return it and the embeddings [E n, D], with gradient."""
    contexts, n, width = batch.chunks.shape
    tokens, lengths = batch.chunks.reshape(-1, width), batch.chunk_lengths.reshape(-1)
    embedded = embed(self.model, params, tokens, lengths, self.ids, self.config.embed_pooling)
    empty = init_memory(contexts * n, embedded.shape[1], chunk_tokens=width, dtype=embedded.dtype)
    groups = jnp.repeat(jnp.arange(contexts, dtype=jnp.int32), n)
    fixed = jax.lax.stop_gradient(embedded)
    return write(empty, fixed, mask=lengths > 0, group_ids=groups, tokens=tokens, lengths=lengths), embedded

  def ask(self, params: Params, batch: Sequences) -> Array:
    """Embed what is asked with, [E q, D]."""
    tokens, lengths = batch.inputs.reshape(-1, batch.inputs.shape[2]), batch.query_lengths.reshape(-1)
    queries = embed(self.model, params, tokens, lengths, self.ids, self.config.embed_pooling)
    if self.config.retrieval_method == "learned":
      return jnp.asarray(LM(self.model).apply(params, queries, method="project"))
    return queries

  def retrieve(self, params: Params, batch: Sequences, *, without_gold: bool = False) -> Retrieved:
    """Search for the chunks that are most similar to what is asked with, each input within its own context."""
    memory, chunks = self.remember(params, batch)
    if without_gold:
      memory = delete(memory, jnp.zeros(len(chunks), bool).at[gold_slots(batch).reshape(-1)].set(True))
    queries, contexts = self.ask(params, batch), len(batch.chunks)
    found = search(
      memory,
      jax.lax.stop_gradient(queries),
      self.config.top_k,
      group_ids=jnp.repeat(jnp.arange(contexts, dtype=jnp.int32), len(queries) // contexts),
      metric=self.config.metric,
      mesh=self.mesh if self.mesh is not None and self.mesh.size > 1 else None,
      axis=BATCH_AXES,
    )
    return Retrieved(jnp.asarray(found.slots), queries, chunks)

  def read(self, params: Params, batch: Sequences, slots: Array) -> tuple[Array, Array, Array]:
    """Predict the inputs with the chunks at `slots` before them, where they use a memory.

    Returns log-probabilities, hits and which tokens count, [E q, T - 1]; column t is about token t + 1 of the input.
    """
    used = jnp.where(batch.use_memory.reshape(-1, 1), slots, -1)
    at = jnp.maximum(used, 0)
    lengths = jnp.where(used >= 0, batch.chunk_lengths.reshape(-1)[at], 0)
    found = Found(batch.chunks.reshape(-1, batch.chunks.shape[2])[at], lengths, used)
    inputs, lengths = batch.inputs.reshape(-1, batch.inputs.shape[2]), batch.lengths.reshape(-1)
    tokens, whole, starts = augment(inputs, lengths, found, self.ids, self.config.order)
    logits = input_logits(self.model, params, tokens, whole, starts, inputs.shape[1])[:, :-1]
    targets, at = inputs[:, 1:], jnp.arange(1, inputs.shape[1])[None, :]
    counted = (at >= batch.query_lengths.reshape(-1)[:, None]) & (at < lengths[:, None])
    return token_log_probs(logits, targets), logits.argmax(axis=-1) == targets, counted

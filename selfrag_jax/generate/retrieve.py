"""The retrievers inside a compiled rollout: a memory, and the controls with which its results are compared."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from selfrag_jax.generate.documents import RetrievedDocuments, gather_documents
from selfrag_jax.generate.rollout import Retrieve
from selfrag_jax.memory.state import MemoryState
from selfrag_jax.memory.topk import search
from selfrag_jax.mesh import BATCH_AXES
from selfrag_jax.typing import Array, PRNGKey

Embed = Callable[[Array, Array], Array]  # (tokens int32 [B, T], lengths int32 [B]) -> [B, D]
RetrieverKind = Literal["memory", "empty", "random", "oracle"]


def make_retrieve(
  kind: RetrieverKind,
  memory: MemoryState,
  embed: Embed,
  k: int,
  *,
  group_ids: Array,
  gold_BxG: Array,
  key: PRNGKey,
  method: Literal["exact", "approx"] = "exact",
  mesh: Mesh | None = None,
) -> Retrieve:
  """Return the traced retriever of a batch.

  `memory` embeds the query and searches the row's group. The controls: `empty` finds nothing; `random` finds documents
  of the group independently of the query; `oracle` returns the gold document of the hop, whatever the query, and the
  last one again, which a distinct search leaves out.
  """
  sharded = mesh if mesh is not None and mesh.size > 1 else None

  def find(embedded_BxD: Array) -> Array:
    found = search(memory, embedded_BxD, k, group_ids=group_ids, method=method, mesh=sharded, axis=BATCH_AXES)
    # an empty query embeds to zero, to which all documents are equally similar: it finds nothing
    return jnp.where((embedded_BxD != 0).any(axis=1, keepdims=True), found.slots, -1)

  def retrieve(queries_BxQ: Array, mask_BxQ: Array, hop: Array) -> RetrievedDocuments:
    batch = queries_BxQ.shape[0]
    if kind == "memory":
      slots = find(embed(queries_BxQ, mask_BxQ.sum(axis=1)))
    elif kind == "random":
      slots = find(jax.random.normal(jax.random.fold_in(key, hop), (batch, memory.embeddings.shape[1])))
    else:
      slots = jnp.full((batch, k), -1, jnp.int32)
      if kind == "oracle":
        slots = slots.at[:, 0].set(gold_BxG[:, jnp.minimum(hop, gold_BxG.shape[1] - 1)])
    return gather_documents(memory.tokens, memory.lengths, slots)

  return retrieve

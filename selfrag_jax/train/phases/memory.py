"""Training with memory: write the chunks of a batch, retrieve for each input, read the found chunks, contrast.

A step is one compiled program over a `MemoryState` that starts empty. Phase 2 (`memory`) and phase 3
(`position_recall`) are this phase over different data.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.checked import Count, Positive, Weight
from selfrag_jax.mesh import own_rows
from selfrag_jax.model.lm import init_params
from selfrag_jax.tasks.context_batch import ContextBatch
from selfrag_jax.train.losses import info_nce
from selfrag_jax.train.memory_reader import MemoryReader, gold_slots, is_found
from selfrag_jax.train.phases.base import BatchConfig, GradientPhase, Start
from selfrag_jax.train.state import LossSums, by_micro_batch
from selfrag_jax.typing import Array, Params


@dataclasses.dataclass(frozen=True)
class MemoryPhaseConfig(BatchConfig):
  """Training with memory: contexts are remembered, and inputs need them."""

  steps: Count = 300
  batch_size: Count = 8  # contexts, each with its own memory
  needed_loss: Weight = 0.0  # highest validation loss with which the next phase may begin; 0: any
  temperature: Positive = 0.05  # of the contrastive loss


class Read(NamedTuple):
  """What a batch reads in its memory, of E contexts with n chunks and q inputs each, in s searches.

  `chunks` [E, n, D] and `queries` [E, q, s, D] are embeddings; `found` bool [E, q]: all that an input needs was found.
  Sums over the tokens of an input [E, q]: their `log_probs`, the `hits`, and how many are `counted`.
  """

  chunks: Array
  queries: Array
  found: Array
  log_probs: Array
  hits: Array
  counted: Array


class MemoryPhase(GradientPhase):
  """The phase. `contexts(rows)` returns its data, contexts by their number in the whole training."""

  contrasts_rows = True

  def __init__(
    self,
    name: str,
    contexts: Callable[[Sequence[int]], ContextBatch],
    reader: MemoryReader,
    config: MemoryPhaseConfig,
    **start: Unpack[Start],
  ):
    config.check_mesh(start["mesh"], name)
    super().__init__(name, partial(init_params, reader.model), config, **start)
    self._contexts, self._reader, self._config = contexts, reader, config

  def batch(self, step: int) -> ContextBatch:
    """Return the contexts of a step; a random share of the inputs, `memory_dropout`, sees no memory."""
    n = self._config.batch_size
    batch, own = self._contexts(self._rows(step, n)), own_rows(self._mesh, n)
    drawn = np.random.default_rng([self._seed, step]).random((n, batch.lengths.shape[1]))
    return batch._replace(use_memory=drawn[own] >= self._reader.config.memory_dropout)

  def _count_tokens(self, batch: ContextBatch) -> Array:
    return batch.chunk_lengths.sum() + batch.lengths.sum()

  def _loss(self, params: Params, batch: Any, *_: Any) -> LossSums:
    by_context = by_micro_batch(self._read, params, batch, self._config.accumulate)
    read = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), by_context)
    losses, first = self._contrast(read.queries, read.chunks, gold_slots(batch))
    language, per_row = -jnp.sum(read.log_probs), read.counted  # values per question are weighed by its tokens
    contrastive = jnp.sum(losses * per_row)
    metrics = {
      "language_loss": language,
      "accuracy": jnp.sum(read.hits),
      "contrastive_loss": contrastive,
      "recall_at_1": jnp.sum(first * per_row),
      "recall_at_k": jnp.sum(read.found * per_row),
    }
    return LossSums(language + self._reader.config.contrastive_weight * contrastive, jnp.sum(per_row), metrics)

  def _read(self, params: Params, batch: ContextBatch) -> Read:
    """Retrieve for the inputs of some contexts, and read them."""
    found = self._reader.retrieve(params, batch)
    log_probs, hits, counted = self._reader.read(params, batch, found.slots)
    of_input = lambda x: jnp.sum(jnp.where(counted, x, 0), axis=1)
    right = is_found(found.slots, gold_slots(batch))
    read = Read(found.chunks, found.queries, right, of_input(log_probs), of_input(hits), of_input(1))
    return jax.tree.map(lambda x: x.reshape(len(batch.chunks), -1, *x.shape[1:]), read)

  def _contrast(self, queries: Array, chunks: Array, gold: Array) -> tuple[Array, Array]:
    """Contrast each query with all chunks of the batch, across all devices; return losses and hits [E q].

    The target of search i is needed chunk i, or the last needed chunk if there are fewer. Hits are of the first search.
    """
    if self._reader.config.metric == "cosine":
      queries, chunks = (x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6) for x in (queries, chunks))
    needed = (jnp.arange(len(chunks))[None, None, :] == gold[:, :, None]).any(axis=1)
    results = [
      info_nce(queries[:, i], chunks, gold[:, min(i, gold.shape[1] - 1)], needed, temperature=self._config.temperature)
      for i in range(queries.shape[1])
    ]
    losses, hits = zip(*results, strict=True)
    return jnp.mean(jnp.stack(losses), axis=0), hits[0]

"""Training with memory: write the chunks of a batch, retrieve for each input, read the found chunks, contrast.

A step is one compiled program over a `MemoryState` that starts empty. Phase 2 (`memory`) and phase 3
(`position_recall`) are this phase over different data.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np

from selfrag_jax.checked import Count, Positive, Weight
from selfrag_jax.mesh import own_rows
from selfrag_jax.model.lm import init_params
from selfrag_jax.tasks.context_batch import ContextBatch
from selfrag_jax.train.losses import info_nce
from selfrag_jax.train.memory_reader import MemoryReader, Retrieved, gold_slots, is_found
from selfrag_jax.train.phases.base import BatchConfig, GradientPhase, Start
from selfrag_jax.train.state import LossSums
from selfrag_jax.typing import Array, Params


@dataclasses.dataclass(frozen=True)
class MemoryPhaseConfig(BatchConfig):
  """Training with memory: contexts are remembered, and inputs need them.

  With `accumulate` the chunks of a micro-batch are contrasted with each other alone: the reading stays that of the
  whole batch, the contrastive loss has fewer negatives.
  """

  steps: Count = 300
  batch_size: Count = 8  # contexts, each with its own memory
  needed_loss: Weight = 0.0  # highest validation loss with which the next phase may begin; 0: any
  temperature: Positive = 0.05  # of the contrastive loss


class MemoryPhase(GradientPhase):
  """The phase. `contexts(rows)` returns its data, contexts by their number in the whole training."""

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
    reader, gold = self._reader, gold_slots(batch)
    retrieved = reader.retrieve(params, batch)
    log_probs, hits, counted = reader.read(params, batch, retrieved.slots)
    per_row = counted.sum(axis=1)  # weighs the values per question by its tokens, so that micro-batches add up
    total = lambda x: jnp.sum(jnp.where(counted, x, 0))
    language = -total(log_probs)
    losses, first = self._contrast(retrieved, gold)
    contrastive = jnp.sum(losses * per_row)
    metrics = {
      "language_loss": language,
      "accuracy": total(hits),
      "contrastive_loss": contrastive,
      "recall_at_1": jnp.sum(first * per_row),
      "recall_at_k": jnp.sum(is_found(retrieved.slots, gold) * per_row),
    }
    return LossSums(language + reader.config.contrastive_weight * contrastive, jnp.sum(counted), metrics)

  def _contrast(self, retrieved: Retrieved, gold: Array) -> tuple[Array, Array]:
    """Contrast each query with all chunks of the batch, across all devices; return losses and hits [E q].

    The target of search i is needed chunk i, or the last needed chunk if there are fewer. Hits are of the first search.
    """
    queries, chunks = retrieved.queries, retrieved.chunks
    if self._reader.config.metric == "cosine":
      queries, chunks = (x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6) for x in (queries, chunks))
    needed = (jnp.arange(len(chunks))[None, None, :] == gold[:, :, None]).any(axis=1)
    results = [
      info_nce(queries[:, i], chunks, gold[:, min(i, gold.shape[1] - 1)], needed, temperature=self._config.temperature)
      for i in range(queries.shape[1])
    ]
    losses, hits = zip(*results, strict=True)
    return jnp.mean(jnp.stack(losses), axis=0), hits[0]

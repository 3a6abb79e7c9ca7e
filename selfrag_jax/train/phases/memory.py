"""Training with memory: write the chunks of a batch, retrieve for each input, read what was found, contrast.

Everything is one compiled step over a `MemoryState` that is empty when it begins. Phase 2 (`memory`) and phase 3
(`position_recall`) are this phase over different data.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from selfrag_jax.checked import Checked, Count, Positive, Weight
from selfrag_jax.mesh import check_batch
from selfrag_jax.model.lm import init_params
from selfrag_jax.tasks.context_batch import ContextBatch
from selfrag_jax.train.losses import info_nce
from selfrag_jax.train.memory_reader import MemoryReader, Retrieved, gold_slots, is_found
from selfrag_jax.train.optimizer import OptimizerConfig
from selfrag_jax.train.phases.base import GradientPhase, check_split
from selfrag_jax.train.state import LossSums
from selfrag_jax.typing import Array, Params


@dataclasses.dataclass(frozen=True)
class MemoryPhaseConfig(Checked):
  """Training with memory: contexts that are remembered, and inputs that need them."""

  steps: Count = 300
  batch_size: Count = 8  # contexts, each with its own memory
  needed_loss: Weight = 0.0  # on validation, for the phase after this one; 0: whatever it is
  accumulate: Count = 1
  temperature: Positive = 0.05  # of the contrastive loss
  optimizer: OptimizerConfig = OptimizerConfig()

  def __post_init__(self):
    super().__post_init__()
    check_split(self.batch_size, self.accumulate, "batch_size")


class MemoryPhase(GradientPhase):
  """The phase. `contexts(step)` gives its data, a function of the seed and the step; `evaluate_reader(params)` scores
  it; `params` start it, None draws fresh ones."""

  def __init__(
    self,
    name: str,
    contexts: Callable[[int], ContextBatch],
    reader: MemoryReader,
    config: MemoryPhaseConfig,
    *,
    mesh: Mesh,
    seed: int,
    params: Params | None,
    evaluate_reader: Callable[[Params], Mapping[str, float]],
  ):
    check_batch(mesh, config.batch_size // config.accumulate, f"{name}.batch_size / {name}.accumulate")
    super().__init__(
      name, partial(init_params, reader.model), config, mesh=mesh, seed=seed, params=params, evaluate=evaluate_reader
    )
    self._contexts, self._reader, self._config = contexts, reader, config

  def batch(self, step: int) -> ContextBatch:
    """Return the contexts of a step; some of their inputs see no memory."""
    batch = self._contexts(step)
    rng = np.random.default_rng([self._seed, step])
    return batch._replace(use_memory=rng.random(batch.lengths.shape) >= self._reader.config.memory_dropout)

  def _count_tokens(self, batch: ContextBatch) -> int:
    return int(batch.chunk_lengths.sum() + batch.lengths.sum())

  def _loss(self, params: Params, batch: Any, *_: Any) -> LossSums:
    reader, gold = self._reader, gold_slots(batch)
    retrieved = reader.retrieve(params, batch)
    log_probs, hits, counted = reader.read(params, batch, retrieved.slots)
    per_row = counted.sum(axis=1)  # what is counted once a question weighs as much as its tokens: micro-batches add up
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
    """Contrast each query with all chunks of the batch, on whatever device; return losses and hits [E q].

    Search i is to find needed chunk i, the last of them where there are fewer. A hit is one of the first search.
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

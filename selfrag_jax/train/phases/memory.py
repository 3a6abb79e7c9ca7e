"""Training with memory: write the chunks of a batch, retrieve for each input, read what was found, contrast.

Everything is one compiled step over a `MemoryState` that is empty when it begins. Phase 2 (`memory`) and phase 3
(`position_recall`) are this phase over different data.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from selfrag_jax.generate.retrieve import gather_documents
from selfrag_jax.generate.rollout import Found
from selfrag_jax.generate.sampling import token_log_probs
from selfrag_jax.memory.state import MemoryState, init_memory, write
from selfrag_jax.memory.topk import search
from selfrag_jax.mesh import BATCH_AXES, check_batch
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM
from selfrag_jax.self_rag import MemoryTokens, SelfRAGConfig, augment, embed, input_logits
from selfrag_jax.tasks.sequences import Sequences
from selfrag_jax.train.data import batches
from selfrag_jax.train.losses import info_nce
from selfrag_jax.train.phases.base import GradientPhase
from selfrag_jax.train.settings import MemoryPhaseConfig
from selfrag_jax.train.state import LossSums, TrainState
from selfrag_jax.typing import Array, Params


class Reader(NamedTuple):
  """A model with memory as the phases see it: static, but for the parameters."""

  model: ModelConfig
  config: SelfRAGConfig
  ids: MemoryTokens
  mesh: Mesh | None = None

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

  def retrieve(self, memory: MemoryState, queries: Array, contexts: int) -> Array:
    """Return the slots [E q, k] of the chunks that are most similar, each query within its own context."""
    groups = jnp.repeat(jnp.arange(contexts, dtype=jnp.int32), len(queries) // contexts)
    sharded = self.mesh if self.mesh is not None and self.mesh.size > 1 else None
    return jnp.asarray(
      search(
        memory,
        jax.lax.stop_gradient(queries),
        self.config.top_k,
        group_ids=groups,
        metric=self.config.metric,
        mesh=sharded,
        axis=BATCH_AXES,
      ).slots
    )

  def read(self, params: Params, batch: Sequences, found: Found) -> tuple[Array, Array, Array]:
    """Predict the inputs with what was found before them: log-probabilities, hits and which tokens count, [E q, T - 1].

    Column t is about token t + 1 of the input.
    """
    inputs, lengths = batch.inputs.reshape(-1, batch.inputs.shape[2]), batch.lengths.reshape(-1)
    tokens, whole, starts = augment(inputs, lengths, found, self.ids, self.config.order)
    logits = input_logits(self.model, params, tokens, whole, starts, inputs.shape[1])[:, :-1]
    targets, at = inputs[:, 1:], jnp.arange(1, inputs.shape[1])[None, :]
    counted = (at >= batch.query_lengths.reshape(-1)[:, None]) & (at < lengths[:, None])
    return token_log_probs(logits, targets), logits.argmax(axis=-1) == targets, counted


class SequenceData(Protocol):
  """Where the sequences of a step come from."""

  def batch(self, step: int) -> Sequences:
    """Return the sequences of a step: a function of the seed and the step."""
    ...


class MemoryPhase(GradientPhase):
  """The phase over `data`. `evaluate_reader(params)` scores it; `params` start it."""

  def __init__(
    self,
    name: str,
    data: SequenceData,
    reader: Reader,
    config: MemoryPhaseConfig,
    *,
    mesh: Mesh,
    seed: int,
    params: Params,
    evaluate_reader: Callable[[Params], Mapping[str, float]],
  ):
    check_batch(mesh, config.batch_size // config.accumulate, f"{name}.batch_size / {name}.accumulate")
    super().__init__(name, reader.model, config, mesh=mesh, seed=seed, params=params)
    self._data, self._reader, self._config, self._evaluate = data, reader, config, evaluate_reader

  def batches(self, start: int) -> Iterator[Sequences]:
    return batches(self.batch, start, self.total_steps)

  def batch(self, step: int) -> Sequences:
    """Return the sequences of a step; some of them see no memory."""
    batch = self._data.batch(step)
    rng = np.random.default_rng([self._seed, step])
    return batch._replace(use_memory=rng.random(batch.lengths.shape) >= self._reader.config.memory_dropout)

  def step(self, state: TrainState, batch: Sequences) -> tuple[TrainState, Mapping[str, Any]]:
    tokens = int(batch.chunk_lengths.sum() + batch.lengths.sum())
    state, metrics = self._update(state, self._on_mesh(batch))
    return state, metrics | {"tokens": tokens}

  def evaluate(self, state: TrainState) -> Mapping[str, float]:
    return self._evaluate(state.params)

  def lower(self) -> dict[str, jax.stages.Lowered]:
    """Lower the program of a step for the devices of the mesh, which need not be there."""
    return {"update": self._lower_update(self.batch(0))}

  def _loss(self, params: Params, batch: Any, *_: Any) -> LossSums:
    reader, (contexts, n, _) = self._reader, batch.chunks.shape
    memory, chunks = reader.remember(params, batch)
    queries = reader.ask(params, batch)
    slots = reader.retrieve(memory, queries, contexts)
    gold = batch.gold.reshape(len(queries), -1)
    gold = gold + n * (jnp.arange(len(queries)) * contexts // len(queries))[:, None]
    found = gather_documents(memory, jnp.where(batch.use_memory.reshape(-1, 1), slots, -1))
    log_probs, hits, counted = reader.read(params, batch, found)

    if reader.config.metric == "cosine":
      queries, chunks = (x / jnp.maximum(jnp.linalg.norm(x, axis=1, keepdims=True), 1e-6) for x in (queries, chunks))
    also = (jnp.arange(len(chunks))[None, None, :] == gold[:, :, None]).any(axis=1)
    contrastive, first = info_nce(queries, chunks, gold[:, 0], also, temperature=self._config.temperature)
    per_row = counted.sum(axis=1)  # a sum over tokens, like the other loss: micro-batches add up
    total = lambda x: jnp.sum(jnp.where(counted, x, 0))
    contrastive = jnp.sum(contrastive * per_row)
    language = -total(log_probs)
    metrics = {
      "language_loss": language,
      "contrastive_loss": contrastive,
      "accuracy": total(hits),
      "recall_at_1": jnp.sum(first * per_row),
      "recall_at_k": jnp.sum((slots == gold[:, :1]).any(axis=1) * per_row),
    }
    return LossSums(language + reader.config.contrastive_weight * contrastive, jnp.sum(counted), metrics)

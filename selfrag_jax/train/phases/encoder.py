"""Contrastive training of a text encoder: a query becomes nearer to its document than to all others of the batch.

Negatives are the documents of the other queries, across all devices, and hard negatives that BM25 found (DPR, arXiv
2004.04906). Rows are embedded in chunks whose activations are computed again for the gradient: memory does not bound
the batch, and the gradient is exact. This is gradient caching (arXiv 2101.06983) by rematerialisation.

A language model can learn both, to embed and to write, from one reading of the documents (GritLM, arXiv 2402.09906).
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.checked import Checked, Count, Natural, Positive, Range, Share, Weight
from selfrag_jax.encoders.base import TextEncoder
from selfrag_jax.encoders.language_model import LMEncoder, read
from selfrag_jax.mesh import check_batch, own_rows
from selfrag_jax.ragged import length_mask, pad_rows
from selfrag_jax.tasks.ranking import RankingTask
from selfrag_jax.train.losses import info_nce
from selfrag_jax.train.optimizer import OptimizerConfig
from selfrag_jax.train.phases.base import GradientPhase, Start
from selfrag_jax.train.state import LossSums
from selfrag_jax.typing import Array, Params


@dataclasses.dataclass(frozen=True)
class EncoderPhaseConfig(Checked):
  """Contrastive training of a text encoder. A batch is never split: its documents are each other's negatives."""

  steps: Count = 150
  batch_size: Count = 32  # queries
  hard_negatives: Natural = 1  # documents found by BM25, per query
  query_tokens: Annotated[int, Range(3, 2**20)] = 32  # with the two tokens that begin and end a text
  document_tokens: Annotated[int, Range(3, 2**20)] = 192
  temperature: Positive = 0.05
  trained: Literal["all", "queries"] = "all"  # queries: the vectors of documents stay those of the start
  contrastive_weight: Weight = 1.0
  language_weight: Weight = 0.0  # of the language loss on the documents, for a language model that must stay one
  kept: Share = 0.0  # of the start's weights in the average with the trained ones, which is saved (arXiv 2109.01903)
  matmul_dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of a language model's training; see `ModelConfig`
  chunk: Natural = 0  # rows embedded at once, for batches that exceed the memory; 0: all
  optimizer: OptimizerConfig = OptimizerConfig()

  @property
  def accumulate(self) -> int:
    return 1

  def __post_init__(self):
    super().__post_init__()
    if not self.contrastive_weight and not self.language_weight:
      raise ValueError("contrastive_weight and language_weight are both 0: nothing would be trained")
    if self.language_weight and self.trained == "queries":
      raise ValueError("language_weight is the loss on documents, which trained = 'queries' does not read; set it to 0")
    if self.chunk and self.batch_size % self.chunk:
      raise ValueError(f"batch_size {self.batch_size} must be a multiple of chunk {self.chunk}")


class EncoderPhase(GradientPhase):
  """The phase. It starts from the encoder's parameters; `evaluate_params(params)` scores parameters."""

  best_metric = "ndcg@10"

  def __init__(
    self,
    name: str,
    task: RankingTask,
    encoder: TextEncoder,
    config: EncoderPhaseConfig,
    **start: Unpack[Start],
  ):
    check_batch(start["mesh"], config.chunk or config.batch_size, f"{name}.chunk, or {name}.batch_size")
    if config.language_weight and not isinstance(encoder, LMEncoder):
      raise ValueError(
        f"{name}.language_weight = {config.language_weight} needs a language model, such as smollm2-135m"
      )
    if config.matmul_dtype != "auto":
      if not isinstance(encoder, LMEncoder):
        raise ValueError(f"{name}.matmul_dtype = {config.matmul_dtype} is for language models, such as smollm2-135m")
      encoder = encoder.multiplying(config.matmul_dtype)
    super().__init__(name, encoder.init, config, **start)
    self._encoder, self.task, self._config = encoder, task, config
    self._queries, self._documents = encoder.tokens(task.queries), encoder.tokens(task.documents)

  def batch(self, step: int) -> dict[str, np.ndarray]:
    """Return tokens and lengths of queries [B, …] and of documents [B, 1 + n, …], and all relevant pairs (`known`)."""
    n = self._config.batch_size
    every, own = self.task.examples(range(step * n, (step + 1) * n)), own_rows(self._mesh, n)
    queries, documents = every.queries[own], every.documents[own]
    asked, asked_lengths = padded([self._queries[i] for i in queries], self._config.query_tokens)
    batch = {
      "queries": asked,
      "query_lengths": asked_lengths,
      "known": self.task.known(queries.tolist(), every.documents.reshape(-1).tolist()),
    }
    if self._config.trained == "queries":
      return {**batch, "vectors": self._vectors[documents]}
    shown, lengths = padded([self._documents[i] for i in documents.reshape(-1)], self._config.document_tokens)
    return {**batch, "documents": shown.reshape(*documents.shape, -1), "lengths": lengths.reshape(documents.shape)}

  @cached_property
  def _vectors(self) -> np.ndarray:
    """The documents' vectors before the training, f32 [N, D]."""
    return np.asarray(self._encoder(self.task.documents), np.float32)

  def _count_tokens(self, batch: dict[str, Array]) -> Array:
    return sum((batch[name].sum() for name in ("lengths", "query_lengths") if name in batch), jnp.zeros((), jnp.int32))

  def _loss(self, params: Params, batch: dict[str, Array], *_: Any) -> LossSums:
    asking = self._encoder.query_params(params)
    queries = self._by_chunk(self._embed, asking, batch["queries"], batch["query_lengths"])
    written = None
    if "vectors" in batch:
      documents = batch["vectors"]
    else:
      embed = self._embed_and_write if self._config.language_weight else self._embed
      columns = range(batch["documents"].shape[1])
      found = [self._by_chunk(embed, params, batch["documents"][:, i], batch["lengths"][:, i]) for i in columns]
      if self._config.language_weight:
        found, losses, counts = zip(*found, strict=True)
        written = sum(map(jnp.sum, losses)) / jnp.maximum(sum(map(jnp.sum, counts)), 1)
      documents = jnp.stack(found, axis=1)
    n, width = documents.shape[:2]
    documents = documents.reshape(n * width, -1)
    gold = jnp.arange(n) * width
    losses, first = info_nce(queries, documents, gold, batch["known"], temperature=self._config.temperature)
    weight = jnp.asarray(n, losses.dtype)
    loss, metrics = self._config.contrastive_weight * losses.sum(), {"accuracy": first.sum().astype(losses.dtype)}
    if written is not None:
      metrics["language_loss"] = n * written
      loss += self._config.language_weight * metrics["language_loss"]
    return LossSums(loss, weight, metrics)

  def _by_chunk(self, read: Callable[..., Any], params: Params, tokens: Array, lengths: Array) -> Any:
    """Apply `read(params, tokens, lengths)` to `chunk` rows at a time; it returns arrays with a row for each."""
    chunk = self._config.chunk or len(tokens)
    if chunk == len(tokens):
      return read(params, tokens, lengths)
    # a chunk has rows of every shard: the batch axis stays split over the devices
    by_chunk = lambda x: jnp.moveaxis(x.reshape(chunk, -1, *x.shape[1:]), 1, 0)
    rows = jax.lax.map(jax.checkpoint(lambda rows: read(params, *rows)), (by_chunk(tokens), by_chunk(lengths)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(len(tokens), *x.shape[2:]), rows)

  def _embed(self, params: Params, tokens: Array, lengths: Array) -> Array:
    return self._encoder.apply(params, tokens, lengths)

  def _embed_and_write(self, params: Params, tokens: Array, lengths: Array) -> tuple[Array, Array, Array]:
    """Return the vectors, and the cross-entropy [B] of the tokens between the first and the last of each row.

    The last one of a text that was cut does not follow the others, see `padded`. The third is the number of tokens [B].
    """
    assert isinstance(self._encoder, LMEncoder)
    vectors, log_probs = read(self._encoder.config, params["model"], tokens, lengths)
    mask = length_mask(lengths - 1, tokens.shape[1], jnp).at[:, 0].set(False)
    loss = -jnp.sum(jnp.where(mask, log_probs, 0), axis=1)
    return self._encoder.standardised(params, vectors, lengths), loss, mask.sum(axis=1)


def padded(rows: Sequence[Sequence[int]], longest: int) -> tuple[np.ndarray, np.ndarray]:
  """Pad rows of token ids with 0; a longer row is cut but keeps its last token, which closes the text."""
  return pad_rows([row if len(row) <= longest else [*row[: longest - 1], row[-1]] for row in rows], longest)

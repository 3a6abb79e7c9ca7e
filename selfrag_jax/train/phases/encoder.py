"""Contrastive training of a text encoder: a query becomes nearer to its document than to all others of the batch.

Negatives are the documents of the other queries, across all devices, and hard negatives that BM25 found (DPR, arXiv
2004.04906).

A language model can learn both, to embed and to write, from one reading of the documents (GritLM, arXiv 2402.09906).
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Unpack

import jax.numpy as jnp
import numpy as np

from selfrag_jax.checked import Count, Natural, Positive, Range, Share, Weight
from selfrag_jax.encoders.base import TextEncoder
from selfrag_jax.encoders.language_model import LMEncoder, read
from selfrag_jax.mesh import own_rows
from selfrag_jax.model.likelihood import CHUNK, log_probs_of_states
from selfrag_jax.ragged import length_mask, pad_rows
from selfrag_jax.tasks.ranking import RankingTask
from selfrag_jax.train.losses import info_nce
from selfrag_jax.train.phases.base import BatchConfig, GradientPhase, Start
from selfrag_jax.train.state import LossSums, by_micro_batch
from selfrag_jax.typing import Array, Params

HEAD_TOKENS = 4096  # tokens whose logits exist at once


@dataclasses.dataclass(frozen=True)
class EncoderPhaseConfig(BatchConfig):
  """Contrastive training of a text encoder."""

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

  def __post_init__(self):
    super().__post_init__()
    if not self.contrastive_weight and not self.language_weight:
      raise ValueError("contrastive_weight and language_weight are both 0: nothing would be trained")
    if self.language_weight and self.trained == "queries":
      raise ValueError("language_weight is the loss on documents, which trained = 'queries' does not read; set it to 0")


class EncoderPhase(GradientPhase):
  """The phase. It starts from the encoder's parameters; `evaluate_params(params)` scores parameters."""

  best_metric = "ndcg@10"
  contrasts_rows = True

  def __init__(
    self,
    name: str,
    task: RankingTask,
    encoder: TextEncoder,
    config: EncoderPhaseConfig,
    **start: Unpack[Start],
  ):
    config.check_mesh(start["mesh"], name)
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
    known, rows = batch["known"], {name: rows for name, rows in batch.items() if name != "known"}
    read = by_micro_batch(self._read, params, rows, self._config.accumulate)
    n, width = read["vectors"].shape[:2]
    documents, gold = read["vectors"].reshape(n * width, -1), jnp.arange(n) * width
    losses, first = info_nce(read["asked"], documents, gold, known, temperature=self._config.temperature)
    weight = jnp.asarray(n, losses.dtype)
    loss, metrics = self._config.contrastive_weight * losses.sum(), {"accuracy": first.sum().astype(losses.dtype)}
    if self._config.language_weight:
      metrics["language_loss"] = n * read["losses"].sum() / jnp.maximum(read["counts"].sum(), 1)
      loss += self._config.language_weight * metrics["language_loss"]
    return LossSums(loss, weight, metrics)

  def _read(self, params: Params, batch: dict[str, Array]) -> dict[str, Array]:
    """Return the vectors of queries (`asked` [B, D]) and documents (`vectors` [B, 1 + n, D]) of rows of a batch.

    With a language loss also its sums over the documents (`losses`, `counts` [B, 1 + n]), see `_embed_and_write`.
    """
    asked = self._encoder.apply(self._encoder.query_params(params), batch["queries"], batch["query_lengths"])
    if "vectors" in batch:
      return {"asked": asked, "vectors": batch["vectors"]}
    rows = batch["lengths"].shape
    shown = params, batch["documents"].reshape(-1, batch["documents"].shape[2]), batch["lengths"].reshape(-1)
    if self._config.language_weight:
      read = dict(zip(("vectors", "losses", "counts"), self._embed_and_write(*shown), strict=True))
    else:
      read = {"vectors": self._encoder.apply(*shown)}
    return {"asked": asked, **{name: x.reshape(*rows, *x.shape[1:]) for name, x in read.items()}}

  def _embed_and_write(self, params: Params, tokens: Array, lengths: Array) -> tuple[Array, Array, Array]:
    """Return the vectors, and the cross-entropy [B] of the tokens between the first and the last of each row.

    The last one of a text that was cut does not follow the others, see `padded`. The third is the number of tokens [B].
    """
    assert isinstance(self._encoder, LMEncoder)
    config = self._encoder.config
    vectors, states = read(config, params, tokens, lengths)
    row = length_mask(lengths, tokens.shape[1], jnp)
    chunk = min(max(HEAD_TOKENS // len(tokens), 1), CHUNK)
    read_tokens, segment_ids = jnp.where(row, tokens, 0), row.astype(jnp.int32)
    log_probs = log_probs_of_states(config, params["model"], states, read_tokens, segment_ids, chunk=chunk)
    mask = length_mask(lengths - 1, tokens.shape[1], jnp).at[:, 0].set(False)
    loss = -jnp.sum(jnp.where(mask, log_probs, 0), axis=1)
    return self._encoder.standardised(params, vectors, lengths), loss, mask.sum(axis=1)


def padded(rows: Sequence[Sequence[int]], longest: int) -> tuple[np.ndarray, np.ndarray]:
  """Pad rows of token ids with 0; a longer row is cut but keeps its last token, which closes the text."""
  return pad_rows([row if len(row) <= longest else [*row[: longest - 1], row[-1]] for row in rows], longest)

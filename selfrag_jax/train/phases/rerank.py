"""Training of a cross-encoder: of the documents that BM25 finds for a query, the relevant one is to score highest.

The loss is the cross-entropy of the relevant document among the candidates (LCE, arXiv 2101.08751).
"""

import dataclasses
from typing import Annotated, Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.checked import Count, Range
from selfrag_jax.retrieval.cross_encoder import CrossEncoder, join_pairs, score
from selfrag_jax.tasks.ranking import RankingTask
from selfrag_jax.train.phases.base import BatchConfig, GradientPhase, Start
from selfrag_jax.train.phases.encoder import padded
from selfrag_jax.train.state import LossSums
from selfrag_jax.typing import Array, Params


@dataclasses.dataclass(frozen=True)
class RerankPhaseConfig(BatchConfig):
  """Training of a cross-encoder on the candidates of BM25."""

  steps: Count = 300
  batch_size: Count = 8  # queries
  negatives: Count = 5  # candidates beside the relevant one
  depth: Count = 50  # of BM25's ranking: candidates come from it in training, all of it is reranked in evaluation
  tokens: Annotated[int, Range(16, 2**20)] = 224  # of query and document together

  def __post_init__(self):
    super().__post_init__()
    if self.depth < self.negatives:
      raise ValueError(f"depth {self.depth} must be at least negatives {self.negatives}, which come from that depth")


class RerankPhase(GradientPhase):
  """The phase. It starts from the cross-encoder's parameters; `evaluate_params(params)` scores parameters."""

  best_metric = "ndcg@10"

  def __init__(
    self,
    name: str,
    task: RankingTask,
    encoder: CrossEncoder,
    config: RerankPhaseConfig,
    **start: Unpack[Start],
  ):
    config.check_mesh(start["mesh"], name)
    super().__init__(name, encoder.init, config, **start)
    self.task, self._encoder, self._config = task, encoder, config
    self._queries, self._documents = (encoder.tokenizer.encode_batch(x) for x in (task.queries, task.documents))

  def batch(self, step: int) -> dict[str, np.ndarray]:
    """Return tokens int32 [B, 1 + n, T] and lengths [B, 1 + n] of pairs, that of the relevant document first."""
    found = self.task.examples(self._rows(step, self._config.batch_size))
    texts = [self._documents[i] for i in found.documents.reshape(-1)]
    queries = [self._queries[i] for i in np.repeat(found.queries, found.documents.shape[1])]
    tokens, lengths = padded(join_pairs(queries, texts, self._encoder), self._config.tokens)
    shape = found.documents.shape
    return {"tokens": tokens.reshape(*shape, -1), "lengths": lengths.reshape(shape)}

  def _count_tokens(self, batch: dict[str, Array]) -> Array:
    return batch["lengths"].sum()

  def _loss(self, params: Params, batch: dict[str, Array], *_: Any) -> LossSums:
    shape = batch["lengths"].shape
    closing = self._encoder.tokenizer.special["[SEP]"]
    flat = batch["tokens"].reshape(-1, batch["tokens"].shape[2]), batch["lengths"].reshape(-1)
    scores = score(self._encoder.config, params, *flat, closing).reshape(shape)
    losses = jax.nn.logsumexp(scores, axis=1) - scores[:, 0]
    hits = (scores[:, 0] >= scores.max(axis=1)).astype(losses.dtype)
    return LossSums(losses.sum(), jnp.asarray(shape[0], losses.dtype), {"accuracy": hits.sum()})

"""`RerankRetriever`: a retriever that finds candidates, and a slower function, the reranker, that sorts them.

A reranker is any function that maps a query and documents to scores; `RERANKERS` has some by name.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from selfrag_jax.encoders.base import MINILM, Encoder, TextFunction
from selfrag_jax.encoders.load import load_encoder
from selfrag_jax.memory.diversity import diverse_order
from selfrag_jax.memory.filters import Where
from selfrag_jax.memory.scoring import check_k
from selfrag_jax.retrieval.base import BaseRetriever, Hits, create, register
from selfrag_jax.retrieval.composite import CompositeRetriever
from selfrag_jax.retrieval.dense import as_rows
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.hybrid import normalized
from selfrag_jax.typing import ArrayLike

FUNCTION = "function"  # the name in a folder of a reranker that was given as a function
Reranker = Callable[[str, Sequence[Document]], ArrayLike]  # query, N documents -> scores [N]


class MMR:
  """Maximal marginal relevance (Carbonell & Goldstein 1998): choose documents near the query and far from chosen ones.

  A `tradeoff` of 1 orders by similarity to the query alone. The scores express only the order: they fall evenly from 1.
  """

  def __init__(self, model_name: str = MINILM, *, tradeoff: float = 0.5, encoder: Encoder | TextFunction | None = None):
    """Raises ValueError for a tradeoff outside [0, 1]."""
    if not 0 <= tradeoff <= 1:
      raise ValueError(f"tradeoff = {tradeoff} must be in [0, 1]")
    self._name, self._tradeoff, self._encoder = model_name, tradeoff, encoder

  def __call__(self, query: str, documents: Sequence[Document]) -> np.ndarray:
    """Score each of N documents by its place in the order, f32 [N]."""
    if self._encoder is None:
      self._encoder = load_encoder(self._name)
    rows = as_rows(self._encoder([query, *(document.text for document in documents)]), 1 + len(documents))
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    relevance, redundancy = self._tradeoff * (rows[1:] @ rows[0]), (1 - self._tradeoff) * (rows[1:] @ rows[1:].T)
    scores = np.zeros(len(documents), np.float32)
    scores[diverse_order(relevance, redundancy, len(documents))] = 1 - np.arange(len(documents)) / len(documents)
    return scores


def _cross_encoder(model_name: str, **settings: Any) -> Reranker:
  from selfrag_jax.retrieval.cross_encoder import load_cross_encoder  # TensorFlow takes seconds to import

  return load_cross_encoder(model_name, **settings)


def _likelihood(model_name: str = "smollm2-135m", **settings: Any) -> Reranker:
  from selfrag_jax.retrieval.likelihood import Likelihood

  return Likelihood.load(model_name, **settings)


RERANKERS: dict[str, Callable[..., Reranker]] = {
  "cross-encoder": _cross_encoder,
  "likelihood": _likelihood,
  "mmr": MMR,
}


@register("rerank")
class RerankRetriever(CompositeRetriever):
  """A retriever that sorts the best `depth` documents of another retriever by the scores of a reranker.

  Both scores are stretched to [0, 1] over the candidates. `weight` is the weight of the reranker's score; 1 ignores the
  score of the first retriever.
  """

  def __init__(
    self,
    retriever: BaseRetriever | str = "bm25",
    reranker: Reranker | str = "cross-encoder",
    *,
    depth: int = 50,
    weight: float = 1.0,
    retriever_settings: dict[str, Any] | None = None,
    reranker_settings: dict[str, Any] | None = None,
  ):
    """Make a retriever from another retriever, and take over its documents if it holds any.

    Args:
      retriever: a retriever, or a retriever's name, with `retriever_settings`.
      reranker: a function, which must be given to `load` again, or a reranker's name, with `reranker_settings`.
      depth: the number of candidates that are sorted, or `top_k` if that is larger.
      weight: the weight of the reranker's score, in [0, 1].

    Raises ValueError for an unknown name and for wrong values.
    """
    first = create(retriever, **retriever_settings or {}) if isinstance(retriever, str) else retriever
    if not 0 <= weight <= 1:
      raise ValueError(f"weight = {weight} must be in [0, 1]")
    if isinstance(reranker, str) and reranker != FUNCTION:
      if reranker not in RERANKERS:
        raise ValueError(
          f"no reranker is called {reranker!r}; one of {', '.join(RERANKERS)}, or a function of your own"
        )
      if reranker == "cross-encoder" and "model_name" not in (reranker_settings or {}):
        raise ValueError('a cross-encoder needs reranker_settings={"model_name": a folder or a name on the hub}')
    super().__init__(
      [first],
      retriever=first.name,
      reranker=reranker if isinstance(reranker, str) else FUNCTION,
      depth=check_k(depth, "depth"),
      weight=weight,
      retriever_settings=first.settings,
      reranker_settings=reranker_settings or {},
    )
    self.first, self._given = first, reranker

  @property
  def reranker(self) -> Reranker:
    """The reranking function; a reranker by name is loaded at first need. Raises ValueError if it is missing."""
    if self._given == FUNCTION:
      raise ValueError("this retriever was saved with a function; give it again: load(folder, reranker=...)")
    if isinstance(self._given, str):
      self._given = RERANKERS[self._given](**self.settings["reranker_settings"])
    return self._given

  def _search(self, queries: Sequence[str], top_k: int, where: Where | None) -> Hits:
    self._check_parts()
    candidates = self.first.retrieve_batch(queries, max(top_k, self.settings["depth"]), where=where)
    found, weight = Hits([], []), self.settings["weight"]
    for query, documents in zip(queries, candidates, strict=True):
      ids = [document.id for document in documents]
      scores = np.asarray(self.reranker(query, documents), np.float64) if documents else np.zeros(0)
      if scores.shape != (len(ids),) or not np.isfinite(scores).all():
        raise ValueError(f"the reranker gave {scores.shape} scores for {len(ids)} documents, or some are not finite")
      new, old = normalized(ids, scores.tolist()), normalized(ids, [document.score or 0.0 for document in documents])
      total = [weight * new[id] + (1 - weight) * old[id] for id in ids]
      order = np.argsort(-np.array(total), kind="stable")[:top_k]
      found.ids.append([ids[i] for i in order])
      found.scores.append([total[i] for i in order])
    return found

  def _check_encoders(self, replaced: bool) -> None:
    super()._check_encoders(replaced)
    if self.settings["reranker"] == FUNCTION:
      _ = self.reranker  # raises if it is missing

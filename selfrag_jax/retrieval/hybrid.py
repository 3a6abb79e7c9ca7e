"""`HybridRetriever`: the rankings of two retrievers or more, fused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfrag_jax.memory.records import Where
from selfrag_jax.retrieval.base import BaseRetriever, Hits, create, register
from selfrag_jax.retrieval.document import Document

RRF_K = 60  # Cormack et al. 2009


def reciprocal_rank(ranking: Sequence[str], scores: Sequence[float]) -> dict[str, float]:
  """Score a ranking by 1 / (60 + rank), ranks from 1."""
  return {id: 1 / (RRF_K + rank) for rank, id in enumerate(ranking, 1)}


def normalized(ranking: Sequence[str], scores: Sequence[float]) -> dict[str, float]:
  """Score a ranking by its own scores, stretched to [0, 1]; where all are equal they are 1."""
  low, high = (min(scores), max(scores)) if scores else (0.0, 0.0)
  return {id: (score - low) / (high - low) if high > low else 1.0 for id, score in zip(ranking, scores, strict=True)}


FUSIONS = {"rrf": reciprocal_rank, "weighted": normalized}


@register("hybrid")
class HybridRetriever(BaseRetriever):
  """Each retriever finds `depth` documents; these are scored by rank (`rrf`) or by normalised score (`weighted`).

  The scores of a document add up, each times its retriever's weight; a retriever that has not found it gives 0.
  """

  def __init__(
    self,
    retrievers: Sequence[BaseRetriever | str] = ("bm25", "dense"),
    *,
    fusion: str = "rrf",
    weights: Sequence[float] | None = None,
    depth: int = 100,
    settings: Sequence[dict[str, Any]] | None = None,
  ):
    """Make a retriever without documents.

    Args:
      retrievers: retrievers without documents, or names; `settings` are those of the named ones.
      fusion: `rrf` or `weighted`.
      weights: of the retrievers (None: the same for all).
      depth: how many documents each of them finds; more than the user asks for.

    Raises ValueError for fewer than two, retrievers that hold documents, and what does not fit.
    """
    given = settings or [{}] * len(retrievers)
    parts = [create(r, **s) if isinstance(r, str) else r for r, s in zip(retrievers, given, strict=True)]
    weights = [1.0] * len(parts) if weights is None else list(weights)
    if len(parts) < 2 or len(weights) != len(parts) or any(len(part) for part in parts):
      raise ValueError(f"{len(parts)} retrievers and {len(weights)} weights: give two retrievers or more, all empty")
    if fusion not in FUSIONS or depth < 1 or min(weights) < 0:
      raise ValueError(
        f"fusion is {fusion!r}, one of {', '.join(FUSIONS)}; depth = {depth} >= 1; weights {weights} >= 0"
      )
    super().__init__(
      retrievers=[part.name for part in parts],
      settings=[part.settings for part in parts],
      fusion=fusion,
      weights=weights,
      depth=depth,
    )
    self._parts, self._fuse, self._weights, self._depth = parts, FUSIONS[fusion], weights, depth

  @property
  def parts(self) -> Sequence[BaseRetriever]:
    return self._parts

  def _add(self, documents: Sequence[Document]) -> None:
    done: list[BaseRetriever] = []
    try:
      for part in self.parts:
        part.add_documents(documents)
        done.append(part)
    except BaseException:  # all of them, or none
      for part in done:
        part.delete([document.id for document in documents])
      raise

  def _delete(self, ids: Sequence[str]) -> None:
    for part in self.parts:
      part.delete(ids)

  def _search(self, queries: Sequence[str], top_k: int, where: Where | None) -> Hits:
    depth = max(top_k, self._depth)
    rankings = [part._search(queries, depth, where) for part in self.parts]
    found = Hits([], [])
    for i in range(len(queries)):
      total: dict[str, float] = {}
      for ranking, weight in zip(rankings, self._weights, strict=True):
        for id, score in self._fuse(ranking.ids[i], ranking.scores[i]).items():
          total[id] = total.get(id, 0.0) + weight * score
      best = sorted(total, key=lambda id: -total[id])[:top_k]
      found.ids.append(best)
      found.scores.append([total[id] for id in best])
    return found

  def _save(self, folder: Path) -> None:
    for number, part in enumerate(self.parts):
      (folder / str(number)).mkdir()
      part._save(folder / str(number))

  def _load(self, folder: Path) -> None:
    for number, part in enumerate(self.parts):
      part._documents = dict(self._documents)
      part._load(folder / str(number))

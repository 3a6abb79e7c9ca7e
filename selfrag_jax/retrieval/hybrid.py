"""`HybridRetriever`, which fuses the rankings of two or more retrievers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from selfrag_jax.memory.filters import Where
from selfrag_jax.memory.scoring import check_k
from selfrag_jax.retrieval.base import BaseRetriever, Hits, create, register
from selfrag_jax.retrieval.composite import CompositeRetriever

FUSIONS = ("rrf", "weighted")


def reciprocal_rank(ids: Sequence[str], rrf_k: float) -> dict[str, float]:
  """Score a ranking by 1 / (rrf_k + rank), ranks from 1 (Cormack et al. 2009)."""
  return {id: 1 / (rrf_k + rank) for rank, id in enumerate(ids, 1)}


def normalized(ids: Sequence[str], scores: Sequence[float]) -> dict[str, float]:
  """Score a ranking by its own scores, stretched to [0, 1]; equal scores all become 1."""
  low, high = (min(scores), max(scores)) if scores else (0.0, 0.0)
  return {id: (score - low) / (high - low) if high > low else 1.0 for id, score in zip(ids, scores, strict=True)}


def _is_number(value: Any) -> bool:
  is_real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
  return bool(is_real and 0 <= value < np.inf)


@register("hybrid")
class HybridRetriever(CompositeRetriever):
  """A fusion of retrievers: each finds `depth` documents, scored by rank (`rrf`) or by normalised score (`weighted`).

  A document's score is the sum of these scores, each times its retriever's weight; a retriever that did not find the
  document adds 0. A result's `components` have an entry for each retriever that found it: its name (`retriever`) and
  number (`part`), the `rank` and `score` there, and the summand that it `gives`.
  """

  def __init__(
    self,
    retrievers: Sequence[BaseRetriever | str] = ("bm25", "dense"),
    *,
    fusion: str = "weighted",
    weights: Sequence[float] | None = None,
    depth: int = 100,
    rrf_k: float = 60,
    settings: Sequence[dict[str, Any]] | None = None,
  ):
    """Make a retriever from other retrievers, and take over their documents if they hold any.

    Args:
      retrievers: retrievers, or names, whose `settings` are given for each.
      fusion: `weighted`, which ranks better on the three collections of docs/retrieval.md, or `rrf`.
      weights: the weights of the retrievers (None: equal weights).
      depth: the number of documents that each retriever finds, or `top_k` if that is larger.
      rrf_k: the k of `rrf`: the smaller, the more the first ranks count.

    Raises ValueError for fewer than two retrievers, for retrievers that hold different documents, and for wrong values.
    """
    if isinstance(retrievers, str) or not all(isinstance(r, (str, BaseRetriever)) for r in retrievers):
      raise ValueError(f"retrievers are {retrievers!r}; give a list of retrievers or names")
    given = settings or [{}] * len(retrievers)
    if len(given) != len(retrievers):
      raise ValueError(f"{len(retrievers)} retrievers and {len(given)} settings: give one for each")
    parts = [create(r, **s) if isinstance(r, str) else r for r, s in zip(retrievers, given, strict=True)]
    weights = [1.0] * len(parts) if weights is None else [w.item() if isinstance(w, np.generic) else w for w in weights]
    if len(parts) < 2 or len(weights) != len(parts) or len(set(map(id, parts))) < len(parts):
      raise ValueError(f"{len(parts)} retrievers and {len(weights)} weights: give two retrievers or more, each once")
    if fusion not in FUSIONS:
      raise ValueError(f"fusion is {fusion!r}; one of {', '.join(FUSIONS)}")
    if not all(_is_number(weight) for weight in weights):
      raise ValueError(f"weights are {weights}; each must be a number of at least 0")
    if not _is_number(rrf_k):
      raise ValueError(f"rrf_k = {rrf_k!r} must be a number of at least 0")
    super().__init__(
      parts,
      retrievers=[part.name for part in parts],
      settings=[part.settings for part in parts],
      fusion=fusion,
      weights=weights,
      depth=check_k(depth, "depth"),
      rrf_k=rrf_k,
    )

  def _search(self, queries: Sequence[str], top_k: int, where: Where | None) -> Hits:
    self._check_parts()
    depth = min(max(top_k, self.settings["depth"]), len(self))
    rankings = [part._search(queries, depth, where) for part in self.parts]
    found = Hits([], [], [])
    for i in range(len(queries)):
      components = self._fuse([(ranking.ids[i], ranking.scores[i]) for ranking in rankings])
      total = {id: sum(each["gives"] for each in said) for id, said in components.items()}
      best = sorted(total, key=lambda id: -total[id])[:top_k]
      found.ids.append(best)
      found.scores.append([total[id] for id in best])
      found.components.append([components[id] for id in best])  # type: ignore[union-attr]
    return found

  def _fuse(self, rankings: Sequence[tuple[list[str], list[float]]]) -> dict[str, list[dict[str, Any]]]:
    """Return for each document its `components`: one entry for each part that found it."""
    found: dict[str, list[dict[str, Any]]] = {}
    for part, ((ids, scores), weight) in enumerate(zip(rankings, self.settings["weights"], strict=True)):
      is_rrf = self.settings["fusion"] == "rrf"
      given = reciprocal_rank(ids, self.settings["rrf_k"]) if is_rrf else normalized(ids, scores)
      for rank, (id, score) in enumerate(zip(ids, scores, strict=True), 1):
        said = {"retriever": self.parts[part].name, "part": part, "rank": rank, "score": float(score)}
        found.setdefault(id, []).append({**said, "gives": weight * given[id]})
    return found

"""Retrieval scores of one query: recall, precision, reciprocal rank, nDCG, and whether all hops were found.

`ranking` lists ids, best first; `relevant` holds the ids that should be found, or maps ids to grades, where a grade
above 0 means relevant. Scores lie in [0, 1], higher is better. A query without a relevant document has no score and
raises ValueError. An id that is ranked twice counts once, at its first rank. The definitions are those of trec_eval.
"""

import math
from collections.abc import Collection, Mapping, Sequence

Relevant = Collection[str] | Mapping[str, float]


def compute_retrieval_recall(ranking: Sequence[str], relevant: Relevant, k: int | None = None) -> float:
  """Return the share of the relevant documents that is among the first k (None: in the whole ranking)."""
  gains = _gains(relevant)
  return len(gains.keys() & set(_first(ranking, k))) / len(gains)


def compute_retrieval_precision(ranking: Sequence[str], relevant: Relevant, k: int | None = None) -> float:
  """Return the share of the first k that is relevant; places that a shorter ranking leaves empty count as wrong."""
  gains, first = _gains(relevant), _first(ranking, k)
  places = len(first) if k is None else k
  return len(gains.keys() & set(first)) / places if places else 0.0


def reciprocal_rank(ranking: Sequence[str], relevant: Relevant, k: int | None = None) -> float:
  """Return 1 / the rank of the first relevant document, 0 if none is among the first k."""
  gains = _gains(relevant)
  return next((1 / rank for rank, id in enumerate(_first(ranking, k), 1) if id in gains), 0.0)


def ndcg(ranking: Sequence[str], relevant: Relevant, k: int | None = None) -> float:
  """Return the discounted gain, grade / log2(rank + 1), over that of the best ranking (Järvelin & Kekäläinen 2002)."""
  gains = _gains(relevant)
  best = sorted(gains.values(), reverse=True)[:k]
  return _discounted([gains.get(id, 0.0) for id in _first(ranking, k)]) / _discounted(best)


def all_found(ranking: Sequence[str], relevant: Relevant, k: int | None = None) -> float:
  """Return 1 if all relevant documents, one of each hop, are among the first k, else 0."""
  return float(_gains(relevant).keys() <= set(_first(ranking, k)))


def _gains(relevant: Relevant) -> dict[str, float]:
  grades = relevant if isinstance(relevant, Mapping) else dict.fromkeys(relevant, 1.0)
  gains = {id: float(grade) for id, grade in grades.items() if grade > 0}
  if not gains:
    raise ValueError("no document is relevant to this query; leave it out, for no score is defined")
  return gains


def _first(ranking: Sequence[str], k: int | None) -> list[str]:
  if k is not None and k < 1:
    raise ValueError(f"k = {k} must be at least 1")
  return list(dict.fromkeys(ranking))[:k]


def _discounted(gains: Sequence[float]) -> float:
  return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, 1))

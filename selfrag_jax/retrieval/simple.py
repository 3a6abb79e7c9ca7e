"""`SimpleRetriever`: TF-IDF with cosine similarity, in NumPy."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from selfrag_jax.memory.filters import Where
from selfrag_jax.retrieval.base import BaseRetriever, Hits, register
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.postings import best, count_terms, document_frequency
from selfrag_jax.text.words import words


@register("simple")
class SimpleRetriever(BaseRetriever):
  """TF-IDF: count x (ln((1 + N) / (1 + df)) + 1) with rows of norm 1, as in scikit-learn's `TfidfVectorizer`.

  Documents that share no word with the query are not found.
  """

  def __init__(self) -> None:
    super().__init__()
    self._vocabulary: dict[str, int] = {}
    self._terms: dict[str, list[int]] = {}  # id -> the terms of the document
    self._index: Any = None  # the index of all documents, built by the next search

  def _add(self, documents: Sequence[Document]) -> None:
    for document in documents:
      terms = (self._vocabulary.setdefault(word, len(self._vocabulary)) for word in words(document.text))
      self._terms[document.id] = list(terms)
    self._index = None

  def _delete(self, ids: Sequence[str]) -> None:
    for id in ids:
      del self._terms[id]
    self._index = None

  def _search(self, queries: Sequence[str], top_k: int, where: Where | None) -> Hits:
    if self._index is None:
      self._index = self._build()
    ids, idf, weights = self._index
    allowed, found = self._allowed(ids, where), Hits([], [])
    for query in queries:
      known = [term for word in words(query) if (term := self._vocabulary.get(word)) is not None]
      terms, counts = np.unique(np.array(known, np.int64), return_counts=True)
      asked = counts * idf[terms]
      scores = weights[:, terms] @ (asked / max(np.linalg.norm(asked), 1e-300))
      rows = best(scores, top_k, allowed)
      found.ids.append([ids[row] for row in rows])
      found.scores.append(scores[rows].tolist())
    return found

  def _build(self) -> Any:
    """Return the ids by row, the weight of each term, and the weights of the terms of each document [N, V]."""
    n, weights = len(self._terms), count_terms(list(self._terms.values()), len(self._vocabulary))
    df = document_frequency(weights)
    idf = np.log((1 + n) / (1 + df)) + 1
    weights.data *= np.repeat(idf, df)
    norms = np.sqrt(np.bincount(weights.indices, weights.data**2, minlength=n))
    weights.data /= norms[weights.indices]
    return list(self._terms), idf, weights

"""`BM25Retriever`: BM25 by bm25s with its numba backend, and by NumPy for documents added since the last build."""

import functools
import json
import logging
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from selfrag_jax.memory.filters import Where
from selfrag_jax.retrieval.base import BaseRetriever, Hits, register
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.postings import best, count_terms, document_frequency
from selfrag_jax.storage.arrays import read_npz
from selfrag_jax.text.words import words

MERGED = 0.1  # largest share of documents added or deleted since the index was built
COMPILED = 20_000  # documents from which numba pays off; it compiles for seconds in every process


@register("bm25")
class BM25Retriever(BaseRetriever):
  """BM25 as Lucene computes it (Kamphuis et al. 2020), over the stems of English words without stop words.

  Documents that share no word with the query are not found. Documents added after the index was built are scored beside
  it, with the word frequencies of all documents; the index scores with the frequencies of its build. When more than a
  tenth of the documents was added or deleted, the next search builds the index anew, as `merge` does.
  """

  def __init__(self, k1: float = 1.5, b: float = 0.75):
    """Raises ValueError for k1 outside [0, 1000] and b outside [0, 1]."""
    if not 0 <= k1 <= 1000 or not 0 <= b <= 1:
      raise ValueError(f"k1 = {k1} must be in [0, 1000], b = {b} in [0, 1]")
    super().__init__(k1=k1, b=b)
    self._k1, self._b = k1, b
    self._stems: dict[str, int] = {}  # stem -> term
    self._words: dict[str, int] = {}  # word -> term, -1 for stop words
    self._terms: dict[str, list[int]] = {}  # id -> the terms of the document
    self._rows: list[str | None] = []  # row of the index -> id, None if the document was deleted
    self._row_of: dict[str, int] = {}  # id -> row of the index
    self._index: Any = None
    self._later: dict[str, None] = {}  # the ids of documents that are not in the index
    self._delta: Any = None  # the scores of the documents that are not in the index for each term [N, V]

  def _add(self, documents: Sequence[Document]) -> None:
    tokens = [words(document.text) for document in documents]
    self._learn(word for row in tokens for word in row)
    for document, row in zip(documents, tokens, strict=True):
      self._terms[document.id] = [term for word in row if (term := self._words[word]) >= 0]
      self._later[document.id] = None
    self._delta = None

  def _delete(self, ids: Sequence[str]) -> None:
    for id in ids:
      del self._terms[id]
      if id in self._later:
        del self._later[id]
      else:
        self._rows[self._row_of.pop(id)] = None
    self._delta = None

  def merge(self) -> None:
    """Build the index anew over all documents."""
    self._begin_index()
    if any(self._terms.values()):
      self._index.index((list(self._terms.values()), dict(self._stems)), show_progress=False)

  def _search(self, queries: Sequence[str], top_k: int, where: Where | None) -> Hits:
    outside = len(self._later) + len(self._rows) - len(self._row_of)
    if self._index is None or outside > MERGED * len(self._terms):
      self.merge()
    asked = [self._known(query) for query in queries]
    found = self._search_index(asked, top_k, where)
    if not self._later:
      return found
    later, added = list(self._later), self._search_later(asked, top_k, where)
    for ids, scores, (rows, values) in zip(found.ids, found.scores, added, strict=True):
      ids += [later[row] for row in rows]
      scores += values.tolist()
      order = np.argsort(-np.array(scores), kind="stable")[:top_k]
      ids[:], scores[:] = [ids[i] for i in order], [scores[i] for i in order]
    return found

  def _search_index(self, asked: list[list[int]], top_k: int, where: Where | None) -> Hits:
    found = Hits([[] for _ in asked], [[] for _ in asked])
    known = {i: inside for i, terms in enumerate(asked) if (inside := [t for t in terms if t < self._index_size])}
    if not known or not self._row_of:
      return found
    allowed = self._allowed(self._rows, where)
    if allowed is None and len(self._row_of) < len(self._rows):
      allowed = np.array([id is not None for id in self._rows])
    mask = None if allowed is None else allowed.astype(np.float32)
    rows, scores = self._index.retrieve(
      list(known.values()),
      k=min(top_k + 1, len(self._rows)),
      show_progress=False,
      backend_selection=self._index.backend,  # bm25s would prefer JAX's top-k to NumPy's
      weight_mask=mask,
    )
    for (i, terms), row, values in zip(known.items(), rows, scores, strict=True):
      high = -np.sort(-values)
      if len(high) > top_k and high[top_k - 1] == high[top_k] > 0:  # bm25s takes any of those that are equal there
        every = self._index.get_scores(terms, weight_mask=mask)
        row = best(every, top_k)
        values = every[row]
      order = np.lexsort((row, -values))[: np.count_nonzero(values > 0)][:top_k]
      found.ids[i] = [id for at in row[order].tolist() if (id := self._rows[at]) is not None]
      found.scores[i] = values[order].tolist()
    return found

  def _search_later(
    self, asked: list[list[int]], top_k: int, where: Where | None
  ) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return for each query the best documents outside the index, as rows of `_later`, and their scores."""
    if self._delta is None:
      df = document_frequency(count_terms(list(self._terms.values()), len(self._stems)))
      idf = np.log1p((len(self._terms) - df + 0.5) / (df + 0.5))
      mean = np.mean([len(terms) for terms in self._terms.values()])
      self._delta = delta = count_terms([self._terms[id] for id in self._later], len(self._stems))
      discount = self._k1 * (1 - self._b + self._b * delta.sum(axis=1) / mean)
      weights = np.repeat(idf, document_frequency(delta))
      delta.data = weights * delta.data / (delta.data + discount[delta.indices])
    allowed, found = self._allowed(list(self._later), where), []
    for terms in asked:
      scores = self._delta[:, np.array(terms, int)].sum(axis=1)
      rows = best(scores, top_k, allowed)
      found.append((rows, scores[rows]))
    return found

  def _begin_index(self) -> None:
    """Give all documents a row of a new index, which is to be filled."""
    import bm25s  # importing it runs a JAX operation, which must not come before jax.distributed starts

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it reports every index that it builds
    backend = "numba" if len(self._terms) >= COMPILED else "numpy"
    self._index = bm25s.BM25(k1=self._k1, b=self._b, method="lucene", backend=backend)
    self._rows = list(self._terms)
    self._row_of = {id: row for row, id in enumerate(self._terms)}
    self._later.clear()
    self._delta = None

  @property
  def _index_size(self) -> int:
    """The number of terms that the index knows."""
    return len(self._index.scores["indptr"]) - 1 if hasattr(self._index, "scores") else 0

  def _learn(self, tokens: Iterable[str]) -> None:
    """Assign terms to new words."""
    from bm25s.stopwords import STOPWORDS_EN

    new = [word for word in dict.fromkeys(tokens) if word not in self._words]
    for word, stem in zip(new, _stemmer().stemWords(new), strict=True):
      stops = word in STOPWORDS_EN
      self._words[word] = -1 if stops else self._stems.setdefault(stem, len(self._stems))

  def _known(self, query: str) -> list[int]:
    """Return the terms of a query that occur in documents."""
    terms = []
    for word in words(query):
      if (term := self._words.get(word)) is None:
        term = self._stems.get(_stemmer().stemWord(word), -1)
      if term >= 0:
        terms.append(term)
    return terms

  def _save(self, folder: Path) -> None:
    self._terms = {id: self._terms[id] for id in self._documents}
    self.merge()
    lengths = [len(terms) for terms in self._terms.values()]
    flat = np.fromiter((term for terms in self._terms.values() for term in terms), np.int32, sum(lengths))
    scores = {name: self._index.scores[name] for name in ("data", "indices", "indptr")} if self._index_size else {}
    np.savez(folder / "bm25.npz", terms=flat, lengths=np.array(lengths, np.int32), **scores)
    (folder / "words.json").write_text(json.dumps({"stems": self._stems, "words": self._words}), encoding="utf-8")

  def _load(self, folder: Path) -> None:
    known = json.loads((folder / "words.json").read_text(encoding="utf-8"))
    self._stems, self._words = known["stems"], known["words"]
    arrays = read_npz(folder / "bm25.npz")
    terms, ends = arrays["terms"].tolist(), np.cumsum(arrays["lengths"]).tolist()
    scores = {name: arrays[name] for name in ("data", "indices", "indptr") if name in arrays}
    self._terms = {id: terms[a:b] for id, (a, b) in zip(self._documents, pairwise([0, *ends]), strict=True)}
    self._begin_index()
    if scores:
      self._index.scores = {**scores, "num_docs": len(self._rows)}
      self._index.vocab_dict = {**self._stems, "": len(scores["indptr"]) - 1}
      self._index.unique_token_ids_set = set(self._index.vocab_dict.values())
      self._index.nonoccurrence_array = None


@functools.cache
def _stemmer() -> Any:
  from Stemmer import Stemmer

  return Stemmer("english")

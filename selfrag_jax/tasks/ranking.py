"""Queries with relevant documents and hard negatives, as training data for encoders and rerankers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from selfrag_jax.retrieval.beir import Judged
from selfrag_jax.retrieval.bm25 import BM25Retriever
from selfrag_jax.tasks.search_task import ShuffledEpochs


class Examples(NamedTuple):
  """Indices into the task's lists: `queries` int [B], `documents` int [B, 1 + n], the relevant document first."""

  queries: np.ndarray
  documents: np.ndarray


class RankingTask:
  """Pairs of a query and a relevant document, each with hard negatives: BM25's best documents that are not relevant.

  An example is a function of the seed and its index: the pair, and its choice of the `mined` negatives.
  """

  def __init__(self, data: Judged, negatives: int, *, mined: int = 50, seed: int = 0):
    """Mine the negatives. Raises ValueError if there are fewer documents than an example needs."""
    if len(data.documents) <= negatives:
      raise ValueError(f"{len(data.documents)} documents cannot give {negatives} negatives; set fewer")
    self.queries = list(data.queries.values())
    self.documents = [document.text for document in data.documents]
    self._places = {document.id: i for i, document in enumerate(data.documents)}
    self.relevant = [{self._places[id] for id in data.qrels[query]} for query in data.queries]
    self.pairs = [(query, document) for query, gold in enumerate(self.relevant) for document in sorted(gold)]
    self._order, self._seed, self._n = ShuffledEpochs(range(len(self.pairs)), seed), seed, negatives
    self._mined = self._mine(data, mined) if negatives else []

  def examples(self, indices: Sequence[int]) -> Examples:
    """Return examples by their indices, counted over the whole training; every epoch shows each pair once."""
    pairs = [self.pairs[self._order[index]] for index in indices]
    rows = []
    for index, (query, document) in zip(indices, pairs, strict=True):
      others = self._mined[query] if self._n else []
      chosen = np.random.default_rng([self._seed, index]).permutation(len(others))[: self._n]
      rows.append([document, *(others[i] for i in chosen)])
    return Examples(np.array([query for query, _ in pairs]), np.array(rows, np.int64).reshape(len(pairs), 1 + self._n))

  def known(self, queries: Sequence[int], documents: Sequence[int]) -> np.ndarray:
    """Tell which documents are relevant to which queries, bool [B, C]."""
    return np.array([[document in self.relevant[query] for document in documents] for query in queries])

  def _mine(self, data: Judged, depth: int) -> list[list[int]]:
    """List for each query BM25's best documents that are not relevant, followed by random ones if they are too few."""
    retriever = BM25Retriever()
    retriever.add_documents(data.documents)
    found = retriever.retrieve_batch(self.queries, depth + max(map(len, self.relevant)))
    mined = []
    for query, hits in enumerate(found):
      gold = self.relevant[query]
      ids = [place for document in hits if (place := self._places[document.id]) not in gold][:depth]
      if len(ids) < self._n:
        rest = np.random.default_rng([self._seed, query, 0]).permutation(len(self.documents)).tolist()
        ids += [place for place in rest if place not in gold and place not in ids][: self._n - len(ids)]
      if len(ids) < self._n:
        raise ValueError(f"query {self.queries[query]!r} has {len(ids)} documents that are not relevant, not {self._n}")
      mined.append(ids)
    return mined

"""Rankings are fused by their ranks or by normalised scores: the scale of one retriever's scores means nothing."""

import numpy as np
import pytest

from selfrag_jax.retrieval.base import BaseRetriever, Hits
from selfrag_jax.retrieval.bm25 import BM25Retriever
from selfrag_jax.retrieval.dense import DenseRetriever
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.hybrid import HybridRetriever
from selfrag_jax.retrieval.simple import SimpleRetriever


class Fixed(BaseRetriever):
  """Finds what it is told to, with the scores that it is told."""

  def __init__(self, scores):
    super().__init__()
    self.scores = scores

  def _add(self, documents):
    """Nothing to index."""

  def _delete(self, ids):
    self.scores = {id: score for id, score in self.scores.items() if id not in ids}

  def _search(self, queries, top_k, where):
    best = sorted(self.scores, key=lambda id: -self.scores[id])[:top_k]
    return Hits([best] * len(queries), [[self.scores[id] for id in best]] * len(queries))


DOCUMENTS = [Document(id, content=id) for id in "abcd"]
FIRST, SECOND = {"a": 9.0, "b": 5.0, "c": 1.0}, {"c": 0.8, "d": 0.6, "b": 0.3}


def fused(*scores, **options):
  hybrid = HybridRetriever([Fixed(dict(s)) for s in scores], **options)
  hybrid.add_documents(DOCUMENTS)
  return {document.id: document.score for document in hybrid.retrieve("?", 10)}


def test_reciprocal_ranks_add_up():
  expected = {"c": 1 / 63 + 1 / 61, "b": 1 / 62 + 1 / 63, "a": 1 / 61, "d": 1 / 62}
  assert fused(FIRST, SECOND) == pytest.approx(expected)
  assert list(fused(FIRST, SECOND)) == list(expected)


def test_weighted_scores_are_normalised_first():
  expected = {"c": 0.25, "b": 0.75 * 0.5, "a": 0.75, "d": 0.25 * 0.6}
  assert fused(FIRST, SECOND, fusion="weighted", weights=[0.75, 0.25]) == pytest.approx(expected)
  assert fused({"a": 2.0}, {"b": 3.0}, fusion="weighted") == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize("fusion", ["rrf", "weighted"])
def test_a_hundredfold_changes_no_ranking(fusion):
  larger = {id: 100 * score for id, score in FIRST.items()}
  assert list(fused(larger, SECOND, fusion=fusion)) == list(fused(FIRST, SECOND, fusion=fusion))
  assert fused(larger, SECOND, fusion=fusion) == pytest.approx(fused(FIRST, SECOND, fusion=fusion))


def test_only_the_first_of_each_ranking_count():
  assert list(fused(FIRST, SECOND, depth=10)) == ["c", "b", "a", "d"]
  hybrid = HybridRetriever([Fixed(dict(FIRST)), Fixed(dict(SECOND))], depth=1)
  hybrid.add_documents(DOCUMENTS)
  assert [document.id for document in hybrid.retrieve("?", 1)] == ["a"]


def test_what_cannot_be_fused_is_refused():
  full = SimpleRetriever()
  full.add_documents(DOCUMENTS)
  for parts, options, message in (
    ([SimpleRetriever()], {}, "two retrievers or more"),
    ([full, BM25Retriever()], {}, "all empty"),
    (["simple", "bm25"], {"weights": [1]}, "2 retrievers and 1 weights"),
    (["simple", "bm25"], {"fusion": "sum"}, "fusion"),
    (["simple", "bm25"], {"depth": 0}, "depth"),
    (["simple", "bm25"], {"weights": [1, -1]}, "weights"),
    (["simple", "nope"], {}, "no retriever is called 'nope'"),
  ):
    with pytest.raises(ValueError, match=message):
      HybridRetriever(parts, **options)


def test_a_part_that_fails_leaves_the_others_as_they_were():
  def encoder(texts):
    if any("broken" in text for text in texts):
      raise OSError("no encoder")
    return np.ones((len(texts), 4), np.float32)

  retriever = HybridRetriever([BM25Retriever(), DenseRetriever(encoder=encoder, backend="numpy")])
  retriever.add_documents([Document("1", content="harbor town")])
  with pytest.raises(OSError, match="no encoder"):
    retriever.add_documents([Document("2", content="broken harbor")])
  assert [len(part) for part in retriever.parts] == [1, 1]
  assert [document.id for document in retriever.retrieve("harbor")] == ["1"]
  retriever.add_documents([Document("2", content="mended harbor")])
  assert {document.id for document in retriever.retrieve("harbor")} == {"1", "2"}

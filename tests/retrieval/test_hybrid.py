"""Fusion of rankings by ranks or by normalised scores: the scale of one retriever's scores has no effect."""

import numpy as np
import pytest

from selfrag_jax.retrieval.base import BaseRetriever, Hits, load
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
  assert fused(FIRST, SECOND, fusion="rrf") == pytest.approx(expected)
  assert list(fused(FIRST, SECOND, fusion="rrf")) == list(expected)


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
  assert list(fused(FIRST, SECOND, fusion="rrf", depth=10)) == ["c", "b", "a", "d"]
  hybrid = HybridRetriever([Fixed(dict(FIRST)), Fixed(dict(SECOND))], fusion="rrf", depth=1)
  hybrid.add_documents(DOCUMENTS)
  assert [document.id for document in hybrid.retrieve("?", 1)] == ["a"]


def test_what_cannot_be_fused_is_refused():
  full = SimpleRetriever()
  for parts, options, message in (
    ([SimpleRetriever()], {}, "two retrievers or more"),
    ([full, full], {}, "each once"),
    ("bm25", {}, "give a list of retrievers or names"),
    ([full, 3], {}, "give a list of retrievers or names"),
    (["simple", "bm25"], {"settings": [{}]}, "2 retrievers and 1 settings"),
    (["simple", "bm25"], {"rrf_k": -1}, "rrf_k = -1"),
    (["simple", "bm25"], {"rrf_k": "60"}, "rrf_k = '60'"),
    (["simple", "bm25"], {"rrf_k": float("nan")}, "rrf_k = nan"),
    (["simple", "bm25"], {"depth": 2.5}, "depth = 2.5 must be at least 1, and a whole number"),
    (["simple", "bm25"], {"weights": [1, float("nan")]}, "weights"),
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


TEXTS = [Document(f"{a}-{b}", a, f"the {a} of the {b}") for a in ("harbor", "river") for b in ("town", "island")]


def filled(kind, documents=TEXTS):
  made = kind()
  made.add_documents(documents)
  return made


@pytest.mark.parametrize(
  "parts",
  [
    lambda: [filled(BM25Retriever), filled(SimpleRetriever)],
    lambda: [filled(BM25Retriever), SimpleRetriever()],
    lambda: [BM25Retriever(), filled(SimpleRetriever)],
    lambda: [filled(BM25Retriever), "simple"],
    lambda: [filled(BM25Retriever), filled(SimpleRetriever, TEXTS[::-1])],
    lambda: [filled(SimpleRetriever), filled(BM25Retriever, TEXTS[::-1])],
  ],
)
def test_retrievers_that_hold_documents_are_taken_as_they_are(parts, tmp_path):
  hybrid = HybridRetriever(parts())
  empty = HybridRetriever([part.name for part in hybrid.parts])
  empty.add_documents(TEXTS)
  assert {d.id for d in hybrid.documents} == {d.id for d in TEXTS}
  assert [len(part) for part in hybrid.parts] == [4, 4]
  scores = lambda retriever: {d.id: pytest.approx(d.score) for d in retriever.retrieve("river island", 4)}
  assert scores(hybrid) == scores(empty)
  hybrid.delete("river-town")
  hybrid.add_documents([Document("new", content="a river delta")])
  assert "new" in {document.id for document in hybrid.retrieve("river delta")}
  hybrid.save(tmp_path)
  assert scores(load(tmp_path)) == scores(hybrid)


def test_retrievers_that_hold_different_documents_are_refused_with_the_difference():
  fewer = filled(SimpleRetriever, TEXTS[1:])
  other = filled(SimpleRetriever, [Document(TEXTS[0].id, content="another text"), *TEXTS[1:]])
  for parts, message in (
    ([filled(BM25Retriever), fewer], "bm25 holds 1 documents that simple does not, such as 'harbor-town'"),
    ([fewer, filled(BM25Retriever)], "bm25 holds 1 documents that simple does not, such as 'harbor-town'"),
    ([filled(BM25Retriever), other], "the document 'harbor-town' of bm25 is another one than that of simple"),
  ):
    with pytest.raises(ValueError, match=message):
      HybridRetriever(parts)


def test_a_part_that_is_changed_by_itself_is_named():
  parts = [filled(BM25Retriever), filled(SimpleRetriever)]
  hybrid = HybridRetriever(parts)
  parts[1].delete("river-town")
  with pytest.raises(ValueError, match="simple was changed by itself"):
    hybrid.retrieve("river")


def test_the_k_of_reciprocal_ranks_is_open_and_kept(tmp_path):
  expected = {"c": 1 / 4 + 1 / 2, "b": 1 / 3 + 1 / 4, "a": 1 / 2, "d": 1 / 3}
  assert fused(FIRST, SECOND, fusion="rrf", rrf_k=1) == pytest.approx(expected)
  hybrid = HybridRetriever(["bm25", "simple"], fusion="rrf", rrf_k=2)
  hybrid.add_documents(TEXTS)
  hybrid.save(tmp_path)
  again = load(tmp_path)
  assert again.settings["rrf_k"] == 2
  assert again.retrieve("river", 1)[0].score == pytest.approx(2 / 3)


@pytest.mark.parametrize("fusion", ["rrf", "weighted"])
def test_a_result_says_what_each_part_gave(fusion):
  parts = [filled(BM25Retriever), filled(SimpleRetriever)]
  alone = [{d.id: (rank, d.score) for rank, d in enumerate(p.retrieve("river island", 4), 1)} for p in parts]
  hybrid = HybridRetriever(parts, fusion=fusion, weights=[0.3, 0.7])
  found = hybrid.retrieve("river island", 4)
  assert found
  for document in found:
    assert sum(each["gives"] for each in document.components) == pytest.approx(document.score)
    said = {each["part"]: (each["rank"], pytest.approx(each["score"])) for each in document.components}
    assert said == {i: ranks[document.id] for i, ranks in enumerate(alone) if document.id in ranks}
    assert all(each["retriever"] == parts[each["part"]].name for each in document.components)
    assert Document.from_dict(document.to_dict()) == document
  assert [d.to_dict() for d in hybrid.documents] == [d.to_dict() for d in TEXTS]
  again = SimpleRetriever()
  again.add_documents(found)  # a result is added without what its search said
  assert {d.id: d.to_dict() for d in again.documents} == {d.id: d.to_dict() for d in TEXTS if d.id in again}

"""An upsert: each document is embedded once, and either all of the old documents are replaced or none."""

import numpy as np
import pytest

from selfrag_jax.retrieval.base import load
from selfrag_jax.retrieval.bm25 import BM25Retriever
from selfrag_jax.retrieval.dense import DenseRetriever
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.hybrid import HybridRetriever
from selfrag_jax.retrieval.rerank import RerankRetriever


class Letters:
  """Embeds texts by how often each letter is in them; knows what it was asked."""

  def __init__(self):
    self.asked = []

  def __call__(self, texts):
    self.asked += texts
    return np.array([[text.count(chr(97 + i)) for i in range(26)] for text in texts], np.float32)


WRAPPED = {
  "dense": lambda dense: dense,
  "hybrid": lambda dense: HybridRetriever([BM25Retriever(), dense]),
  "rerank": lambda dense: RerankRetriever(dense, lambda query, documents: np.ones(len(documents))),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_an_upsert_embeds_each_document_once(wrap):
  encoder = Letters()
  retriever = wrap(DenseRetriever(encoder=encoder, backend="numpy"))
  retriever.add_documents([Document("1", content="aaa"), Document("2", content="bbb")])
  encoder.asked.clear()
  assert retriever.upsert_documents([Document("1", content="ccc"), Document("3", content="ddd")]) == 2
  assert encoder.asked == ["ccc", "ddd"]
  assert {document.id: document.content for document in retriever.documents} == {"1": "ccc", "2": "bbb", "3": "ddd"}
  assert [retriever.retrieve(text, 1)[0].id for text in ("ccc", "bbb", "ddd")] == ["1", "2", "3"]
  assert "aaa" not in [document.content for document in retriever.retrieve("aaa", 3)]
  assert retriever.delete(["1", "2", "3"]) == 3


def test_an_upsert_that_one_part_cannot_index_changes_no_part():
  dense = DenseRetriever(encoder=Letters(), backend="numpy")
  words = BM25Retriever()
  retriever = HybridRetriever([words, dense])
  retriever.add_documents([Document("1", content="zebra"), Document("2", content="otter")])
  insert, calls = dense._add_embedded, []

  def full_once(*arguments):
    calls.append(arguments)
    if len(calls) == 1:
      raise OSError("no room")
    insert(*arguments)

  dense._add_embedded = full_once
  with pytest.raises(OSError, match="no room"):
    retriever.upsert_documents([Document("1", content="heron")])
  for part in (words, dense, retriever):
    assert {document.id: document.content for document in part.documents} == {"1": "zebra", "2": "otter"}
  assert [document.id for document in retriever.retrieve("zebra", 1)] == ["1"]


@pytest.mark.parametrize("name", ["token-bag", "fitted"])
def test_a_bag_of_words_that_no_document_has_finds_nothing(name, tmp_path):
  retriever = DenseRetriever("token-bag", backend="numpy")
  if name == "fitted":
    retriever.encoder.fit(["wholly other texts"])
  retriever.add_documents([Document(str(i), content=f"the zebra of marsh{i}") for i in range(50)])
  assert retriever.retrieve_batch(["unheard nonsense", "zebra", "?! a"], 2)[::2] == [[], []]
  assert len(retriever.retrieve("unheard zebra", 2)) == 2
  retriever.add_documents([Document("new", content="quokka")])  # a word that it was not fitted to
  assert retriever.retrieve("quokka", 1)[0].id == "new"
  retriever.save(tmp_path / "kb")
  again = load(tmp_path / "kb")
  assert again.retrieve("quokka", 1)[0].id == "new"
  assert again.retrieve("unheard nonsense") == []
  again.delete("new")
  assert again.retrieve("quokka", 1) == []


@pytest.mark.parametrize("weights", [np.array([1, 2]), np.array([0.5, 1], np.float32), (1, np.int64(2))])
def test_weights_of_numpy_are_taken(weights, tmp_path):
  retriever = HybridRetriever(["bm25", "simple"], weights=weights, rrf_k=np.int64(60))
  retriever.add_documents([Document("1", content="zebra")])
  retriever.save(tmp_path / "kb")
  assert retriever.settings["weights"] == [float(weight) for weight in weights]


@pytest.mark.parametrize("weights", [[1, -1], [1, True], [1, "2"], [1, float("nan")], [1, None]])
def test_weights_that_are_none_are_named_alone(weights):
  with pytest.raises(ValueError, match=r"^weights are .*; each must be a number of at least 0$"):
    HybridRetriever(["bm25", "simple"], weights=weights)


@pytest.mark.parametrize(
  ("k1", "b"), [(-0.1, 0.75), (1e9, 0.75), (float("nan"), 0.75), (1.5, -0.1), (1.5, 1.1), (1.5, float("nan"))]
)
def test_bm25_refuses_parameters_outside_of_its_bounds(k1, b):
  with pytest.raises(ValueError, match=r"must be in \[0, 1000\], b = .* in \[0, 1\]"):
    BM25Retriever(k1=k1, b=b)


@pytest.mark.parametrize(("k1", "b"), [(0, 0), (1000, 1), (np.float32(0.9), np.float64(0.4))])
def test_bm25_takes_its_bounds(k1, b, tmp_path):
  retriever = BM25Retriever(k1=k1, b=b)
  retriever.add_documents([Document("1", content="zebra"), Document("2", content="otter")])
  assert [document.id for document in retriever.retrieve("zebra")] == ["1"]
  retriever.save(tmp_path / "kb")

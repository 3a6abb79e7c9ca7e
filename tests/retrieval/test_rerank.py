"""Rerankers: they reorder candidates and add none; MMR chooses by its definition."""

import numpy as np
import pytest

from selfrag_jax.retrieval.base import load
from selfrag_jax.retrieval.bm25 import BM25Retriever
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.rerank import MMR, RerankRetriever

DOCUMENTS = [Document(str(i), content=f"harbor {'town ' * i}number{i}") for i in range(12)]


def by_number(query, documents):
  return [float(document.id) for document in documents]


def ids(found):
  return [document.id for document in found]


def test_only_candidates_are_returned_in_the_order_of_the_reranker():
  first = BM25Retriever()
  first.add_documents(DOCUMENTS)
  candidates = ids(first.retrieve("harbor", 4))
  retriever = RerankRetriever(BM25Retriever(), by_number, depth=4)
  retriever.add_documents(DOCUMENTS)
  assert ids(retriever.retrieve("harbor", 4)) == sorted(candidates, key=int, reverse=True)
  assert ids(retriever.retrieve("harbor", 2)) == sorted(candidates, key=int, reverse=True)[:2]
  assert set(ids(retriever.retrieve("harbor", 12))) == {document.id for document in DOCUMENTS}
  assert retriever.retrieve("unheard", 3) == []


def test_weight_blends_both_orders():
  orders = {}
  for weight in (0.0, 1.0):
    retriever = RerankRetriever("bm25", by_number, weight=weight)
    retriever.add_documents(DOCUMENTS)
    orders[weight] = ids(retriever.retrieve("harbor town", 12))
  plain = BM25Retriever()
  plain.add_documents(DOCUMENTS)
  assert orders[0.0] == ids(plain.retrieve("harbor town", 12))
  assert orders[1.0] == sorted(orders[1.0], key=int, reverse=True)


def test_the_scale_of_either_score_changes_nothing():
  kept = None
  for factor in (1.0, 100.0):
    retriever = RerankRetriever("bm25", lambda q, ds, f=factor: [f * ((int(d.id) * 7) % 5) for d in ds], weight=0.4)
    retriever.add_documents(DOCUMENTS)
    found = [(d.id, round(d.score, 9)) for d in retriever.retrieve("harbor town", 12)]
    assert kept is None or found == kept
    kept = found


def greedy(query, rows, tradeoff):
  """Choose by the definition: argmax of tradeoff x sim(query) - (1 - tradeoff) x greatest sim to what is chosen."""
  chosen = []
  while len(chosen) < len(rows):
    value = lambda i: tradeoff * rows[i] @ query - (1 - tradeoff) * max((rows[i] @ rows[j] for j in chosen), default=0)
    chosen.append(max((i for i in range(len(rows)) if i not in chosen), key=value))
  return chosen


@pytest.mark.parametrize("tradeoff", [0.05, 0.3, 0.7, 1.0])
def test_mmr_chooses_as_its_definition(tradeoff):
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(13, 6)).astype(np.float32)
  rows /= np.linalg.norm(rows, axis=1, keepdims=True)
  table = {"query": rows[0], **{document.text: row for document, row in zip(DOCUMENTS, rows[1:], strict=True)}}
  mmr = MMR(encoder=lambda texts: np.stack([table[text] for text in texts]), tradeoff=tradeoff)
  scores = mmr("query", DOCUMENTS)
  order = np.argsort(-scores, kind="stable").tolist()
  wanted = greedy(rows[0], rows[1:], tradeoff)
  assert order == wanted


def test_what_does_not_fit_is_refused(tmp_path):
  for arguments, message in (
    (("bm25", "best"), "no reranker is called 'best'"),
    (("bm25", "cross-encoder"), "a cross-encoder needs reranker_settings"),
    (("nothing", by_number), "no retriever is called 'nothing'"),
  ):
    with pytest.raises(ValueError, match=message):
      RerankRetriever(*arguments)
  for scores in (lambda q, ds: [1.0], lambda q, ds: [float("nan")] * len(ds)):
    retriever = RerankRetriever("bm25", scores)
    retriever.add_documents(DOCUMENTS)
    with pytest.raises(ValueError, match="the reranker gave"):
      retriever.retrieve("harbor")
  with pytest.raises(ValueError, match="tradeoff"):
    MMR(tradeoff=1.5)


def test_a_function_must_be_given_again(tmp_path):
  retriever = RerankRetriever("bm25", by_number)
  retriever.add_documents(DOCUMENTS)
  retriever.save(tmp_path)
  with pytest.raises(ValueError, match="give it again"):
    load(tmp_path)
  assert ids(load(tmp_path, reranker=by_number).retrieve("harbor")) == ids(retriever.retrieve("harbor"))


def test_a_retriever_that_holds_documents_is_taken_as_it_is():
  first = BM25Retriever()
  first.add_documents(DOCUMENTS)
  retriever = RerankRetriever(first, by_number)
  assert retriever.documents == DOCUMENTS
  other = RerankRetriever("bm25", by_number)
  other.add_documents(DOCUMENTS)
  assert retriever.retrieve("harbor") == other.retrieve("harbor")
  first.delete(DOCUMENTS[0].id)
  with pytest.raises(ValueError, match="bm25 was changed by itself"):
    retriever.retrieve("harbor")

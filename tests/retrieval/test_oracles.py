"""TF-IDF ranks as scikit-learn does, BM25 as bm25s does, on real passages and while documents come and go."""

import json
import logging

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer

from selfrag_jax.retrieval import bm25
from selfrag_jax.retrieval.bm25 import BM25Retriever
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.simple import SimpleRetriever

logging.getLogger("bm25s").setLevel(logging.WARNING)
SETS = ("multihop_hotpotqa", "multihop_musique", "ir_squad_dev_half")


def read(folder):
  lines = lambda name: map(json.loads, (folder / name).read_text(encoding="utf-8").splitlines())
  documents = [Document(record["_id"], record["title"], record["text"]) for record in lines("corpus.jsonl")]
  return documents, [record["text"] for record in lines("queries.jsonl")][:300]


def assert_ranked(found, scores, documents):
  """Each result is among the best by the oracle's scores, in their order; near ties may stand either way."""
  rows = {document.id: row for row, document in enumerate(documents)}
  for result, expected in zip(found, scores, strict=True):
    got = np.array([document.score for document in result])
    assert len(got) == min(10, np.count_nonzero(expected > 0))
    np.testing.assert_allclose(got, expected[[rows[document.id] for document in result]], rtol=2e-5)
    np.testing.assert_allclose(got, np.sort(expected)[::-1][: len(got)], rtol=2e-5)


@pytest.mark.parametrize("name", SETS)
def test_tf_idf_ranks_as_scikit_learn(shared_data, name):
  documents, queries = read(shared_data / name)
  retriever = SimpleRetriever()
  retriever.add_documents(documents)
  vectorizer = TfidfVectorizer()
  rows = vectorizer.fit_transform([document.text for document in documents])
  scores = (rows @ vectorizer.transform(queries).T).toarray().T
  assert_ranked(retriever.retrieve_batch(queries, 10), scores, documents)


def reference(documents, queries, k1=1.5, b=0.75):
  import bm25s
  from Stemmer import Stemmer

  tokenize = lambda texts: bm25s.tokenize(texts, stopwords="en", stemmer=Stemmer("english"), show_progress=False)
  index = bm25s.BM25(method="lucene", k1=k1, b=b)
  index.index(tokenize([document.text for document in documents]), show_progress=False)
  tokens = bm25s.tokenize(queries, stopwords="en", stemmer=Stemmer("english"), return_ids=False, show_progress=False)
  known = [[token for token in row if token in index.vocab_dict] for row in tokens]
  return np.stack([index.get_scores(row) if row else np.zeros(len(documents), np.float32) for row in known])


@pytest.mark.parametrize("name", SETS)
def test_bm25_ranks_as_bm25s(shared_data, name):
  documents, queries = read(shared_data / name)
  retriever = BM25Retriever()
  retriever.add_documents(documents)
  assert_ranked(retriever.retrieve_batch(queries, 10), reference(documents, queries), documents)


def words_of(rng, n):
  return " ".join(f"word{i}" for i in rng.zipf(1.5, n) % 200)


@pytest.fixture(params=["numpy", "numba"])
def some_documents(request, monkeypatch):
  if request.param == "numba":
    monkeypatch.setattr(bm25, "COMPILED", 1)
  rng = np.random.default_rng(0)
  documents = [Document(str(i), content=words_of(rng, rng.integers(3, 40))) for i in range(200)]
  return documents, [words_of(rng, 4) for _ in range(30)]


def test_bm25_parameters_are_those_of_bm25s(some_documents):
  documents, queries = some_documents
  retriever = BM25Retriever(k1=0.9, b=0.4)
  retriever.add_documents(documents)
  assert_ranked(retriever.retrieve_batch(queries, 10), reference(documents, queries, 0.9, 0.4), documents)


def test_what_was_added_is_scored_like_the_rest_and_a_tenth_is_merged(some_documents):
  documents, queries = some_documents
  retriever = BM25Retriever()
  retriever.add_documents(documents[:185])
  retriever.retrieve("word1")
  retriever.add_documents(documents[185:])
  added = {document.id for document in documents[185:]}
  scores = reference(documents, queries)
  for result, expected in zip(retriever.retrieve_batch(queries, 200), scores, strict=True):
    late = {document.id: document.score for document in result if document.id in added}
    wanted = {document.id: s for document, s in zip(documents, expected, strict=True) if s > 0 and document.id in added}
    assert late.keys() == wanted.keys()
    np.testing.assert_allclose([late[id] for id in wanted], list(wanted.values()), rtol=2e-5)
  retriever.delete([str(i) for i in range(10)])  # fifteen added, ten deleted: more than a tenth
  assert_ranked(retriever.retrieve_batch(queries, 10), reference(documents[10:], queries), documents[10:])


@pytest.mark.parametrize(("k1", "b"), [(-1, 0.5), (1, 1.5), (1, -0.1)])
def test_parameters_that_mean_nothing_are_refused(k1, b):
  with pytest.raises(ValueError, match="k1 = "):
    BM25Retriever(k1, b)

"""Dense retrieval is the brute-force ranking of the encoder's vectors, however the documents came."""

import numpy as np
import pytest

from selfrag_jax.retrieval.base import load
from selfrag_jax.retrieval.dense import SMALLEST, DenseRetriever, TokenBagEncoder
from selfrag_jax.retrieval.document import Document

RNG = np.random.default_rng(0)
VECTORS = {str(i): RNG.normal(size=12).astype(np.float32) for i in range(SMALLEST + 300)}


def encoder(texts):
  return np.stack([VECTORS[text] for text in texts])


def documents(first, last):
  return [Document(f"d{i}", content=str(i)) for i in range(first, last)]


def brute_force(query, ids, k):
  rows = np.stack([VECTORS[id] for id in ids])
  scores = rows @ VECTORS[query] / np.linalg.norm(rows, axis=1) / np.linalg.norm(VECTORS[query])
  return [f"d{ids[i]}" for i in np.argsort(-scores, kind="stable")[:k]]


@pytest.mark.parametrize("backend", ["exact", "numpy"])
def test_any_function_encodes_and_the_ranking_is_exact(backend):
  retriever = DenseRetriever(encoder=encoder, backend=backend)
  retriever.add_documents(documents(0, 100))
  retriever.add_documents(documents(100, SMALLEST + 200))  # more than the first table holds
  retriever.delete([f"d{i}" for i in range(0, 300, 3)])
  left = [str(i) for i in range(SMALLEST + 200) if i >= 300 or i % 3]
  queries = [str(SMALLEST + 200 + i) for i in range(5)]
  for query, found in zip(queries, retriever.retrieve_batch(queries, 10), strict=True):
    assert [document.id for document in found] == brute_force(query, left, 10)


def test_an_encoder_of_another_width_is_refused(tmp_path):
  retriever = DenseRetriever(encoder=encoder, backend="numpy")
  retriever.add_documents(documents(0, 5))
  retriever.save(tmp_path)
  narrow = load(tmp_path, encoder=lambda texts: np.ones((len(texts), 7)))
  with pytest.raises(ValueError, match=r"shape \(1, 7\), expected \(1, 12\)"):
    narrow.retrieve("?")
  with pytest.raises(ValueError, match="NaN"):
    DenseRetriever(encoder=lambda texts: np.full((len(texts), 3), np.nan)).add_documents(documents(0, 1))


def test_the_token_bag_weighs_rare_words_more():
  texts = [f"the common word and {name}" for name in ("zebra", "otter", "heron")]
  bag = TokenBagEncoder(width=512)
  plain = bag(texts)
  bag.fit(texts)
  fitted = bag(texts)
  np.testing.assert_allclose(np.linalg.norm(fitted, axis=1), 1, rtol=1e-5)
  assert fitted[0] @ fitted[1] < plain[0] @ plain[1] - 0.3
  assert not bag(["", "?"]).any()
  long = bag([*texts, "zebra " * 500])[-1]
  np.testing.assert_allclose(long, bag(["zebra"])[0], atol=1e-5)


def test_an_unknown_backend_is_refused_at_once():
  with pytest.raises(ValueError, match="unknown backend 'faiss'"):
    DenseRetriever(backend="faiss")


def test_vectors_stand_in_the_order_of_the_documents():
  retriever = DenseRetriever(encoder=encoder, backend="numpy")
  assert retriever.vectors.shape == (0, 0)
  retriever.add_documents(documents(0, 10))
  retriever.delete(["d3", "d7"])
  retriever.add_documents(documents(20, 21))
  np.testing.assert_array_equal(retriever.vectors, encoder([d.text for d in retriever.documents]))

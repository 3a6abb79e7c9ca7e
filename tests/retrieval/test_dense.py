"""Dense retrieval: it is the brute-force ranking of the encoder's vectors, whatever the order of additions."""

import functools
import hashlib
import json

import numpy as np
import pytest

from selfrag_jax.encoders.token_bag import TokenBagEncoder
from selfrag_jax.retrieval.base import load
from selfrag_jax.retrieval.bm25 import BM25Retriever
from selfrag_jax.retrieval.dense import SMALLEST, DenseRetriever
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.hybrid import HybridRetriever
from selfrag_jax.retrieval.rerank import RerankRetriever

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
  with pytest.raises(ValueError, match=r"shape \(5, 7\), expected \(5, 12\)"):
    load(tmp_path, encoder=lambda texts: np.ones((len(texts), 7)))
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


def hashed(texts, seed=0):
  """A vector of each text that nothing but the text and the seed says."""
  seeds = (int(hashlib.sha256(f"{seed} {text}".encode()).hexdigest()[:12], 16) for text in texts)
  return np.stack([np.random.default_rng(each).normal(size=12) for each in seeds]).astype(np.float32)


def other_hashed(texts):
  return hashed(texts, seed=1)


other_hashed.__name__ = other_hashed.__qualname__ = "hashed"


class Callable:
  def __init__(self, seed):
    self.seed = seed

  def __call__(self, texts):
    return hashed(texts, self.seed)


TEXTS = [Document(f"d{i}", content=f"text number{i}") for i in range(40)]
PAIRS = {
  "same name": (hashed, other_hashed),
  "lambdas": (lambda texts: hashed(texts), lambda texts: hashed(texts, 1)),
  "partials": (functools.partial(hashed, seed=0), functools.partial(hashed, seed=1)),
  "objects": (Callable(0), Callable(1)),
  "another length": (hashed, lambda texts: 2 * hashed(texts)),
  "fitted": (TokenBagEncoder(width=12), hashed),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_the_store_of_a_function_opens_with_that_function_alone(tmp_path, pair):
  function, other = PAIRS[pair]
  retriever = DenseRetriever(encoder=function, backend="numpy")
  retriever.add_documents(TEXTS)
  retriever.save(tmp_path)
  with pytest.raises(ValueError, match=r"give it again, load\(folder, encoder=\.\.\.\)"):
    load(tmp_path)
  with pytest.raises(ValueError, match="is not the one that made these vectors"):
    load(tmp_path, encoder=other)
  with pytest.raises(ValueError, match=r"encoder that is given|expected \(16, 12\)"):
    load(tmp_path, model_name="token-bag")
  again = load(tmp_path, encoder=function)
  [found] = again.retrieve("text number7", 1)
  assert found.id == "d7"
  assert found.score == pytest.approx(1, abs=1e-6)
  again.save(tmp_path)
  with pytest.raises(ValueError, match="is not the one that made these vectors"):
    load(tmp_path, encoder=other)


def test_a_folder_does_not_say_that_the_default_model_made_the_vectors_of_a_function(tmp_path):
  retriever = DenseRetriever(encoder=hashed, backend="numpy")
  retriever.add_documents(TEXTS)
  retriever.save(tmp_path)
  kept = json.loads((tmp_path / "data-1" / "retriever.json").read_text())
  assert kept["settings"]["model_name"] == "function"


def test_the_store_of_a_name_opens_with_a_function_that_does_the_same(tmp_path):
  retriever = DenseRetriever("token-bag", backend="numpy")
  retriever.add_documents(TEXTS)
  retriever.save(tmp_path)
  with pytest.raises(ValueError, match="expected"):
    load(tmp_path, encoder=hashed)
  with pytest.raises(ValueError, match="is not the one that made these vectors"):
    load(tmp_path, encoder=lambda texts: np.ones((len(texts), 256)))
  assert len(load(tmp_path, encoder=TokenBagEncoder())) == 40
  assert load(tmp_path, backend="exact").settings["backend"] == "exact"
  with pytest.raises(ValueError, match="encoder is 'token-bag'; give a function"):
    load(tmp_path, encoder="token-bag")


def test_an_empty_store_of_a_function_asks_for_it_too(tmp_path):
  DenseRetriever(encoder=hashed, backend="numpy").save(tmp_path)
  with pytest.raises(ValueError, match="give it again"):
    load(tmp_path)
  assert len(load(tmp_path, encoder=other_hashed)) == 0  # there is no vector that another one could contradict


def test_a_function_in_another_precision_is_the_same_one(tmp_path):
  retriever = DenseRetriever(encoder=hashed, backend="numpy")
  retriever.add_documents(TEXTS)
  retriever.save(tmp_path)
  assert len(load(tmp_path, encoder=lambda texts: hashed(texts).astype(np.float16).tolist())) == 40


def test_functions_inside_of_other_retrievers_are_asked_for_too(tmp_path):
  for name, made in (
    ("retrievers", lambda function: [BM25Retriever(), DenseRetriever(encoder=function, backend="numpy")]),
    ("retriever", lambda function: DenseRetriever(encoder=function, backend="numpy")),
  ):
    kind = HybridRetriever if name == "retrievers" else RerankRetriever
    options = {} if name == "retrievers" else {"reranker": lambda query, documents: np.ones(len(documents))}
    retriever = kind(made(hashed), **options)
    retriever.add_documents(TEXTS)
    retriever.save(tmp_path / name)
    with pytest.raises(ValueError, match="give it again"):
      load(tmp_path / name, **options)
    with pytest.raises(ValueError, match="is not the one that made these vectors"):
      load(tmp_path / name, **{name: made(other_hashed)}, **options)
    again = load(tmp_path / name, **{name: made(hashed)}, **options)
    assert again.retrieve_batch(["text number7"], 3) == retriever.retrieve_batch(["text number7"], 3)


@pytest.mark.parametrize(
  ("given", "message"),
  [
    (lambda texts: np.full((len(texts), 3), np.nan), "NaN or infinity"),
    (lambda texts: np.full((len(texts), 3), 1e300), "NaN or infinity"),
    (lambda texts: np.ones(3), r"shape \(3,\) for 2 texts; it must be \[2, D\]"),
    (lambda texts: np.ones((1, 3)), r"shape \(1, 3\) for 2 texts"),
    (lambda texts: np.ones((2, 0)), r"shape \(2, 0\) for 2 texts"),
    (lambda texts: 1.0, r"shape \(\) for 2 texts"),
    (lambda texts: None, "no array of numbers|shape"),
    (lambda texts: [[1.0], [1.0, 2.0]], "no array of numbers"),
    (lambda texts: list(texts), "no array of numbers"),
  ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_an_encoder_that_gives_no_vectors_is_refused_in_words(given, message):
  retriever = DenseRetriever(encoder=given, backend="numpy")
  with pytest.raises(ValueError, match=message):
    retriever.add_documents(TEXTS[:2])
  assert len(retriever) == 0

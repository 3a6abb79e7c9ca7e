"""Ranking examples: they are functions of seed and index; negatives are BM25's results that no judge marked."""

import numpy as np
import pytest

from selfrag_jax.retrieval.beir import EXAMPLE, Judged, read_beir
from selfrag_jax.retrieval.document import Document
from selfrag_jax.tasks.ranking import RankingTask


@pytest.fixture(scope="module")
def data():
  return read_beir(EXAMPLE)


def test_every_epoch_shows_each_pair_once(data):
  task = RankingTask(data, negatives=2, seed=3)
  n = sum(map(len, data.qrels.values()))
  assert len(task.pairs) == n
  for epoch in range(2):
    found = task.examples(range(epoch * n, (epoch + 1) * n))
    assert sorted(zip(found.queries.tolist(), found.documents[:, 0].tolist(), strict=True)) == sorted(task.pairs)
  assert found.documents.shape == (n, 3)


def test_examples_are_functions_of_seed_and_index(data):
  task, same, other = (RankingTask(data, negatives=2, seed=seed) for seed in (3, 3, 4))
  whole = task.examples(range(40))
  for a, b in zip(whole, same.examples(range(40)), strict=True):
    np.testing.assert_array_equal(a, b)
  np.testing.assert_array_equal(task.examples(range(20, 25)).documents, whole.documents[20:25])
  assert not np.array_equal(other.examples(range(40)).documents, whole.documents)


def test_negatives_share_words_with_the_query_and_are_not_relevant(data):
  task = RankingTask(data, negatives=3, mined=5)
  found = task.examples(range(190))
  for query, documents in zip(found.queries, found.documents, strict=True):
    assert documents[0] in task.relevant[query]
    assert not task.relevant[query] & set(documents[1:].tolist())
    assert len(set(documents.tolist())) == 4
  known = task.known(found.queries[:4], found.documents[:4].reshape(-1))
  assert known.shape == (4, 16)
  assert known[np.arange(4), np.arange(4) * 4].all()


def test_what_bm25_does_not_find_comes_at_random():
  documents = [Document(str(i), content=f"word{i}") for i in range(5)]
  data = Judged(documents, {"q": "word0"}, {"q": {"0": 1.0}})
  found = RankingTask(data, negatives=4).examples([0])
  assert sorted(found.documents[0].tolist()) == [0, 1, 2, 3, 4]
  with pytest.raises(ValueError, match="5 documents cannot give 5 negatives"):
    RankingTask(data, negatives=5)

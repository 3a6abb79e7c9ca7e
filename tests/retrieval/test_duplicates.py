"""Repeated texts: equal ones are found, and near ones by the Jaccard similarity of their word triples."""

import numpy as np
import pytest

from selfrag_jax.retrieval.duplicates import Duplicates


def triples(text):
  words = text.split()
  return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


def test_case_and_spacing_do_not_make_a_text_new():
  duplicates = Duplicates()
  assert duplicates.first("a", "The  Port\nof Avalor") is None
  assert duplicates.first("b", "the port of avalor") == "a"
  assert duplicates.first("c", "the port of avalor.") is None


def test_near_duplicates_are_those_of_the_definition():
  rng = np.random.default_rng(0)
  texts, kept = [], []
  for i in range(300):
    if i % 3 and texts:  # a change of an earlier text, small or large
      words = texts[rng.integers(len(texts))].split()
      for at in rng.integers(len(words), size=rng.choice([1, 2, 8])):
        words[at] = f"new{rng.integers(1000)}"
    else:
      words = [f"word{j}" for j in rng.integers(500, size=60)]
    texts.append(" ".join(words))
  duplicates, missed = Duplicates(0.8), 0
  for i, text in enumerate(texts):
    near = [j for j in kept if len(triples(text) & triples(texts[j])) / len(triples(text) | triples(texts[j])) >= 0.8]
    found = duplicates.first(str(i), text)
    if found is None:
      missed += bool(near)
      kept.append(i)
    else:
      assert int(found) in near  # what is called a duplicate is one
  assert len(kept) < 280
  assert missed <= 10  # MinHash may overlook a few of those near the threshold


def test_short_texts_are_compared_whole():
  duplicates = Duplicates(0.9)
  assert duplicates.first("a", "harbor") is None
  assert duplicates.first("b", "harbor town") is None
  assert duplicates.first("c", "") is None
  assert duplicates.first("d", "HARBOR") == "a"


@pytest.mark.parametrize("threshold", [0, -1, 1.5])
def test_the_threshold_is_a_similarity(threshold):
  with pytest.raises(ValueError, match=r"must be in \(0, 1\]"):
    Duplicates(threshold)


def test_short_texts_that_differ_are_no_duplicates():
  found = Duplicates(0.9)
  texts = ["1 + 1 = 2", "7 - 3 = 4", "Step 1", "Step 2", "!!", "??", "step  1"]
  assert [found.first(str(i), text) for i, text in enumerate(texts)] == [None] * 6 + ["2"]

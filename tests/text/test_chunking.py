"""Chunks: together they are the whole text, none is too long, and they end at boundaries of the text."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfrag_jax.text.chunking import COARSEST, chunk, count_words

TEXT = """Ada wrote notes. They were long, e.g. forty pages by Dr. Menabrea! Were they read?

A second paragraph begins. It has two sentences.
This is another line of it."""


def cut(text, *args, **options):
  return [text[span.start : span.end] for span in chunk(text, *args, **options)]


def test_sentences_stay_whole_where_they_fit():
  assert cut(TEXT, 12, method="sentence") == [
    "Ada wrote notes. They were long, e.g. forty pages by Dr. Menabrea!",
    " Were they read?\n\nA second paragraph begins. It has two sentences.",
    "\nThis is another line of it.",
  ]


def test_recursive_cuts_at_the_coarsest_boundary_that_does():
  assert cut(TEXT, 18) == [TEXT.split("\n\n")[0], "\n\n" + TEXT.split("\n\n")[1]]
  assert cut(TEXT, 9) == [
    "Ada wrote notes.",
    " They were long, e.g. forty pages by Dr. Menabrea!",
    " Were they read?",
    "\n\nA second paragraph begins. It has two sentences.",
    "\nThis is another line of it.",
  ]
  assert cut(TEXT, 10_000) == [TEXT]


def test_words_fill_chunks():
  assert cut("a b c d e f g", 3, method="word") == ["a b c", " d e f", " g"]
  assert cut("a b c d e f g", 3, 1, method="word") == ["a b", " b c d", " d e f", " f g"]


def test_a_word_that_is_too_long_is_cut_between_characters():
  count = lambda texts: [len(text) for text in texts]
  assert cut("abcdefgh ij", 4, method="word", count=count) == ["abcd", "efgh", " ij"]


@pytest.mark.parametrize("method", COARSEST)
@settings(max_examples=300, deadline=None)
@given(
  text=st.text(st.sampled_from("ab.!? \n\t\u3000é東"), max_size=120), size=st.integers(1, 9), overlap=st.integers(0, 8),
  letters=st.booleans(),
)  # fmt: skip
def test_chunks_are_the_text_and_none_is_too_long(method, text, size, overlap, letters):
  count = (lambda texts: [len(text.strip()) for text in texts]) if letters else count_words
  overlap = min(overlap, size - 1)
  spans = chunk(text, size, overlap, method=method, count=count)
  if not text.split():
    assert spans == []
    return
  assert "".join(text[span.new : span.end] for span in spans) == text
  assert spans[0].start == spans[0].new == 0
  words = lambda part: part.split()
  for before, span in pairwise(spans):
    assert before.start <= span.start <= span.new == before.end
    if not letters:
      assert len(words(text[span.start : span.new])) <= overlap
  if not letters:
    assert all(0 < len(words(text[span.start : span.end])) <= size for span in spans)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"size": 0}, "size = 0"),
    ({"size": 4, "overlap": 4}, "overlap = 4"),
    ({"size": 4, "overlap": -1}, "overlap = -1"),
    ({"size": 4, "method": "page"}, "method is 'page'; one of word, sentence, recursive"),
  ],
)
def test_what_cannot_be_meant_is_refused(options, message):
  with pytest.raises(ValueError, match=message):
    chunk("text", **options)


def test_white_space_without_end_is_gone_over_once():
  assert chunk(" " * 200_000, 8) == []
  [span] = chunk("word" + " \n" * 200_000, 8)
  assert (span.start, span.end) == (0, 400_004)

"""Citations that are checked while a text is written: what stays, what goes, what is added, and when it comes."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfrag_jax.metrics import extract_citations_from_response
from selfrag_jax.text.cited_stream import Citation, CitedStream

nothing = lambda statement, numbers: ()


def checked(text, n=3, attribute=nothing):
  stream = CitedStream(n, attribute)
  assert stream.add(text) + stream.end() == stream.text
  return stream


@pytest.mark.parametrize(
  ("text", "expected", "removed"),
  [
    ("It is so [1].", "It is so [1].", []),
    ("It is so [1, 2; 3].", "It is so [1][2][3].", []),
    ("It is so [DOC_1] [Document 2].", "It is so [1] [2].", []),
    ("It is so [4].", "It is so.", [4]),
    ("It is so.[4] It is not.", "It is so. It is not.", [4]),
    ("It is so.[4]It is not.", "It is so. It is not.", [4]),
    ("It is [4]so.", "It is so.", [4]),
    ("It is so [0][-1][99999999999999999999].", "It is so.", [0, -1, 10**9]),
    ("It is so [1, 4, 2].", "It is so [1][2].", [4]),
    ("[4] It is so.", "It is so.", [4]),
    ("It is so [1[4]2].", "It is so [1()2].", [4]),  # not [12], which would be a citation
    ("It is so [1", "It is so", []),
    ("It is so [", "It is so [", []),
    ("It is so [see the map", "It is so [see the map", []),
    ("It is so [see the map].", "It is so [see the map].", []),
    ("\n It is so. \n", "It is so.", []),
    ("[1]", "[1]", []),
    ("", "", []),
    ("日本は大きい。[1][7]", "日本は大きい。[1]", [7]),
  ],
)
def test_what_stays_and_what_is_taken_out(text, expected, removed):
  stream = checked(text)
  assert stream.text == expected
  assert stream.removed == removed


def test_a_statement_may_get_citations_behind_its_end():
  asked = []

  def attribute(statement, numbers):
    asked.append((statement, *numbers))
    return () if numbers else [2, 1] if "so" in statement else ()

  stream = checked("It is so. Is it?\n- It is [3]\n- so\n\n[1]\nAnd so.\n", attribute=attribute)
  assert stream.text == "It is so. [2][1] Is it?\n- It is [3]\n- so\n\n[1]\nAnd so. [2][1]"
  assert asked == [("It is so.",), ("Is it?",), ("- It is", 3), ("- so", 1), ("And so.",)]
  assert stream.citations == [
    Citation(2, "It is so.", True),
    Citation(1, "It is so.", True),
    Citation(3, "- It is", False),
    Citation(1, "- so", False),
    Citation(2, "And so.", True),
    Citation(1, "And so.", True),
  ]


def test_text_comes_as_soon_as_it_is_certain():
  stream = CitedStream(2, lambda statement, numbers: () if numbers else [2])
  pieces = ["Paris", " is", " large", ".", " It", " is", " 3", ".", "5", " km", " [", "1", "]", " wide", ".", "\n"]
  assert [stream.add(piece) for piece in pieces] == [
    "Paris", " is", " large", ".", " [2] It", " is", " 3", ".", "5", " km", "", "", " [1]", " wide", ".", "",
  ]  # fmt: skip
  assert stream.end() == ""


MARKS = ["[1]", "[2]", "[9]", " [1, 9]", "[", "]", "1", "9", ",", ";", " ", "\n", ". ", "!", "?", "-", "(", ")", "\x1b"]
WORDS = ["Paris", "is large", "3.5", " Dr.", "DOC_", "document ", " [see map]", "é", "日本"]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(MARKS + WORDS), max_size=25), st.booleans())
def test_pieces_of_any_size_give_the_same_text_which_cites_nothing_else(pieces, adds):
  attribute = (lambda statement, numbers: () if numbers else [2]) if adds else nothing
  whole = checked("".join(pieces), attribute=attribute)
  for cut in (pieces, "".join(pieces)):
    stream = CitedStream(3, attribute)
    assert "".join(map(stream.add, cut)) + stream.end() == whole.text
    assert (stream.citations, stream.removed) == (whole.citations, whole.removed)
  read = {number for statement in extract_citations_from_response(whole.text) for number in statement.citations}
  assert read == {citation.number for citation in whole.citations} <= {1, 2, 3}


@pytest.mark.parametrize("token", [" ", "[", "[1", "a", "\n", "[9]", "1,", ". "])
def test_texts_that_never_end_take_little_time(token):
  begin, stream = time.process_time(), CitedStream(3, nothing)
  for _ in range(2000):
    stream.add(token)
  stream.end()
  assert time.process_time() - begin < 5

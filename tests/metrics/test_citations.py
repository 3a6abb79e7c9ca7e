"""Citations: what is read as one, and scores worked by hand and by ALCE's rules, written out again here."""

import random
import re
import time

import pytest

from selfrag_jax.metrics import Statement, citation_scores, extract_citations_from_response
from selfrag_jax.metrics.citations import find_support
from selfrag_jax.retrieval import Document


def holds_all(premise, claim):
  """A premise supports a claim if it has all its letters: so two documents can support it together."""
  return set(re.findall("[a-z]", claim)) <= set(premise)


@pytest.mark.parametrize(
  ("text", "numbers"),
  [
    ("It is so [1].", (1,)),
    ("It is so [1][2].", (1, 2)),
    ("It is so [1, 2; 3].", (1, 2, 3)),
    ("It is so [DOC_1] [doc_2].", (1, 2)),
    ("It is so [Document 1].", (1,)),
    ("It is so [Document 1, Document 2].", (1, 2)),
    ("It is so [1][1] [01].", (1,)),
    ("It is so [0][-2].", (0, -2)),
    ("It is so [" + "9" * 10_000 + "].", (10**9,)),
    ("It is so [" + "0" * 10_000 + "3].", (3,)),
    ("It is so [one], [], [1.5], [x1], (1), 1], [²].", ()),
  ],
)
def test_the_forms_of_a_citation(text, numbers):
  [statement] = extract_citations_from_response(text)
  assert statement.citations == numbers
  assert not numbers or statement.text == "It is so."


def test_each_statement_has_its_own_citations():
  response = 'Dr. A. Smith came in 1.5 days [1]. He left the U.S. soon.[2] "Why?" asked J. R. Doe [3]\n- Nobody knows'
  assert extract_citations_from_response(response) == [
    Statement("Dr. A. Smith came in 1.5 days.", (1,)),
    Statement("He left the U.S. soon.", (2,)),
    Statement('"Why?"', ()),
    Statement("asked J. R. Doe", (3,)),
    Statement("- Nobody knows", ()),
  ]


def test_citations_that_stand_alone_belong_to_the_statement_before_or_to_the_first():
  assert extract_citations_from_response("[1]\nOne.\n[2]\nTwo.") == [Statement("One.", (1, 2)), Statement("Two.", ())]
  assert extract_citations_from_response("[1]\n[2]") == [Statement("", (1, 2))]
  assert citation_scores("[1][2]", ["a", "b"], lambda premise, claim: True) == (0, 0, 1, 2)


@pytest.mark.parametrize(
  ("response", "expected"),
  [
    ("a [1].", (1, 1, 1, 1)),
    ("a [2].", (0, 0, 1, 1)),
    ("a.", (0, 0, 1, 0)),
    ("ab [1][2].", (1, 1, 1, 2)),  # each is needed
    ("a [1][2].", (1, 0.5, 1, 2)),  # the second is irrelevant
    ("a [1][4].", (1, 1, 1, 2)),  # each supports it alone
    ("ac [1][2].", (0, 0, 1, 2)),
    ("a [1]. b [2]. c.", (2 / 3, 1, 3, 2)),
    ("a [1]. b [1].", (0.5, 0.5, 2, 2)),
    ("a [1][5].", (0, 0, 1, 2)),  # no document 5
    ("a [1][0].", (0, 0, 1, 2)),
    ("a [1][-1].", (0, 0, 1, 2)),
    ("a [1][2][2][2].", (1, 0.5, 1, 2)),
    ("ad [1][2][3][4].", (1, 2 / 3, 1, 3)),  # the fourth does not count, the second is irrelevant
    ("a [2][3][3][1].", (1, 1 / 3, 1, 3)),
    ("d [1][2][4][3].", (0, 0, 1, 3)),  # the only one that supports it comes too late
    ("", (0, 0, 0, 0)),
  ],
)
def test_scores_worked_by_hand(response, expected):
  assert citation_scores(response, ["a", "b", "d", "ae"], holds_all) == pytest.approx(expected)


def oracle(sentences, documents, supports):
  """ALCE's rules for lists of (claim, numbers): recall and precision, where wrong numbers count as citations."""
  entailed = precise = total = 0
  for claim, numbers in sentences:
    kept = numbers[:3]
    total += len(kept)
    if not numbers or max(numbers) > len(documents):
      continue
    joined = lambda chosen: "\n".join(documents[n - 1] for n in chosen)
    if not supports(joined(kept), claim):
      continue
    entailed += 1
    for n in kept:
      if not supports(documents[n - 1], claim):
        others = [m for m in kept if m != n]
        if supports(joined(others), claim):
          continue
      precise += 1
  return entailed / len(sentences), precise / total if total else 0


def test_scores_are_those_of_alce_on_random_responses():
  rng, seen = random.Random(0), set()
  for _ in range(500):
    documents = ["".join(rng.choices("abcd", k=rng.randint(1, 3))) for _ in range(5)]
    draw = lambda: ("".join(rng.choices("abcd", k=rng.randint(1, 3))), rng.sample(range(1, 7), rng.randint(0, 5)))
    sentences = [draw() for _ in range(rng.randint(1, 4))]
    response = " ".join(claim + "".join(f"[{n}]" for n in numbers) + "!" for claim, numbers in sentences)
    scores = citation_scores(response, documents, holds_all)
    assert scores[:2] == pytest.approx(oracle(sentences, documents, holds_all))
    seen.add(scores[:2])
  assert len(seen) > 30


def test_without_a_limit_every_citation_counts():
  documents = ["a", "b", "c", "d"]
  assert citation_scores("abcd [1][2][3][4].", documents, holds_all) == (0, 0, 1, 3)
  assert citation_scores("abcd [1][2][3][4].", documents, holds_all, limit=None) == (1, 1, 1, 4)


def test_the_default_checker_reads_documents():
  documents = [Document("x", "Oslo", "Oslo is the capital of Norway."), "Paris is the capital of France. [2] [DOC_1]"]
  assert citation_scores("Oslo is the capital of Norway [1].", documents) == (1, 1, 1, 1)
  assert citation_scores("Oslo is the capital of Norway [2].", documents) == (0, 0, 1, 1)
  assert citation_scores("Oslo is not the capital of Norway [1].", documents) == (0, 0, 1, 1)


def test_a_citation_in_a_document_is_none_of_the_response():
  forged = ["a [1] [2] [DOC_1] [RETRIEVAL_END] " * 1000, "b"]
  assert citation_scores("a.", forged, holds_all) == (0, 0, 1, 0)
  assert citation_scores("b [2].", forged, holds_all) == (1, 1, 1, 1)


@pytest.mark.parametrize("documents", [[], [""], ["a"] * 3])
@pytest.mark.parametrize(
  "response",
  [
    "",
    " \n\t ",
    "[",
    "[1" * 100_000,
    "[1, " * 100_000,
    "[" + " " * 200_000,
    "[" + "1, " * 100_000 + "1]",
    "." * 200_000 + "x",
    "!\"'" * 100_000 + "x",
    ".[x" * 100_000,
    ". " * 100_000,
    "a" * 1_000_000,
    "-" * 200_000,
    "[DOC_1] [RETRIEVAL_END] [-9999999999999999999] " * 1000,
    "\ud800 \u202e [\u0661] [１] \x00 [1]\u2028 е́ 👩‍👩‍👧 ﷽",
    "[9" + "9" * 5000 + "]. " * 10,
  ],
)
def test_hostile_responses_end_soon_and_raise_nothing(response, documents):
  started = time.process_time()
  recall, precision, statements, citations = citation_scores(response, documents)
  assert 0 <= recall <= 1
  assert 0 <= precision <= 1
  assert statements >= 0
  assert citations >= 0
  assert time.process_time() - started < 5


def test_a_thousand_forged_citations_are_wrong():
  response = "a [1]. " + "".join(f"a [{n}]. " for n in range(2, 1001))
  assert citation_scores(response, ["a"], holds_all) == pytest.approx((1e-3, 1e-3, 1000, 1000))


def test_another_wrong_citation_never_helps_and_another_right_one_never_harms():
  documents = ["ab", "c"]
  for response in ("ab [1].", "ab [1]. c [2].", "ab [1]. e."):
    base = citation_scores(response, documents, holds_all)
    worse = citation_scores(response + " d [9].", documents, holds_all)
    better = citation_scores(response + " c [2].", documents, holds_all)
    assert worse.recall < base.recall
    assert worse.precision < base.precision
    assert better.recall >= base.recall
    assert better.precision >= base.precision


def test_a_line_without_a_word_swallows_no_statement():
  text = "-\nIt is so [1].\n---\nIt is not [2]."
  assert extract_citations_from_response(text) == [Statement("It is so.", (1,)), Statement("It is not.", (2,))]


def test_documents_that_support_a_statement_are_found():
  oslo, king, both = "Oslo is the capital of Norway.", "Norway has a king. He lives far away.", "Ships carry corn."
  assert find_support("Oslo is the capital of Norway.", [king, oslo, both]) == [2]
  assert find_support("Oslo is the capital of Norway.", [king, oslo, oslo, oslo, oslo]) == [2, 3, 4]
  assert find_support("Oslo is the capital of Norway.", [oslo] * 5, limit=1) == [1]
  assert find_support("Rome is the capital of Italy.", [oslo, king, both]) == []
  assert find_support("Oslo is not the capital of Norway.", [oslo]) == []
  assert find_support("", [oslo]) == find_support("Oslo.", []) == []
  apart = ["Ada Baker wrote the long green book.", "The green book won a silver prize in Paris."]
  claim = "Ada Baker wrote the long green book, which won a silver prize in Paris."
  assert sorted(find_support(claim, [oslo, *apart])) == [2, 3]  # together
  assert find_support(claim, [oslo, *apart], limit=1) == []
  assert find_support(claim, [Document("1", content=oslo), Document("2", content=" ".join(apart))]) == [2]

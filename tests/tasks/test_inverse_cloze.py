"""Queries made of passages: which sentence asks, and what is left of its passage."""

import pytest

from selfrag_jax.retrieval.document import Document
from selfrag_jax.tasks.inverse_cloze import inverse_cloze

BRIDGE = "The old bridge of Lisse was built by the monks in 1301."
FERRY = "Before that a ferry crossed the river twice a day."
SHORT = "It fell."


def documents(n):
  return [Document(f"b{i}", "Old bridge", f"{BRIDGE} {SHORT} {FERRY}") for i in range(n)]


def test_a_sentence_asks_for_the_rest_of_its_passage():
  made = inverse_cloze(documents(60))
  assert made.qrels == {f"b{i}": {f"b{i}": 1} for i in range(60)}
  assert made.queries.keys() == made.qrels.keys()
  sentences, titled = set(), 0
  for document in made.documents:
    query = made.queries[document.id]
    sentence = query.removeprefix("Old bridge ")
    titled += query != sentence
    sentences.add(sentence)
    assert document.content == (f"{SHORT} {FERRY}" if sentence == BRIDGE else f"{BRIDGE} {SHORT}")
    assert document.title == "Old bridge"
  assert sentences == {BRIDGE, FERRY}  # never one of two words
  assert 15 <= titled <= 45


def test_what_is_made_of_a_passage_is_a_function_of_its_place_and_the_seed():
  first, made = Document("b0", "", SHORT), inverse_cloze(documents(20), seed=1)
  other = inverse_cloze([first, *documents(20)[1:]], seed=1)
  assert other.documents[0] == first
  assert other.documents[1:] == made.documents[1:]
  assert other.queries == {id: query for id, query in made.queries.items() if id != "b0"}
  assert inverse_cloze(documents(20), seed=2).queries != made.queries


@pytest.mark.parametrize(
  "text",
  ["", " ", ". . .", "One two three four five six seven", f"{BRIDGE} ", f" {BRIDGE}\n\n", f"{BRIDGE} {SHORT}"],
)
def test_a_passage_that_would_keep_no_sentence_stays_whole_and_is_not_asked_for(text):
  made = inverse_cloze([Document("a", "", text)])
  assert (made.documents, made.queries, made.qrels) == ([Document("a", "", text)], {}, {})


def test_a_passage_without_a_title_is_asked_for_by_its_sentence():
  made = inverse_cloze([Document(str(i), "", f"{BRIDGE} {FERRY}") for i in range(20)])
  assert set(made.queries.values()) == {BRIDGE, FERRY}

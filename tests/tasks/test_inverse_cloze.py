"""Queries made of passages: which sentence asks, what is left of its passage, and what is relevant to it."""

import pytest

from selfrag_jax.retrieval.document import Document
from selfrag_jax.tasks.inverse_cloze import inverse_cloze

BRIDGE = "The old bridge of Lisse was built by the monks in 1301."
FERRY = "Before that a ferry crossed the river twice a day."
SHORT = "It fell."


def documents(n=1):
  """A town that two of `n` + 2 documents are about."""
  others = [Document(f"b{i}", "Old bridge", f"{BRIDGE} {SHORT} {FERRY}") for i in range(n)]
  return [*others, Document("lisse", "Lisse", SHORT), Document("one", "Alone", BRIDGE)]


def test_a_sentence_asks_for_the_rest_of_its_passage():
  made = inverse_cloze(documents(60))
  assert made.queries.keys() == made.qrels.keys() == {f"b{i}" for i in range(60)}
  sentences, titled = set(), 0
  for document in made.documents[:60]:
    query = made.queries[document.id]
    sentence = query.removeprefix("Old bridge ")
    titled += query != sentence
    sentences.add(sentence)
    other = FERRY if sentence == BRIDGE else BRIDGE
    assert document.content in (f"{other} {SHORT}", f"{SHORT} {other}")
    assert document.title == "Old bridge"
  assert sentences == {BRIDGE, FERRY}  # never one of two words
  assert 15 <= titled <= 45


def test_the_passages_that_the_sentence_names_are_relevant_too():
  made = inverse_cloze(documents(20))
  for id, query in made.queries.items():
    assert made.qrels[id] == ({id: 1, "lisse": 1} if BRIDGE in query else {id: 1})


def test_a_passage_that_cannot_ask_stays_whole():
  made = inverse_cloze(documents())
  assert made.documents[1:] == documents()[1:]


def test_the_seed_decides_and_not_the_other_passages():
  made, more = inverse_cloze(documents(20), seed=1), inverse_cloze(documents(20)[:10], seed=1)
  assert made.documents[:10] == more.documents
  assert inverse_cloze(documents(20), seed=2).queries != made.queries


@pytest.mark.parametrize("text", ["", " ", ". . .", "One two three four five six seven", "a\n\nb"])
def test_odd_texts_ask_nothing(text):
  made = inverse_cloze([Document("a", "", text)])
  assert (made.documents, made.queries, made.qrels) == ([Document("a", "", text)], {}, {})


def test_a_passage_without_a_title_is_asked_for_by_its_sentence():
  made = inverse_cloze([Document(str(i), "", f"{BRIDGE} {FERRY}") for i in range(20)])
  assert set(made.queries.values()) == {BRIDGE, FERRY}

"""A document: it keeps its values, and nothing can change them."""

import copy
import dataclasses
import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfrag_jax.retrieval.document import Document


def test_round_trip_through_json_in_any_script():
  document = Document(
    "ü-1", "Größe 東京", "naïve 👩‍👩‍👧 \u0000 text", {"jahr": 1999, "tags": ["ä"]}, 0.5, "düsseldorf.md"
  )
  assert Document.from_dict(json.loads(json.dumps(document.to_dict()))) == document


def test_it_cannot_be_changed():
  metadata = {"year": 1}
  document = Document("a", content="b", metadata=metadata)
  metadata["year"] = 2
  assert document.metadata["year"] == 1
  with pytest.raises(dataclasses.FrozenInstanceError):
    document.score = 1.0
  with pytest.raises(TypeError):
    document.metadata["year"] = 3


def test_what_is_indexed_is_title_and_content():
  assert Document("a", "Ada", "wrote notes").text == "Ada wrote notes"
  assert Document("a", content="wrote notes").text == "wrote notes"


@pytest.mark.parametrize(
  ("record", "message"),
  [
    ({"id": "", "content": "a"}, "id that is not empty"),
    ({"id": 7}, "id of document 7 is 7, it must be a text"),
    ({"id": "a", "content": None}, "content of document 'a' is None"),
    ({"id": "a", "text": "b"}, "has no text; put it into metadata"),
    ({"id": "a", "metadata": {1: 2}}, "metadata under 1"),
    ({"id": "a", "metadata": ["b"]}, "metadata of document 'a' is ..b.., it must be a mapping"),
    ({"id": "a", "content": "b\ud800"}, "content of document 'a' has half a surrogate pair"),
    ({"content": "a", "metadata": {"when": object()}}, "metadata of a document without id cannot be written as JSON"),
  ],
)
def test_what_is_no_document_is_named(record, message):
  with pytest.raises(ValueError, match=message):
    Document.from_dict(record)


def test_a_scored_copy_is_the_document_with_a_score():
  document = Document("1", "T", "C", {"n": 1}, source="s")
  assert document.with_score(0.5) == dataclasses.replace(document, score=0.5)
  assert document.score is None


FULL = Document("ü", "Größe", "text", {"tags": ["a", {"b": 1}], "n": 1}, 0.5, "s.md")


@pytest.mark.parametrize(
  "copied", [copy.copy, copy.deepcopy, *(lambda d, p=p: pickle.loads(pickle.dumps(d, p)) for p in range(6))]
)
def test_it_can_be_copied_and_pickled(copied):
  again = copied(FULL)
  assert again == FULL
  assert again.to_dict() == FULL.to_dict()
  with pytest.raises(TypeError):
    again.metadata["n"] = 2
  with pytest.raises(dataclasses.FrozenInstanceError):
    again.score = 1.0


def test_what_it_was_given_and_what_it_gives_are_no_way_into_it():
  tags = ["a"]
  document = Document("x", metadata={"tags": tags})
  tags.append("b")
  document.to_dict()["metadata"]["tags"].append("c")
  assert document.metadata["tags"] == ["a"]


def test_documents_are_members_of_sets():
  assert len({FULL, copy.copy(FULL), Document("other")}) == 2


def test_without_an_id_it_has_the_digest_of_what_it_holds():
  made = [
    Document(title="T", content="C", metadata={"a": 1, "b": 2}, source="s"),
    Document(title="T", content="C", metadata={"b": 2, "a": 1}, source="s"),
    Document.from_dict({"title": "T", "content": "C", "metadata": {"a": 1, "b": 2}, "source": "s", "score": 3.0}),
  ]
  assert len({document.id for document in made}) == 1
  code = (
    "from selfrag_jax.retrieval.document import Document;"
    "print(Document(title='T', content='C', metadata={'a': 1, 'b': 2}, source='s').id)"
  )
  other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert other.stdout.strip() == made[0].id
  assert Document.from_dict(made[0].to_dict()) == made[0]


words = st.text("ab\n\x00é", max_size=3)
contents = st.tuples(words, words, words, st.dictionaries(words, st.one_of(words, st.integers(), st.booleans())))


@settings(max_examples=200, deadline=None)
@given(contents, contents)
def test_two_different_documents_never_share_an_id(one, other):
  made = [Document(title=t, content=c, source=s, metadata=m) for t, c, s, m in (one, other)]
  assert (made[0].id == made[1].id) == (json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))

"""A document keeps what it was given, and nothing can change it."""

import dataclasses
import json

import pytest

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
    ({"content": "a"}, "needs an id"),
    ({"id": "", "content": "a"}, "id that is not empty"),
    ({"id": 7}, "id of document 7 is 7, it must be a text"),
    ({"id": "a", "content": None}, "content of document 'a' is None"),
    ({"id": "a", "text": "b"}, "has no text; put it into metadata"),
    ({"id": "a", "metadata": {1: 2}}, "metadata under 1"),
  ],
)
def test_what_is_no_document_is_named(record, message):
  with pytest.raises(ValueError, match=message):
    Document.from_dict(record)


def test_a_scored_copy_is_the_document_with_a_score():
  document = Document("1", "T", "C", {"n": 1}, source="s")
  assert document.with_score(0.5) == dataclasses.replace(document, score=0.5)
  assert document.score is None

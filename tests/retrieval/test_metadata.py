"""Metadata: any name can be filtered, and a value that no file can hold is refused when it is given, not when saved."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfrag_jax.retrieval.base import load
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.simple import SimpleRetriever
from selfrag_jax.retrieval.sources import read_source


def found(documents, where):
  retriever = SimpleRetriever()
  retriever.add_documents(documents)
  return [document.id for document in retriever.retrieve("harbor", 10, where=where)]


def test_what_a_document_lacks_is_filtered_by_its_metadata():
  documents = [
    Document("1", content="harbor", metadata={"source": "atlas", "title": "Ports", "id": "p1"}),
    Document("2", content="harbor", metadata={"source": ["news", "atlas"], "id": 7}),
    Document("3", content="harbor"),
  ]
  assert found(documents, {"source": "atlas"}) == ["1", "2"]
  assert found(documents, {"title": {"$contains": "ort"}}) == ["1"]
  assert found(documents, {"id": "3"}) == ["3"]  # all documents have an id of their own


def test_what_a_document_has_twice_is_filtered_by_both_names():
  documents = [Document("1", "Own", "harbor", {"source": "meta", "title": "Other", "id": "p1"}, source="own")]
  for name, own, other in (("source", "own", "meta"), ("title", "Own", "Other"), ("id", "1", "p1")):
    assert found(documents, {name: own}) == ["1"]
    assert found(documents, {name: other}) == []
    assert found(documents, {f"metadata.{name}": other}) == ["1"]
    assert found(documents, {f"metadata.{name}": own}) == []


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["id", "title", "source", "year"]), st.text("ab", min_size=1, max_size=2)))
def test_no_field_of_metadata_is_hidden_from_a_filter(metadata):
  fields = Document("own", "Own", "harbor", metadata, source="own").fields
  for name, value in metadata.items():
    assert fields[name if name == "year" else f"metadata.{name}"] == value


def test_lines_of_files_take_title_and_source_from_their_metadata(tmp_path):
  lines = (
    {"text": "harbor", "metadata": {"source": "atlas", "title": "Ports"}},
    {"text": "harbor", "metadata": {"source": "atlas", "title": "Ports"}, "source": "news", "title": "Quays"},
    {"text": "harbor", "metadata": {"source": ["atlas"], "title": None}},
  )
  path = tmp_path / "a.jsonl"
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  documents = [found.document for found in read_source(path.name, path)]
  assert [(d.source, d.title) for d in documents] == [("atlas", "Ports"), ("news", "Quays"), ("a.jsonl", "")]
  assert [dict(d.metadata) for d in documents] == [line["metadata"] for line in lines]
  assert documents[2].fields["metadata.source"] == ["atlas"]


def nested(levels):
  value = "deep"
  for _ in range(levels):
    value = [value]
  return {"by": value}


@pytest.mark.parametrize(
  ("metadata", "message"),
  [
    ({"when": object()}, "cannot be written as JSON"),
    ({"tags": {"a"}}, "cannot be written as JSON"),
    ({"by": {"x": [b"bytes"]}}, "cannot be written as JSON"),
    ({"n": 10**5000}, "cannot be written as JSON"),
    ({"by": "\ud800"}, "cannot be written as JSON"),
    (nested(100), "nested more than 50 deep"),
  ],
)
def test_metadata_that_no_file_can_hold_is_named_when_it_is_added(metadata, message):
  retriever = SimpleRetriever()
  retriever.add_documents([Document("a", content="harbor")])
  for add in (retriever.add_documents, retriever.upsert_documents):
    with pytest.raises(ValueError, match=f"metadata of document 'b' .*{message}"):
      add([Document("a2", content="x"), Document("b", content="harbor", metadata=metadata)])
  assert [document.id for document in retriever.documents] == ["a"]


@pytest.mark.parametrize("metadata", [nested(5000), {"by": {1: "x"}}, {"by": [{("a", "b"): 1}]}])
def test_metadata_that_no_document_can_hold_is_an_error_in_words(metadata):
  with pytest.raises(ValueError, match="metadata"):
    Document("a", metadata=metadata)


def test_numbers_and_lists_of_numpy_are_kept(tmp_path):
  retriever = SimpleRetriever()
  given = {"n": np.int64(3), "x": np.float32(0.5), "row": np.arange(2), "pair": (1, np.bool_(True))}
  retriever.add_documents([Document("a", content="harbor", metadata=given)])
  retriever.save(tmp_path / "kb")
  assert load(tmp_path / "kb").documents == retriever.documents
  assert retriever.get("a").metadata == {"n": 3, "x": 0.5, "row": [0, 1], "pair": [1, True]}

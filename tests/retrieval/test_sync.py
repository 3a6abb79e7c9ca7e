"""A sync: the knowledge base matches its files again, whatever was added since, and deletions are reported."""

import json

import numpy as np
import pytest

from selfrag_jax.retrieval.__main__ import main
from selfrag_jax.retrieval.base import load
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.knowledge_base import merge_knowledge_bases, prepare_knowledge_base
from selfrag_jax.retrieval.manager import RetrievalManager

LONG = " ".join(f"Sentence number {i} speaks of a walrus." for i in range(12))


def build(documents, output, **options):
  return prepare_knowledge_base(documents, output, "simple", progress=False, **options)


def contents(folder):
  return {document.id: document.content for document in load(folder).documents}


def write_lines(path, *records):
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
  return path


@pytest.fixture
def source(tmp_path):
  """A folder of two texts, of which a knowledge base was built."""
  (tmp_path / "docs").mkdir()
  for name, text in (("a.txt", "zebra"), ("b.txt", "otter")):
    (tmp_path / "docs" / name).write_text(text)
  build(tmp_path / "docs", tmp_path / "kb")
  return tmp_path / "docs"


def test_a_file_that_was_upserted_is_synced_as_it_is(tmp_path, source):
  (source / "a.txt").write_text("heron")
  add = ("add", "--knowledge_base", str(tmp_path / "kb"), "--documents", str(source / "a.txt"), "--upsert")
  assert main(add) == 0
  assert contents(tmp_path / "kb") == {"a.txt": "heron", "b.txt": "otter"}
  (source / "a.txt").write_text("badger")
  for _ in range(2):
    build(source, tmp_path / "kb", sync=True)
    assert contents(tmp_path / "kb") == {"a.txt": "badger", "b.txt": "otter"}


def test_a_file_that_was_added_and_then_moved_into_the_folder_is_synced(tmp_path, source):
  (tmp_path / "c.txt").write_text("heron")
  manager = RetrievalManager(knowledge_base_path=tmp_path / "kb")
  manager.add_files([tmp_path / "c.txt"])
  manager.save_knowledge_base(tmp_path / "kb")
  assert build(source, tmp_path / "kb", sync=True)["replaced"] == 0
  assert contents(tmp_path / "kb")["c.txt"] == "heron"  # no file of the folder has its id: it stays
  (source / "c.txt").write_text("badger")
  assert build(source, tmp_path / "kb", sync=True)["replaced"] == 1
  assert contents(tmp_path / "kb")["c.txt"] == "badger"
  (source / "c.txt").unlink()
  assert build(source, tmp_path / "kb", sync=True)["removed"] == 1


def test_a_document_of_a_file_that_python_upserted_comes_back_as_the_file_has_it(tmp_path, source):
  manager = RetrievalManager(knowledge_base_path=tmp_path / "kb")
  manager.upsert_documents([Document("a.txt", content="mine"), Document("new", content="mine too")])
  manager.save_knowledge_base(tmp_path / "kb")
  assert build(source, tmp_path / "kb", sync=True)["replaced"] == 1
  assert contents(tmp_path / "kb") == {"a.txt": "zebra", "b.txt": "otter", "new": "mine too"}


def test_what_python_added_is_replaced_by_no_file_and_the_error_says_what_to_do(tmp_path, source):
  manager = RetrievalManager(knowledge_base_path=tmp_path / "kb")
  manager.add_documents([Document("c.txt", content="mine")])
  manager.save_knowledge_base(tmp_path / "kb")
  (source / "c.txt").write_text("heron")
  with pytest.raises(ValueError, match=r"'c\.txt' is that of a document that was added by hand; .*delete"):
    build(source, tmp_path / "kb", sync=True)
  assert contents(tmp_path / "kb")["c.txt"] == "mine"


def test_a_merged_knowledge_base_is_synced_with_the_files_of_one_of_them(tmp_path):
  chunking = {"size": 16, "method": "word"}
  for name, text in (("a", LONG), ("b", "otter")):
    write_lines(tmp_path / f"{name}.jsonl", {"id": name, "text": text})
    build(tmp_path / f"{name}.jsonl", tmp_path / f"kb_{name}", chunking=chunking)
  merge_knowledge_bases([tmp_path / "kb_a", tmp_path / "kb_b"], tmp_path / "kb", progress=False)
  assert set(contents(tmp_path / "kb")) == {*(f"a#{i}" for i in range(6)), "b"}
  write_lines(tmp_path / "a.jsonl", {"id": "a", "text": " ".join(LONG.split()[:32])})
  report = build(tmp_path / "a.jsonl", tmp_path / "kb", sync=True)
  assert set(contents(tmp_path / "kb")) == {"a#0", "a#1", "b"}  # cut as both were; no chunk of the old text is left
  assert (report["replaced"], report["removed"]) == (1, 0)
  assert build(tmp_path / "a.jsonl", tmp_path / "kb", sync=True)["replaced"] == 0


def test_a_sync_with_fewer_files_counts_what_it_removes(tmp_path, source, capsys):
  write_lines(tmp_path / "docs" / "c.jsonl", {"id": "long", "text": LONG}, {"id": "short", "text": "heron"})
  build(source, tmp_path / "kb", sync=True, chunking={"size": 16})
  for name in ("b.txt", "c.jsonl"):
    (source / name).unlink()
  assert main(["--documents", str(source), "--output", str(tmp_path / "kb"), "--sync", "--quiet"]) == 0
  assert "removed 3, replaced 0" in capsys.readouterr().out  # documents, however many chunks they were
  assert contents(tmp_path / "kb") == {"a.txt": "zebra"}
  assert main(["--documents", str(source), "--output", str(tmp_path / "other"), "--type", "simple", "--quiet"]) == 0
  assert "removed" not in capsys.readouterr().out


def test_a_document_that_was_cut_is_deleted_by_its_own_id(tmp_path, capsys):
  write_lines(tmp_path / "a.jsonl", {"id": "long", "text": LONG}, {"id": "short", "text": "heron"})
  build(tmp_path / "a.jsonl", tmp_path / "kb", chunking={"size": 16, "method": "word"})
  delete = ("delete", "--knowledge_base", str(tmp_path / "kb"), "--id")
  assert main([*delete, "longer"]) == 1
  assert "no document has the id 'longer'" in capsys.readouterr().err
  assert main([*delete, "long#0"]) == 0  # a chunk alone
  assert main([*delete, "long", "--id", "long#1"]) == 0
  assert "deleted 5; " in capsys.readouterr().out
  assert contents(tmp_path / "kb") == {"short": "heron"}


def test_a_token_bag_embeds_nothing_where_nothing_has_changed_and_all_where_something_has(tmp_path, source):
  options = {"settings": {"model_name": "token-bag", "backend": "numpy"}, "progress": False}
  sync = lambda: prepare_knowledge_base(source, tmp_path / "dense", "dense", sync=True, **options)
  assert sync()["embedded"] == 2
  before = load(tmp_path / "dense").vectors
  assert sync()["embedded"] == 0
  np.testing.assert_array_equal(load(tmp_path / "dense").vectors, before)
  (source / "c.txt").write_text("zebra heron")
  assert sync()["embedded"] == 3
  prepare_knowledge_base(source, tmp_path / "anew", "dense", **options)
  np.testing.assert_array_equal(load(tmp_path / "dense").vectors, load(tmp_path / "anew").vectors)


def test_a_document_that_is_whole_in_one_and_cut_in_another_is_not_merged_twice(tmp_path):
  write_lines(tmp_path / "a.jsonl", {"id": "a", "text": LONG})
  for name, size in (("whole", 0), ("cut", 16)):
    build(tmp_path / "a.jsonl", tmp_path / name, chunking={"size": size})
  with pytest.raises(ValueError, match="'a' is whole in one of them and cut into chunks in another"):
    merge_knowledge_bases([tmp_path / "whole", tmp_path / "cut"], tmp_path / "kb", progress=False)

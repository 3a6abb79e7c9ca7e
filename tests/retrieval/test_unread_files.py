"""Folders with unreadable files: the build goes on or names the reason, and a sync keeps their documents."""

import json
import os
from pathlib import Path

import pytest

from selfrag_jax.retrieval.__main__ import main
from selfrag_jax.retrieval.base import load
from selfrag_jax.retrieval.knowledge_base import prepare_knowledge_base


def build(folder, output, **options):
  return prepare_knowledge_base(folder, output, "simple", progress=False, **options)


def ids(folder):
  return {document.id for document in load(folder).documents}


@pytest.fixture
def folder(tmp_path):
  """Two documents on top, one below."""
  for name, text in (("a.txt", "zebra"), ("b.txt", "otter"), ("sub/c.txt", "heron")):
    (tmp_path / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "docs" / name).write_text(text)
  return tmp_path / "docs"


def refuse(monkeypatch, *paths):
  """Let the system refuse to list folders and open files, as without permission: the tests may run as root."""
  scandir, opened = os.scandir, Path.open

  def scan(path="."):
    if not isinstance(path, int) and Path(path) in paths:
      raise PermissionError(13, "Permission denied", str(path))
    return scandir(path)

  def open_(path, *arguments, **options):
    if path in paths:
      raise PermissionError(13, "Permission denied", str(path))
    return opened(path, *arguments, **options)

  monkeypatch.setattr(os, "scandir", scan)
  monkeypatch.setattr(Path, "open", open_)


@pytest.mark.parametrize("closed", ["sub", "sub/c.txt"])
def test_a_sync_deletes_nothing_of_what_it_cannot_read(tmp_path, folder, monkeypatch, closed):
  build(folder, tmp_path / "kb")
  (folder / "a.txt").unlink()
  (folder / "new.txt").write_text("badger")
  with monkeypatch.context() as patch:
    refuse(patch, folder / closed)
    with pytest.raises(OSError, match=f"{closed} cannot be read: Permission denied"):
      build(folder, tmp_path / "kb", sync=True)
    assert ids(tmp_path / "kb") == {"a.txt", "b.txt", "sub/c.txt"}
    report = build(folder, tmp_path / "kb", sync=True, skip_bad=True)
  assert report["bad"] == 1
  assert f"{closed} cannot be read" in report["problems"][0]
  assert ids(tmp_path / "kb") == {"new.txt", "b.txt", "sub/c.txt"}
  assert load(tmp_path / "kb").build["files"].keys() == {"new.txt", "b.txt", "sub/c.txt"}
  (folder / "sub" / "c.txt").unlink()
  build(folder, tmp_path / "kb", sync=True)
  assert ids(tmp_path / "kb") == {"new.txt", "b.txt"}


def test_a_build_over_a_closed_folder_ends_before_it_makes_anything(tmp_path, folder, monkeypatch):
  refuse(monkeypatch, folder / "sub")
  with pytest.raises(OSError, match="sub cannot be read"):
    build(folder, tmp_path / "kb")
  assert not (tmp_path / "kb").exists()
  assert build(folder, tmp_path / "kb", skip_bad=True)["documents"] == 2


def test_empty_and_foreign_files_of_a_folder_do_not_end_its_build(tmp_path, folder, capsys):
  (folder / "empty.txt").write_text("")
  (folder / "latin.txt").write_bytes("café".encode("latin-1"))
  (folder / "binary.md").write_bytes(b"\0\1")
  for name in ("x.pdf", "y.pdf", "z.docx"):
    (folder / name).write_text("other")
  (folder / "evil\n\x1b[31m.txt").write_text("")
  command = ["--documents", str(folder), "--output", str(tmp_path / "kb"), "--type", "simple", "--quiet"]
  assert main(command) == 0
  first, others, *bad = capsys.readouterr().out.splitlines()
  assert "documents 3, files 7, read 3, chunks 3, duplicates 0, bad 4, embedded 0" in first
  assert others.startswith("left out 3 that are no .jsonl, .txt, .md")
  assert others.endswith(".pdf 2, .docx 1")
  assert [line.split("/")[-1].split(": 'utf-8' codec")[0] for line in bad] == [
    "binary.md is no text: it has zero bytes, as binary files do",
    "empty.txt is empty; leave it out",
    r"evil\n\x1b[31m.txt is empty; leave it out",
    "latin.txt, line 1",
  ]
  assert load(tmp_path / "kb").build["left_out"] == {".pdf": 2, ".docx": 1}
  assert main(["inspect", "--knowledge_base", str(tmp_path / "kb"), "--json"]) == 0
  described = json.loads(capsys.readouterr().out)
  assert described["build"]["left_out"] == {".pdf": 2, ".docx": 1}
  assert described["build"]["counts"]["bad"] == 4


def test_a_bad_file_that_was_named_ends_the_build(tmp_path):
  (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
  with pytest.raises(ValueError, match=r"latin\.txt, line 1: .*save the file as UTF-8"):
    build(tmp_path / "latin.txt", tmp_path / "kb")


def test_a_bad_line_of_a_file_in_a_folder_ends_the_build(tmp_path, folder):
  (folder / "d.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n')
  with pytest.raises(ValueError, match=r"d\.jsonl, line 2: .*save the file as UTF-8"):
    build(folder, tmp_path / "kb")
  assert build(folder, tmp_path / "kb", skip_bad=True)["bad"] == 1


def test_a_file_that_became_another_encoding_keeps_its_document_an_emptied_one_does_not(tmp_path, folder):
  build(folder, tmp_path / "kb")
  (folder / "a.txt").write_bytes(b"z\xe9bre")
  (folder / "b.txt").write_text("")
  assert build(folder, tmp_path / "kb", sync=True)["bad"] == 2
  assert ids(tmp_path / "kb") == {"a.txt", "sub/c.txt"}
  assert load(tmp_path / "kb").get("a.txt").content == "zebra"


def test_a_build_that_fails_leaves_no_file(tmp_path, folder):
  (folder / "d.jsonl").write_text("no json\n")
  with pytest.raises(ValueError, match="line 1"):
    build(folder, tmp_path / "kb")
  assert not (tmp_path / "kb").exists()
  (tmp_path / "mine").mkdir()
  with pytest.raises(ValueError, match="line 1"):
    build(folder, tmp_path / "mine")
  assert list((tmp_path / "mine").iterdir()) == []

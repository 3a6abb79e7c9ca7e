"""A published folder: it replaces only a folder of its own kind, and leaves any other folder unchanged."""

import contextlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys

import pytest
from array_record.python import array_record_module

from selfrag_jax.retrieval.base import create, load
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.manager import RetrievalManager
from selfrag_jax.retrieval.simple import SimpleRetriever
from selfrag_jax.storage.generation import DamagedError, FolderError, PublishedFolder, sizes
from selfrag_jax.storage.manifest import file_digest


def made(*ids):
  retriever = SimpleRetriever()
  retriever.add_documents([Document(id, content=f"text {id}") for id in ids])
  return retriever


def ids(folder):
  return [document.id for document in load(folder).documents]


def test_another_knowledge_base_is_not_replaced(tmp_path):
  first = made("a")
  first.save(tmp_path / "kb")
  with pytest.raises(FileExistsError, match=r"kb holds another knowledge base; .* or replace it with overwrite=True"):
    made("b").save(tmp_path / "kb")
  manager = RetrievalManager("simple")
  with pytest.raises(FileExistsError, match="holds another knowledge base"):
    manager.save_knowledge_base(tmp_path / "kb")
  assert ids(tmp_path / "kb") == ["a"]
  first.add_documents([Document("c")])
  first.save(tmp_path / "kb")  # it was saved there
  opened = load(tmp_path / "sub" / ".." / "kb")
  opened.add_documents([Document("d")])
  opened.save(tmp_path / "kb")  # it was opened there, under another path
  assert ids(tmp_path / "kb") == ["a", "c", "d"]
  manager.save_knowledge_base(tmp_path / "kb", overwrite=True)
  assert ids(tmp_path / "kb") == []
  made("e").save(tmp_path / "kb", overwrite=True)
  assert ids(tmp_path / "kb") == ["e"]


def test_a_folder_that_was_made_anew_meanwhile_is_another_one(tmp_path):
  """Both are the first that was published in their folder; what tells them apart is what they hold."""
  made("a").save(tmp_path / "kb")
  opened = load(tmp_path / "kb")
  made("b").save(tmp_path / "other")
  (tmp_path / "kb").rename(tmp_path / "old")
  (tmp_path / "other").rename(tmp_path / "kb")
  with pytest.raises(FolderError, match="changed by another process"):
    opened.save(tmp_path / "kb")
  assert ids(tmp_path / "kb") == ["b"]


@pytest.mark.parametrize(
  "text",
  [
    "",
    "{",
    "[]",
    "null",
    "[" * 100_000,
    '{"format": 1, "generation": 1, "files": []}',
    '{"format": 1, "generation": 1, "files": {"x": 3}}',
    '{"format": 1, "generation": 1.5, "files": {}}',
    '{"format": 1, "generation": "../..", "files": {}}',
    "\xff",
  ],
)
def test_a_damaged_manifest_is_named_with_the_way_out(tmp_path, text):
  folder = tmp_path / "kb"
  made("a").save(folder)
  (folder / "manifest.json").write_bytes(text.encode("latin-1"))
  with pytest.raises(FolderError, match=r"manifest\.json is damaged \(.*build .* again"):
    load(folder)
  with pytest.raises(FileExistsError):
    made("b").save(folder)


def test_a_manifest_that_is_a_folder_is_named(tmp_path):
  made("a").save(tmp_path / "kb")
  (tmp_path / "kb" / "manifest.json").unlink()
  (tmp_path / "kb" / "manifest.json").mkdir()
  with pytest.raises(DamagedError, match=r"manifest\.json is damaged \(it is a folder\)"):
    load(tmp_path / "kb")


def test_a_knowledge_base_of_a_later_version_is_not_taken_for_damaged(tmp_path):
  retriever = made("a")
  retriever.save(tmp_path / "kb")
  manifest = json.loads((tmp_path / "kb" / "manifest.json").read_text())
  (tmp_path / "kb" / "manifest.json").write_text(json.dumps({**manifest, "format": 2}))
  with pytest.raises(FolderError, match="has format 2, this version reads 1"):
    retriever.save(tmp_path / "kb")
  assert json.loads((tmp_path / "kb" / "manifest.json").read_text())["format"] == 2


def test_a_link_to_a_file_elsewhere_is_not_followed(tmp_path):
  """Its hash fits, but whoever laid the link can change the file without the folder."""
  made("a").save(tmp_path / "kb")
  [documents] = (tmp_path / "kb" / "data-1").glob("documents-*")
  outside = shutil.move(documents, tmp_path / documents.name)
  documents.symlink_to(outside)
  with pytest.raises(DamagedError, match=rf"{documents.name} is a link to a file outside of"):
    load(tmp_path / "kb")


def test_a_save_that_fails_leaves_no_file_where_nothing_was(tmp_path):
  retriever = made("a")
  retriever.settings = {"x": object()}  # what no JSON can hold
  with pytest.raises(TypeError, match="not JSON"):
    retriever.save(tmp_path / "kb")
  assert not (tmp_path / "kb").exists()
  (tmp_path / "mine").mkdir()
  with pytest.raises(TypeError, match="not JSON"):
    retriever.save(tmp_path / "mine")
  assert list((tmp_path / "mine").iterdir()) == []


def test_where_no_folder_can_be_made_is_said_in_words(tmp_path, monkeypatch):
  (tmp_path / "file").write_text("mine")
  (tmp_path / "link").symlink_to(tmp_path / "nowhere")
  for name in ("file", "file/kb", "link", "link/kb"):
    with pytest.raises(NotADirectoryError, match=f"{name[:4]} is a file or a broken link; give another one"):
      made("a").save(tmp_path / name)
  monkeypatch.setattr(os, "access", lambda path, mode: False)
  with pytest.raises(PermissionError, match=rf"kb cannot be written: no permission to write into {tmp_path}"):
    made("a").save(tmp_path / "kb")
  assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_folder_with_a_manifest_of_somebody_else_stays_as_it_is(tmp_path):
  from selfrag_jax.memory.store import MemoryStore
  from selfrag_jax.retrieval.knowledge_base import prepare_knowledge_base

  (tmp_path / "a.txt").write_text("ships")
  with MemoryStore(4, path=str(tmp_path / "memory"), backend="numpy") as store:
    store.add("precious", [1.0, 0, 0, 0])
  (tmp_path / "foreign" / "data-2020").mkdir(parents=True)
  (tmp_path / "foreign" / "manifest.json").write_text('{"name": "an extension"}')
  (tmp_path / "foreign" / "data-2020" / "results.csv").write_text("precious")
  for name in ("memory", "foreign"):
    with pytest.raises(FolderError, match="is no knowledge base and holds other files"):
      prepare_knowledge_base(tmp_path / "a.txt", tmp_path / name, "bm25")
    with pytest.raises(FolderError, match="is no knowledge base and holds other files"):
      made("a").save(tmp_path / name, overwrite=True)
  with MemoryStore.load(str(tmp_path / "memory"), backend="numpy") as store:
    assert store.chunks == ["precious"]
  assert (tmp_path / "foreign" / "data-2020" / "results.csv").read_text() == "precious"


def test_a_folder_that_is_gone_is_made_again(tmp_path):
  retriever = made("a")
  retriever.save(tmp_path / "kb")
  shutil.rmtree(tmp_path / "kb")
  retriever.save(tmp_path / "kb")
  assert ids(tmp_path / "kb") == ["a"]


LETTERS = PublishedFolder("bundle of letters", re.compile(r"letter-[0-9]+"), beside=(".drafts",))


def write_letter(folder, text, known, **options):
  with LETTERS.publish(folder, known, **options) as files:
    (files / "letter-1").write_text(text)


def test_a_folder_of_another_kind_is_published_in_its_own_words(tmp_path):
  folder, known = tmp_path / "letters", {}
  with pytest.raises(FileNotFoundError, match="it is no bundle of letters, or building it has not ended"):
    LETTERS.verified(folder)
  (folder / ".drafts").mkdir(parents=True)  # as one that was begun has them
  write_letter(folder, "first", known)
  write_letter(folder, "second", known)
  assert (LETTERS.verified(folder) / "letter-1").read_text() == "second"
  assert sizes(folder) == {"letter-1": 6}
  assert sorted(path.name for path in folder.iterdir()) == [".drafts", ".lock", "data-2", "manifest.json"]
  with pytest.raises(FileExistsError, match="holds another bundle of letters; give another folder"):
    write_letter(folder, "third", {})
  (folder / "data-2" / "letter-1").write_text("SECOND")
  with pytest.raises(DamagedError, match=r"letter-1 is not what was written: its hash differs; build .*letters again"):
    LETTERS.verified(folder)


def test_what_is_ours_is_told_by_the_kind(tmp_path):
  made("a").save(tmp_path / "kb")
  with pytest.raises(FolderError, match="kb is no bundle of letters and holds other files, such as data-1"):
    write_letter(tmp_path / "kb", "mine", {}, overwrite=True)
  write_letter(tmp_path / "letters", "mine", {})
  with pytest.raises(FolderError, match="letters is no knowledge base and holds other files, such as data-1"):
    made("a").save(tmp_path / "letters", overwrite=True)
  (tmp_path / "kb" / ".drafts").mkdir()
  assert ids(tmp_path / "kb") == ["a"]


KILLED = """
import os, re, signal, sys
from selfrag_jax.storage import manifest
from selfrag_jax.storage.generation import PublishedFolder
manifest.write_json = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
letters = PublishedFolder("bundle of letters", re.compile("letter-[0-9]+"))
with letters.publish(sys.argv[1], {}, overwrite=True) as files:
  (files / "letter-1").write_text("never published")
"""


@pytest.mark.parametrize("published", [False, True])
def test_killed_between_its_files_and_its_manifest_it_is_as_it_was(tmp_path, published):
  folder, known = tmp_path / "letters", {}
  if published:
    write_letter(folder, "first", known)
  assert subprocess.run([sys.executable, "-c", KILLED, str(folder)]).returncode == -9
  assert (folder / f"data-{1 + published}" / "letter-1").read_text() == "never published"
  if published:
    assert (LETTERS.verified(folder) / "letter-1").read_text() == "first"
  else:
    with pytest.raises(FileNotFoundError):
      LETTERS.verified(folder)
  write_letter(folder, "next", known)  # the lock is free, and what was left is taken away
  assert (LETTERS.verified(folder) / "letter-1").read_text() == "next"
  assert sorted(path.name for path in folder.iterdir()) == [".lock", f"data-{2 + published}", "manifest.json"]


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("deleted", range(7))
def test_an_old_generation_whose_deletion_was_cut_short_is_deleted_by_the_next(
  tmp_path, monkeypatch, deleted, published
):
  """Those of the last generation, and those of one that fails."""
  real, left = os.unlink, iter(range(deleted))

  def unlink(path, **options):
    is_page = os.path.basename(path)[:4] in ("page", "lett")
    if is_page and next(left, None) is None:
      raise KeyboardInterrupt
    real(path, **options)

  def write(known, fails=False):
    with LETTERS.publish(tmp_path, known) as files:
      for name in ("page-1", "page-2", "letter-1", "page-3", "page-4", "part/page"):
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).write_text(name)
      if fails:
        raise ValueError

  known = {}
  write(known)
  with monkeypatch.context() as patch:
    patch.setattr(os, "unlink", unlink)
    with contextlib.suppress(KeyboardInterrupt, ValueError):
      write(known, fails=not published)
  write(known)
  assert len(list(tmp_path.glob("data-*"))) == 1


@pytest.mark.parametrize(
  ("kind", "name", "content"),
  [
    ("bm25", "words.json", b"[" * 100_000),
    ("bm25", "words.json", b"[]"),
    ("bm25", "words.json", b"{}"),
    ("bm25", "words.json", b'{"stems": 1, "words": 2}'),
    ("bm25", "bm25.npz", b""),
    ("bm25", "documents-00000.array_record", b"riegeli?" * 9999),
    ("bm25", "documents-00000.array_record", b""),
    ("bm25", "documents-00000.array_record", [b"[" * 100_000]),
    ("bm25", "documents-00000.array_record", [b"5"]),
    ("dense", "embeddings-00000.npy", b""),
    ("dense", "embeddings-00000.npy", pickle.dumps(["x"])),
    ("dense", "embeddings-00000.npy", b"\x93NUMPY\x01\x00"),
  ],
)
def test_files_that_no_save_has_written_are_named_though_their_hashes_fit(tmp_path, kind, name, content):
  made = create(kind, **({"model_name": "token-bag", "backend": "numpy"} if kind == "dense" else {}))
  made.add_documents([Document("a", content="zebra"), Document("b", content="otter")])
  made.save(tmp_path / "kb")
  file = tmp_path / "kb" / "data-1" / name
  if isinstance(content, list):
    writer = array_record_module.ArrayRecordWriter(str(file), "group_size:1")
    for record in content:
      writer.write(record)
    writer.close()
  else:
    file.write_bytes(content)
  manifest = json.loads((tmp_path / "kb" / "manifest.json").read_text())
  manifest["files"][name] = file_digest(file)
  (tmp_path / "kb" / "manifest.json").write_text(json.dumps(manifest))
  with pytest.raises(DamagedError, match=r"data-1 holds what no save writes \(.*build .*kb again"):
    load(tmp_path / "kb")

"""Folders without a store, damaged or hostile stores, and sizes that do not fit: each gives a readable error."""

import contextlib
import json
import os
import subprocess
import sys
import zlib

import numpy as np
import pytest

from selfrag_jax.memory import journal, records, table
from selfrag_jax.memory.journal import StoreError
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.storage.manifest import contents_hash, file_digest

D = 4


def nothing(path):
  pass


def empty(path):
  path.mkdir()


def notes(path):
  path.mkdir()
  (path / "notes.txt").write_text("mine")


def a_file(path):
  path.write_text("mine")


def a_folder_called_manifest(path):
  (path / "manifest.json").mkdir(parents=True)


def manifest(content):
  def make(path):
    path.mkdir()
    (path / "manifest.json").write_bytes(content)

  return make


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
  ("make", "message"),
  [
    (nothing, "manifest.json is missing: the folder holds no store"),
    (empty, "manifest.json is missing: the folder holds no store"),
    (notes, "manifest.json is missing: the folder holds no store"),
    (a_file, "is a file or lies below one; a store is a folder"),
    (a_folder_called_manifest, "manifest.json is damaged, or not of a store; restore the folder from a copy"),
    *(
      (manifest(content), "manifest.json is damaged, or not of a store; restore the folder from a copy")
      for content in (b"", b"[1]", b'"text"', b"3", b"{}", b'{"check": 1, "format": 1}', os.urandom(999), b"[" * 10**5)
    ),
  ],
)
def test_what_is_no_store_is_said_and_left_as_it_was(tmp_path, make, message, read_only):
  make(tmp_path / "folder")
  before = sorted(tmp_path.rglob("*"))
  with pytest.raises(StoreError, match=message):
    MemoryStore.load(str(tmp_path / "folder"), backend="numpy", read_only=read_only)
  if "damaged" in message:
    with pytest.raises(StoreError, match=message):
      MemoryStore(D, path=str(tmp_path / "folder"), backend="numpy")
  assert sorted(tmp_path.rglob("*")) == before  # no .lock, no folder


@pytest.mark.parametrize("below", ["", "/below"])
def test_no_store_is_made_in_a_file(tmp_path, below):
  a_file(tmp_path / "file")
  with pytest.raises(StoreError, match="is a file or lies below one; give a folder"):
    MemoryStore(D, path=f"{tmp_path}/file{below}")
  with pytest.raises(ValueError, match="the path of the store is empty"):
    MemoryStore(D, path="")
  with pytest.raises(ValueError, match="the path of the store is empty"):
    MemoryStore.load("")


def made(path):
  with MemoryStore(D, 10, chunk_size=2, path=str(path), backend="numpy") as store:
    store.add_many(["a", "b"], np.eye(D)[:2], token_ids=[[1], [2, 3]])
    store.save()
    store.add("c", np.eye(D)[2])
  return path


@pytest.mark.parametrize("name", ["arrays-2.npz", "records-2.jsonl"])
@pytest.mark.parametrize("content", [b"", b"{", b"\x00\xff" * 500])
def test_a_file_that_was_changed_is_named(tmp_path, name, content):
  (made(tmp_path) / name).write_bytes(content)
  with pytest.raises(StoreError, match=f"{name} is damaged"):
    MemoryStore.load(str(tmp_path), backend="numpy")


@pytest.mark.parametrize("read_only", [False, True])
def test_a_log_that_is_a_folder_is_named(tmp_path, read_only):
  (made(tmp_path) / "log-2.bin").unlink()
  (tmp_path / "log-2.bin").mkdir()
  with pytest.raises(StoreError, match=r"log-2\.bin is a link or a folder"):
    MemoryStore.load(str(tmp_path), backend="numpy", read_only=read_only)


def forge(path, change):
  """Change the manifest, or what it vouches for, and make every hash fit."""
  told = json.loads((path / "manifest.json").read_text())
  told.pop("check")
  change(path, told)
  for name in told.get("files", ()) if isinstance(told.get("files"), dict) else ():
    told["files"][name] = file_digest(path / name)
  (path / "manifest.json").write_text(json.dumps({**told, "check": contents_hash(told)}))


def arrays(**changes):
  def change(path, _):
    with np.load(path / "arrays-2.npz") as loaded:
      values = {name: loaded[name] for name in loaded.files}
    np.savez(path / "arrays-2.npz", **{**values, **changes})

  return change


def write(name, content):
  return lambda path, _: (path / name).write_bytes(content)


def frame(header, body=b""):
  lengths = len(header), len(body), zlib.crc32(body, zlib.crc32(header))
  return journal._FRAME.pack(*lengths, zlib.crc32(journal._LENGTHS.pack(*lengths))) + header + body


def records_of(*changes):
  lines = [{"text": "t", "key": None, "count": 1, "metadata": {"position": 0}, **change} for change in changes]
  return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def add_to_log(path, change):
  """Log one more chunk, in a frame that is whole."""
  added = {"remove": [], "add": [json.loads(records_of(change))], "count": {}, "added": 4}
  rows = {"embeddings": np.ones((1, D), np.float32), "tokens": np.zeros((1, 2), np.int32)}
  with open(path / "log-2.bin", "ab") as log:
    log.write(journal._frame(table.Change(added, {**rows, "lengths": np.zeros(1, np.int32)})))


@pytest.mark.parametrize(
  "change",
  [
    lambda _, told: told.update(generation="2"),
    lambda _, told: told.update(generation=None),
    lambda _, told: told.update(format="1"),
    lambda _, told: told.pop("generation"),
    lambda _, told: told.pop("settings"),
    lambda _, told: told.pop("files"),
    lambda _, told: told.update(files=[1]),
    lambda _, told: told.update(settings=[1]),
    lambda _, told: told["settings"].pop("added"),
    lambda _, told: told["settings"].pop("d_model"),
    lambda _, told: told["settings"].update(chunk_size=3),
    arrays(slots=np.array([0, 99], np.int32)),
    arrays(slots=np.array([0, -1], np.int32)),
    arrays(lengths=np.array([9, 1], np.int32)),
    arrays(lengths=np.array([-1, 1], np.int32)),
    arrays(tokens=np.full((2, 2), 2**40)),
    arrays(embeddings=np.ones((2, D), complex)),
    arrays(embeddings=np.ones((2, D + 1), np.float32)),
    arrays(embeddings=np.array([[{}] * D] * 2)),
    write("arrays-2.npz", b"no archive"),
    write("records-2.jsonl", b'{"id": "0"}\n'),
    write("records-2.jsonl", b"[1]\n[2]\n"),
    write("records-2.jsonl", b"\xff\n"),
    write("records-2.jsonl", b"[" * 10**5),
    write("records-2.jsonl", records_of({"id": "0"}, {"id": "0"})),
    write("records-2.jsonl", records_of({"id": "0", "key": "k"}, {"id": "1", "key": "k"})),
    write("records-2.jsonl", records_of({"id": "0"}, {"id": 1})),
    write("records-2.jsonl", records_of({"id": "0"}, {"id": "1", "text": None})),
    write("records-2.jsonl", records_of({"id": "0"}, {"id": "1", "metadata": []})),
    write("records-2.jsonl", records_of({"id": "0"}, {"id": "1", "more": 1})),
    arrays(slots=np.array([0, 0], np.int32)),
    lambda _, told: told["settings"].update(added="2"),
    lambda path, _: add_to_log(path, {"id": "0"}),  # as in the snapshot
    lambda path, _: add_to_log(path, {"id": "2"}),  # as in the log
    lambda path, _: add_to_log(path, {"id": "3", "count": None}),
    write("log-2.bin", frame(b"no JSON")),
    write("log-2.bin", frame(b"[" * 10**5)),
    write("log-2.bin", frame(b"[]")),
    write("log-2.bin", frame(b'{"remove": ["nobody"], "add": [], "count": {}, "added": 3}')),
    write("log-2.bin", frame(b'{"remove": [], "add": [1], "count": {}, "added": 3}', b"no archive")),
  ],
)
def test_a_store_that_somebody_else_has_written_is_refused_in_words(tmp_path, change):
  forge(made(tmp_path), change)
  with pytest.raises(StoreError, match=r"damaged|holds what no store writes|is missing"):
    MemoryStore.load(str(tmp_path), backend="numpy")
  forge_again = sorted(path.name for path in tmp_path.iterdir())
  with pytest.raises(StoreError):
    MemoryStore.load(str(tmp_path), backend="numpy", read_only=True)
  assert sorted(path.name for path in tmp_path.iterdir()) == forge_again


def test_metadata_that_an_older_version_took_too_deep_can_be_read(tmp_path, monkeypatch):
  deep = 1
  for _ in range(480):
    deep = {"a": deep}
  with monkeypatch.context() as patch:
    patch.setattr(records, "DEEPEST", 10**6)
    with MemoryStore(D, path=str(tmp_path), backend="numpy") as store:
      store._journal.append(
        table.Change(
          {"remove": [], "add": [record(deep)], "count": {}, "added": 1},
          {"embeddings": np.ones((1, D), np.float32), "tokens": np.zeros((1, 64), np.int32),
           "lengths": np.zeros(1, np.int32)},
        )
      )  # fmt: skip
  with MemoryStore.load(str(tmp_path), backend="numpy") as store:
    assert store.search(np.ones(D), 1)[0].metadata["deep"] == deep
    store.save()
  with MemoryStore.load(str(tmp_path), backend="numpy") as store:
    assert store.get("0").metadata["deep"] == deep


def record(deep):
  metadata = {"position": 0, "timestamp": 1.0, "source": "", "deep": deep}
  return {"id": "0", "text": "t", "key": None, "count": 1, "metadata": metadata}


@pytest.mark.parametrize("name", [".lock", ".manifest.json.tmp", "log-1.bin"])
def test_a_link_in_a_folder_leads_to_no_other_file(tmp_path, name):
  mine = tmp_path / "mine.txt"
  mine.write_text("short")
  with MemoryStore(D, path=str(tmp_path / "store"), backend="numpy"):
    pass
  (tmp_path / "store" / name).unlink(missing_ok=True)
  (tmp_path / "store" / name).symlink_to(mine)
  refused = contextlib.nullcontext() if "tmp" in name else pytest.raises((OSError, StoreError), match=name)
  with refused, MemoryStore.load(str(tmp_path / "store"), backend="numpy") as store:
    store.add("text", np.ones(D))
    store.save()
  assert mine.read_text() == "short"


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    ({"max_chunks": 10**12}, "max_chunks = 1000000000000 must be a whole number from 1 to 2147483647"),
    ({"max_chunks": 10**30}, "max_chunks = 10+ must be a whole number"),
    ({"max_chunks": 0}, "max_chunks = 0 must be"),
    ({"max_chunks": -1}, "max_chunks = -1 must be"),
    ({"max_chunks": 2.5}, "max_chunks = 2.5 must be"),
    ({"max_chunks": True}, "max_chunks = True must be"),
    ({"max_chunks": "10"}, "max_chunks = '10' must be"),
    ({"max_chunks": None}, "max_chunks = None must be"),
    ({"max_chunks": float("nan")}, "max_chunks = nan must be"),
    ({"d_model": 10**9}, "d_model = 1000000000 and chunk_size = 64 take 37,25[0-9] GiB, more than there is"),
    ({"d_model": 2**31 - 1, "max_chunks": 2**31 - 1}, "GiB, more than there is; make the store smaller"),
    ({"d_model": 0}, "d_model = 0 must be"),
    ({"chunk_size": -1}, "chunk_size = -1 must be a whole number from 0"),
    ({"chunk_size": 1.0}, "chunk_size = 1.0 must be"),
    ({"min_score": float("nan")}, "min_score = nan; give a number"),
    ({"min_score": "0.5"}, "min_score = '0.5'; give a number"),
    ({"dedupe_threshold": float("nan")}, "dedupe_threshold = nan; give a number"),
  ],
)
def test_sizes_and_thresholds_that_fit_nowhere_are_refused_before_there_is_a_folder(tmp_path, sizes, message):
  with pytest.raises(ValueError, match=message):
    MemoryStore(**{"d_model": D, "backend": "numpy", "path": str(tmp_path / "store"), **sizes})
  assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["max_chunks", "d_model", "chunk_size", "metric"])
def test_what_a_folder_holds_is_not_chosen_when_it_is_opened(tmp_path, name):
  before = sorted(made(tmp_path).iterdir())
  with pytest.raises(ValueError, match=rf"{name} is not chosen when a store is opened: .* can be chosen are backend, "):
    MemoryStore.load(str(tmp_path), backend="numpy", **{name: 5})
  assert sorted(tmp_path.iterdir()) == before
  MemoryStore.load(str(tmp_path), backend="numpy").close()


@pytest.mark.parametrize("k", [0, -1, 2.5, True, "3", None, float("nan")])
def test_k_is_a_whole_number_from_1_on(k):
  store = MemoryStore(D, backend="numpy")
  for n in range(2):  # an empty one too
    with pytest.raises(ValueError, match=rf"k = {k!r} must be at least 1, and a whole number"):
      store.search(np.ones(D), k)
    if not n:
      store.add("text", np.ones(D))


@pytest.mark.parametrize("query", [None, 3, [1j] * D, ["a"] * D, [None] * D, [1e30] * D, {"a": 1}])
def test_a_query_that_is_no_embedding_is_refused(query):
  store = MemoryStore(D, backend="numpy")
  store.add("text", np.ones(D))
  with pytest.raises(ValueError, match="embedding"):
    store.search(query)
  with pytest.raises(ValueError, match="embedding"):
    store.search_batched(query)
  with pytest.raises(ValueError, match="min_score = nan"):
    store.search(np.ones(D), min_score=float("nan"))


@pytest.mark.parametrize("name", ["records-1.jsonl", "arrays-1.npz", "log-1.bin"])
def test_a_file_of_somebody_else_that_has_the_name_of_ours_stays(name, tmp_path):
  (tmp_path / name).write_bytes(b"precious")
  with pytest.raises(StoreError, match="belongs to a store whose manifest"):
    MemoryStore(4, path=str(tmp_path), backend="numpy")
  assert (tmp_path / name).read_bytes() == b"precious"


def test_a_store_that_is_not_closed_ends_with_its_process_without_a_word(tmp_path):
  program = (
    "import numpy as np\nfrom selfrag_jax.memory.store import MemoryStore\n"
    f"store = MemoryStore(4, path={str(tmp_path / 'store')!r}, backend='numpy')\nstore.add('x', np.ones(4))\n"
  )
  ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
  assert ended.stderr == ""

"""A store's folder: reopened, killed, damaged, full, shared."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from selfrag_jax.memory import journal
from selfrag_jax.memory.journal import StoreError
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.storage.atomic import write_json
from selfrag_jax.storage.lock import FolderInUseError
from selfrag_jax.storage.manifest import contents_hash

D = 4


def vectors(n, seed=0):
  return np.random.default_rng(seed).standard_normal((n, D)).astype(np.float32)


def make(path, **options):
  """A store whose snapshot and log both hold something: adds, an update, deletions, an eviction, a key."""
  store = MemoryStore(D, 10, chunk_size=3, path=str(path), backend="numpy", **options)
  store.add_many([f"é {i}\u2028" for i in range(8)], vectors(8), token_ids=[[i] * (i % 4) for i in range(8)])
  store.delete("2")
  store.save()
  store.add_many(["a", "b", "c", "d"], vectors(4, 1), keys=["x", None, "x", None], metadata=[{"n": [1, None]}] * 4)
  store.update("5", metadata={"source": "s"})
  return store


def assert_same(store, other):
  """The same chunks, in the same slots, with the same scores, now and after the same change."""
  for name in ("ids", "chunks", "metadata"):
    assert getattr(store, name) == getattr(other, name)
  np.testing.assert_array_equal(store.embeddings, other.embeddings)
  for mine, theirs in zip(store.token_ids, other.token_ids, strict=True):
    np.testing.assert_array_equal(mine, theirs)
  assert store._table.slots == other._table.slots
  results = [[(c.id, c.score, c.count) for c in s.search(np.ones(D), 9)] for s in (store, other)]
  assert results[0] == results[1]


def test_a_new_process_finds_the_same(tmp_path):
  store = make(tmp_path)
  store.close()
  program = f"""
import numpy as np
from selfrag_jax.memory.store import MemoryStore
store = MemoryStore.load({str(tmp_path)!r}, backend="numpy")
print([(c.id, c.text, c.score, c.token_ids.tolist(), dict(c.metadata)) for c in store.search(np.ones({D}), 9)])
"""
  printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
  found = [(c.id, c.text, c.score, c.token_ids.tolist(), dict(c.metadata)) for c in store.search(np.ones(D), 9)]
  assert eval(printed) == found  # our own process wrote it
  with MemoryStore.load(str(tmp_path), backend="numpy") as again:
    assert_same(store, again)
    again.add_many(["more", "and more"], vectors(2, 9), ids=["m1", "m2"], metadata=[{"timestamp": 1}] * 2)
  with MemoryStore.load(str(tmp_path), backend="numpy") as third:
    assert_same(again, third)


def test_a_copy_goes_to_another_folder(tmp_path):
  with make(tmp_path / "one") as store:
    for _ in range(2):  # over an earlier copy too
      store.save(str(tmp_path / "two"))
    store.add("after the copy", vectors(1)[0])
    with MemoryStore.load(str(tmp_path / "two"), backend="numpy") as copy:
      assert copy.size == store.size  # full: an old chunk went
      assert "after the copy" not in copy.chunks
  assert sorted(p.name for p in (tmp_path / "two").iterdir()) == [
    ".lock",
    "arrays-2.npz",
    "log-2.bin",
    "manifest.json",
    "records-2.jsonl",
  ]


def test_a_store_is_saved_over_another_one_only_if_asked(tmp_path):
  with make(tmp_path / "other") as other:
    kept = other.chunks
  with MemoryStore(D, path=str(tmp_path / "own"), backend="numpy") as store:
    store.add("mine", vectors(1)[0])
    before = {path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()}
    with pytest.raises(StoreError, match=r"other holds another store; give another folder, or overwrite=True"):
      store.save(str(tmp_path / "other"))
    del before[".lock"]
    assert before.items() <= {path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()}.items()
    with MemoryStore.load(str(tmp_path / "other"), backend="numpy") as other:
      assert other.chunks == kept
    store.save(str(tmp_path / "other"), overwrite=True)
    with MemoryStore.load(str(tmp_path / "other"), backend="numpy") as copy:
      assert copy.chunks == ["mine"]


@pytest.mark.parametrize("change", ["add", "save"])
def test_a_copy_that_has_gone_its_own_way_is_another_store(tmp_path, change):
  store = MemoryStore(D, backend="numpy")
  store.add("one", vectors(1)[0])
  store.save(str(tmp_path))
  with MemoryStore.load(str(tmp_path), backend="numpy") as copy:
    copy.add("of the copy alone", vectors(1)[0])
    if change == "save":
      copy.save()
  with pytest.raises(StoreError, match="holds another store"):
    store.save(str(tmp_path))
  with MemoryStore.load(str(tmp_path), backend="numpy") as copy:
    assert copy.chunks == ["one", "of the copy alone"]


def test_a_log_cut_anywhere_opens_with_every_whole_change(tmp_path):
  store = MemoryStore(D, path=str(tmp_path), backend="numpy")
  log, ends = tmp_path / "log-1.bin", [0]
  for i in range(3):
    store.add(str(i), vectors(3)[i])
    ends.append(log.stat().st_size)
  store.close()
  whole = log.read_bytes()
  edges = {cut for end in ends for cut in range(end - 2, end + 24) if 0 <= cut <= len(whole)}
  for cut in sorted(edges | set(range(0, len(whole), 97))):
    log.write_bytes(whole[:cut])
    with MemoryStore.load(str(tmp_path), backend="numpy") as opened:
      survived = sum(cut >= end for end in ends[1:])
      assert opened.chunks == ["0", "1", "2"][:survived]
    assert log.stat().st_size == ends[survived]
  log.write_bytes(whole[: ends[2] + 7])
  with MemoryStore.load(str(tmp_path), backend="numpy") as opened:
    opened.add("new", vectors(1)[0])
  with MemoryStore.load(str(tmp_path), backend="numpy") as opened:
    assert opened.chunks == ["0", "1", "new"]


def test_every_flipped_byte_is_an_error_that_names_the_file(tmp_path):
  make(tmp_path).close()
  for path in sorted(tmp_path.iterdir()):
    if path.name == ".lock":
      continue
    data = path.read_bytes()
    positions = range(len(data)) if len(data) < 2000 else random.Random(0).sample(range(len(data)), 300)
    for i in positions:
      path.write_bytes(data[:i] + bytes([data[i] ^ 0x55]) + data[i + 1 :])
      with pytest.raises(StoreError, match=path.name):
        MemoryStore.load(str(tmp_path), backend="numpy")
    path.write_bytes(data)
  MemoryStore.load(str(tmp_path), backend="numpy").close()


@pytest.mark.parametrize("name", ["arrays-2.npz", "records-2.jsonl", "log-2.bin", "manifest.json"])
def test_a_missing_file_is_named(tmp_path, name):
  make(tmp_path).close()
  (tmp_path / name).unlink()
  for read_only in (False, True):
    with pytest.raises(StoreError, match=rf"{name} is missing"):
      MemoryStore.load(str(tmp_path), backend="numpy", read_only=read_only)


def test_a_newer_store_is_refused(tmp_path):
  make(tmp_path).close()
  manifest = json.loads((tmp_path / "manifest.json").read_text())
  newer = {**{name: value for name, value in manifest.items() if name != "check"}, "format": 7}
  (tmp_path / "manifest.json").write_text(json.dumps({**newer, "check": contents_hash(newer)}))
  with pytest.raises(StoreError, match=r"manifest.json has format 7, this version reads up to 1; update selfrag_jax"):
    MemoryStore.load(str(tmp_path), backend="numpy")


def test_a_folder_that_holds_a_store_is_not_started_anew(tmp_path):
  make(tmp_path).close()
  with pytest.raises(StoreError, match=r"already holds a store; open it with MemoryStore.load"):
    MemoryStore(D, path=str(tmp_path))
  with pytest.raises(StoreError, match="holds no store"):
    MemoryStore.load(str(tmp_path / "empty"))
  with pytest.raises(ValueError, match="object storage"):
    MemoryStore(D, path="gs://bucket/store")


def test_one_writer_at_a_time_and_readers_beside_it(tmp_path):
  store = make(tmp_path)
  program = f"""
from selfrag_jax.memory.store import MemoryStore
MemoryStore.load({str(tmp_path)!r}, backend="numpy")
"""
  second = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
  assert f"is in use by pid {os.getpid()} on" in second.stderr
  with pytest.raises(FolderInUseError, match="read_only=True"):
    MemoryStore.load(str(tmp_path), backend="numpy")
  with MemoryStore.load(str(tmp_path), backend="numpy", read_only=True) as reader:
    assert_same(store, reader)
    with pytest.raises(StoreError, match="nothing was changed"):
      reader.add("x", vectors(1)[0])
    assert_same(store, reader)
  log = tmp_path / "log-2.bin"
  log.write_bytes(log.read_bytes() + b"half a fra")  # the writer is at it
  with MemoryStore.load(str(tmp_path), backend="numpy", read_only=True) as reader:
    assert_same(store, reader)
  store.close()
  with pytest.raises(StoreError, match="nothing was changed"):
    store.add("x", vectors(1)[0])


def test_a_reader_follows_a_snapshot_that_is_published_while_it_reads(tmp_path, monkeypatch):
  store = make(tmp_path)
  real = journal.Journal._snapshot

  def slow(self, manifest):
    monkeypatch.undo()
    store.save()
    return real(self, manifest)

  monkeypatch.setattr(journal.Journal, "_snapshot", slow)
  with MemoryStore.load(str(tmp_path), backend="numpy", read_only=True) as reader:
    assert_same(store, reader)


@pytest.mark.parametrize("change", ["add", "save"])
def test_a_full_disk_loses_nothing(tmp_path, change):
  store = make(tmp_path)
  log = tmp_path / "log-2.bin"
  before, room = log.read_bytes(), {"add": log.stat().st_size + 100, "save": 300}[change]
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    with pytest.raises(OSError, match="File too large"):
      store.add("x" * 500, vectors(1)[0]) if change == "add" else store.save()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, ignored)
  assert log.read_bytes() == before
  with MemoryStore.load(str(tmp_path), backend="numpy", read_only=True) as reader:
    assert_same(store, reader)
  store.add("there is room again", vectors(1)[0], metadata={"timestamp": 1})
  store.close()
  with MemoryStore.load(str(tmp_path), backend="numpy") as opened:
    assert_same(store, opened)
    assert "there is room again" in opened.chunks


@pytest.mark.parametrize("opened", ["closed", "read_only"])
def test_who_does_not_hold_the_folder_cannot_save(tmp_path, opened):
  store = make(tmp_path)
  other = store if opened == "closed" else MemoryStore.load(str(tmp_path), backend="numpy", read_only=True)
  if opened == "closed":
    store.close()
  else:
    store.add("the reader has not seen this", vectors(1)[0])
  before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
  with pytest.raises(StoreError, match="closed or open for reading only"):
    other.save()
  with pytest.raises(StoreError, match="closed or open for reading only"):
    other.save(str(tmp_path))
  assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_saving_to_the_own_folder_is_saving(tmp_path):
  with make(tmp_path) as store:
    store.save(f"{tmp_path}/../{tmp_path.name}")
    store.add("later", vectors(1)[0], metadata={"timestamp": 1})
  assert (tmp_path / "manifest.json").exists()
  with MemoryStore.load(str(tmp_path), backend="numpy") as opened:
    assert_same(store, opened)


def test_files_of_others_stay(tmp_path):
  others = ["records-train.jsonl", "log-run.bin", ".notes.tmp", "arrays-1.npy", "log.bin"]
  for name in others:
    (tmp_path / name).write_text("mine")
  make(tmp_path).close()
  assert all((tmp_path / name).read_text() == "mine" for name in others)
  (tmp_path / "manifest.json").unlink()  # what is left of a store is not overwritten by a new one
  with pytest.raises(StoreError, match=r"-2\.\w+ belongs to a store whose manifest.json is missing"):
    MemoryStore(D, path=str(tmp_path))


@pytest.mark.parametrize("renamed", [False, True])
def test_a_save_that_fails_at_its_manifest_loses_nothing(tmp_path, monkeypatch, renamed):
  store = make(tmp_path)

  def fail(path, manifest):
    if renamed:
      write_json(path, manifest)
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr("selfrag_jax.storage.manifest.write_json", fail)
    with pytest.raises(KeyboardInterrupt):
      store.save()
  store.add("later", vectors(1)[0], metadata={"timestamp": 1})
  store.close()
  with MemoryStore.load(str(tmp_path), backend="numpy") as opened:
    assert_same(store, opened)


def test_an_interrupted_change_is_whole_in_the_log_and_ends_the_writing(tmp_path, monkeypatch):
  store = make(tmp_path)
  real, calls = store._table._put, []

  def interrupt(record, slot):
    calls.append(slot)
    if len(calls) == 2:
      raise KeyboardInterrupt
    real(record, slot)

  monkeypatch.setattr(store._table, "_put", interrupt)
  with pytest.raises(KeyboardInterrupt):
    store.add_many(["one", "two", "three"], vectors(3))
  for use in (lambda: store.add("four", vectors(1)[0]), lambda: store.search(vectors(1)[0]), lambda: len(store)):
    with pytest.raises(StoreError, match=r"a change of this store was cut short, .*: open .* again, which has all"):
      use()
  with MemoryStore.load(str(tmp_path), backend="numpy") as opened:
    assert opened.chunks[-3:] == ["one", "two", "three"]


def test_a_store_that_cannot_begin_gives_its_folder_back(tmp_path, monkeypatch):
  def full(*_):
    raise OSError(28, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(journal, "write_bytes_atomic", full)
    with pytest.raises(OSError, match="No space left"):
      MemoryStore(D, path=str(tmp_path))
  MemoryStore(D, path=str(tmp_path)).close()


WRITER = """
import sys
import numpy as np
from selfrag_jax.memory.store import MemoryStore
path, start = sys.argv[1], int(sys.argv[2])
store = MemoryStore.load(path, backend="numpy") if start else MemoryStore(4, 100_000, path=path, backend="numpy")
print("ready", flush=True)
for i in range(start, 10**9):
  store.add(f"text {i}", np.random.default_rng(i).standard_normal(4), id=f"c{i}")
  print(i, flush=True)
  if i % 7 == 0:
    store.save()
"""


def kill_once(path, start, adds, wait):
  """Run a writer, kill it `wait` seconds after some `adds`, and return the number of chunks that it acknowledged."""
  writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(start)], stdout=subprocess.PIPE, text=True)
  assert writer.stdout.readline() == "ready\n"
  lines = [writer.stdout.readline() for _ in range(adds)]
  time.sleep(wait)
  writer.kill()
  acknowledged = [*lines, *writer.stdout.read().splitlines()]
  writer.wait()
  return int(acknowledged[-1]) + 1 if acknowledged else start


def check_killed(path, rounds):
  rng, count = random.Random(0), 0
  for _ in range(rounds):
    acknowledged = kill_once(path, count, rng.randrange(20), rng.uniform(0, 0.02))
    with MemoryStore.load(str(path), backend="numpy") as store:
      count = store.size
      assert count in (acknowledged, acknowledged + 1)  # the last one may be there without its acknowledgement
      assert store.chunks == [f"text {i}" for i in range(count)]
      rows = np.stack([np.random.default_rng(i).standard_normal(4) for i in range(count)]).astype(np.float32)
      np.testing.assert_array_equal(store.embeddings, rows)
  assert count >= rounds


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path):
  check_killed(tmp_path / "store", rounds=5)


@pytest.mark.slow
def test_kill_9_fifty_times(tmp_path):
  check_killed(tmp_path / "store", rounds=50)

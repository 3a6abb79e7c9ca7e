"""The store of critiques on the disk: interrupted, killed, full, shared, damaged, and flat in memory use."""

import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

import selfrag_jax.textgrad as tg
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.storage.lock import FolderInUseError
from selfrag_jax.textgrad import gradient_store

ROLE = "system prompt"


def critique(i, text=None, **options):
  return tg.Critique(
    role=ROLE, text=text or f"remark{i} about{i}", sample=f"question{i} asks{i} this{i}", step=i, **options
  )


def tiny(texts):
  return np.array([[len(text), 1.0] for text in texts], np.float32)


def test_killed_before_its_manifest_it_begins_again(tmp_path):
  for made in ([], ["memory"], ["memory", "memory/writer.lock"]):
    folder = tmp_path / f"s{len(made)}"
    folder.mkdir()
    for name in made:
      (folder / name).touch() if name.endswith("lock") else (folder / name).mkdir()
    with tg.GradientStore(str(folder)) as store:
      ids = store.add([critique(1)])
    with tg.GradientStore(str(folder)) as store:
      assert store.read(ids[0]) == critique(1)
  for name, width in (("s", 2048), ("other", 512)):
    path = str(tmp_path / name / "memory")
    MemoryStore(width, 10, chunk_size=0, metric="dot", backend="numpy", path=path).close()
  for _ in range(2):  # nothing was written by the first attempt
    with pytest.raises(tg.GradientStoreError, match=r"other was begun with an encoder of width 256, this one has 1024"):
      tg.GradientStore(str(tmp_path / "other"))
  with tg.GradientStore(str(tmp_path / "s")) as store:  # the memory's is there, its own is not
    assert len(store) == 0


def test_a_compaction_that_is_stopped_loses_nothing(tmp_path, monkeypatch):
  path = str(tmp_path / "s")
  store = tg.GradientStore(path, max_records=50, dedupe_threshold=None)
  write = gradient_store.write_bytes_atomic

  def stopped(*arguments):
    write(*arguments)
    raise OSError("after the rename")

  monkeypatch.setattr(gradient_store, "write_bytes_atomic", stopped)

  def fill():
    for i in range(500):
      store.add([critique(i)])

  with pytest.raises(OSError, match="after the rename"):
    fill()
  with pytest.raises(ValueError, match="closed"):
    store.add([critique(500)])
  with tg.GradientStore(path, dedupe_threshold=None) as again:
    assert all(c.read() == critique(c.step) for c in again.recent(64, role=ROLE))


def test_the_log_of_uses_does_not_grow_for_ever(tmp_path):
  size = lambda: sum(file.stat().st_size for file in (tmp_path / "s" / "memory").rglob("*") if file.is_file())
  with tg.GradientStore(str(tmp_path / "s"), encoder=tiny, encoder_name="tiny") as store:
    ids = store.add([critique(1)])
    sizes = [size()]
    for _ in range(3000):
      store.note_use(ids, helped=True)
      sizes.append(size())
  assert max(sizes) < 1100 * (sizes[100] - sizes[0]) / 100
  with tg.GradientStore(str(tmp_path / "s"), encoder=tiny, encoder_name="tiny") as store:
    assert store.recent(1, role=ROLE)[0].uses == 3000


@pytest.mark.parametrize("on_disk", [True, False])
def test_texts_of_what_was_given_up_leave_the_file(tmp_path, on_disk):
  path = str(tmp_path / "s") if on_disk else None
  with tg.GradientStore(path, max_records=50, dedupe_threshold=None) as store:
    for i in range(500):
      store.add([critique(i)])
      assert store.read(store.recent(1, role=ROLE)[0].id) == critique(i)
      assert len(store._places) <= 2 * len(store) + 33
    kept = {c.id: c.read() for c in store.recent(64, role=ROLE)}
    assert all(found == critique(found.step) for found in kept.values())
  if path:
    assert len((tmp_path / "s" / "critiques.jsonl").read_text().splitlines()) <= 140
    with tg.GradientStore(path, dedupe_threshold=None) as store:
      assert {c.id: c.read() for c in store.recent(64, role=ROLE)} == kept
      assert store.add([critique(500)])[0] not in kept


def test_a_reader_keeps_what_it_opened_while_the_writer_compacts(tmp_path):
  path = str(tmp_path / "s")
  with tg.GradientStore(path, max_records=50, dedupe_threshold=None) as writer:
    ids = [writer.add([critique(i)])[0] for i in range(40)]
    with tg.GradientStore(path, read_only=True) as reader:
      for i in range(40, 500):
        writer.add([critique(i)])
      assert ids[0] not in writer._places
      assert [reader.read(id).step for id in ids] == list(range(40))


def test_a_damaged_file_of_texts_is_refused(tmp_path):
  path = tmp_path / "s"
  with tg.GradientStore(str(path)) as store:
    store.add([critique(i) for i in range(5)])
  file = path / "critiques.jsonl"
  file.write_bytes(file.read_bytes()[:-10])
  with pytest.raises(tg.GradientStoreError, match="lacks the texts of 1 critiques"):
    tg.GradientStore(str(path))
  file.write_bytes(b"something else\n")
  with pytest.raises(tg.GradientStoreError, match="something else"):
    tg.GradientStore(str(path))


@pytest.mark.parametrize(
  "body",
  [
    "[" * 100_000,
    '"text": 5, "role": "r"}',
    '"text": "a"}',
    '"text": "a", "role": "r", "odd": 1}',
    "}",
    '"text": "\xff',
  ],
)
def test_a_damaged_critique_is_an_error_in_words(tmp_path, body):
  path = tmp_path / "s"
  with tg.GradientStore(str(path)) as store:
    ids = store.add([critique(i) for i in range(2)])
  file = path / "critiques.jsonl"
  first, _ = file.read_bytes().splitlines(keepends=True)
  file.write_bytes(first + f'{{"id": "{ids[1]}", {body}\n'.encode("latin-1"))
  with tg.GradientStore(str(path)) as store:
    with pytest.raises(tg.GradientStoreError, match=rf"critiques\.jsonl was damaged: the line of critique {ids[1]}"):
      store.read(ids[1])
    assert store.read(ids[0]) == critique(0)


@pytest.mark.parametrize("line", ['{"id": "x"}', '{"id": "', '{"id": "\xff"}', "\x00" * 100])
def test_a_line_that_is_no_critique_is_an_error_in_words(tmp_path, line):
  path = tmp_path / "s"
  with tg.GradientStore(str(path)) as store:
    store.add([critique(1)])
  with open(path / "critiques.jsonl", "ab") as file:
    file.write(line.encode("latin-1") + b"\n")
  with pytest.raises(tg.GradientStoreError, match=r"critiques\.jsonl was damaged"):
    tg.GradientStore(str(path))


@pytest.mark.parametrize("text", ["", "[" * 100_000, "[]", '{"format": 3}', '{"format": 3, "encoder": "x"', b"\xff"])
def test_a_damaged_manifest_is_an_error_in_words(tmp_path, text):
  path = tmp_path / "s"
  tg.GradientStore(str(path)).close()
  (path / "gradient_store.json").write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(tg.GradientStoreError, match=r"gradient_store\.json was damaged"):
    tg.GradientStore(str(path))


def test_a_store_of_another_version_is_told_from_a_damaged_one(tmp_path):
  path = tmp_path / "s"
  tg.GradientStore(str(path)).close()
  (path / "gradient_store.json").write_text('{"format": 4, "encoders": []}')
  with pytest.raises(tg.GradientStoreError, match="s has format 4, this version reads 3"):
    tg.GradientStore(str(path))


def test_half_a_surrogate_pair_in_a_critique_is_kept_as_a_question_mark(tmp_path):
  with tg.GradientStore(str(tmp_path / "s")) as store:
    (id,) = store.add([tg.Critique(role=ROLE, text="a \ud800 b")])
    assert store.read(id).text == "a ? b"


def test_one_writer_many_readers(tmp_path):
  path = str(tmp_path / "s")
  with tg.GradientStore(path) as writer:
    ids = writer.add([critique(1)])
    with pytest.raises(FolderInUseError):
      tg.GradientStore(path)
    with tg.GradientStore(path, read_only=True) as reader:
      writer.add([critique(i) for i in range(2, 50)])
      assert len(reader) == 1
      assert reader.read(ids[0]) == critique(1)


def test_full_disk_adds_nothing(tmp_path):
  class Full:
    """A file whose disk is full after a few bytes."""

    def __init__(self, file):
      self.file, self.room = file, 30

    def write(self, data):
      if self.room == 0:
        raise OSError(28, "No space left on device")
      count = self.file.write(data[: self.room])
      self.room -= count
      return count

    def __getattr__(self, name):
      return getattr(self.file, name)

  with tg.GradientStore(str(tmp_path / "s")) as store:
    ids = store.add([critique(1)])
    file = store._texts
    store._texts = Full(file)
    with pytest.raises(OSError, match="No space"):
      store.add([critique(2)])
    store._texts = file
    assert len(store) == 1
    assert store.read(ids[0]) == critique(1)
    assert store.read(store.add([critique(3)])[0]) == critique(3)


FILL_THE_DISK = """
import resource, signal, sys
import selfrag_jax.textgrad as tg
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = tg.GradientStore(sys.argv[1], dedupe_threshold=None)
said = lambda i: tg.Critique("r", f"remark{i} " * int(sys.argv[2]), f"sample{i}")
ids = [store.add([said(i)])[0] for i in range(5)]
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))  # no file may be longer
try:
  while True:
    ids += store.add([said(len(ids))])
except OSError as error:
  print(error)
assert 5 < len(ids) < 1000
assert len(store) == len(ids)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
ids += store.add([said(len(ids))])
assert [store.read(id) for id in ids] == [said(i) for i in range(len(ids))]
store.close()
with tg.GradientStore(sys.argv[1], dedupe_threshold=None) as store:
  assert [store.read(id) for id in ids] == [said(i) for i in range(len(ids))]
  assert len(store) == len(ids)
"""


@pytest.mark.parametrize("length", [1, 1000], ids=["the memory's log", "the texts"])
def test_a_disk_that_fills_loses_nothing(tmp_path, length):
  command = [sys.executable, "-c", FILL_THE_DISK, str(tmp_path / "s"), str(length)]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr
  assert "File too large" in done.stdout


WRITE_FOR_EVER = """
import sys, itertools
import selfrag_jax.textgrad as tg
store = tg.GradientStore(sys.argv[1], dedupe_threshold=None, max_records=int(sys.argv[2]))
for i in itertools.count(max((c.step for c in store.recent(64, role="r")), default=-1) + 1):
  (id,) = store.add([tg.Critique("r", f"remark{i} " * 50, f"sample{i}", step=i)])
  store.note_outcome([id], True, 0.1)
  print(i, flush=True)
"""


@pytest.mark.parametrize("room", [100_000, 40], ids=["roomy", "compacts"])
def test_kill_9_at_any_moment_keeps_every_critique(tmp_path, room):
  moments = random.Random(0)
  for _ in range(3):
    process = subprocess.Popen(
      [sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path / "s"), str(room)], stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    time.sleep(moments.uniform(0, 0.3))
    os.kill(process.pid, signal.SIGKILL)
    lines = [line for line in process.communicate()[0].split("\n")[:-1] if line]
    with tg.GradientStore(str(tmp_path / "s"), dedupe_threshold=None) as store:
      assert len(store) > min(int(lines[-1] if lines else 0), room - 5)
      recent = store.recent(64, role="r")
      assert recent[0].step >= int(lines[-1] if lines else 0)
      assert len(recent) == min(len(store), 64)
      for found in recent:
        assert found.read().text == f"remark{found.step} " * 50


def test_memory_does_not_depend_on_the_length_of_critiques(tmp_path):
  def used(length, name):
    tracemalloc.start()
    with tg.GradientStore(str(tmp_path / name), encoder=tiny, encoder_name="tiny", dedupe_threshold=None) as store:
      before = tracemalloc.get_traced_memory()[0]
      for start in range(0, 2000, 100):
        store.add([critique(i, text="x" * length) for i in range(start, start + 100)])
      after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (after - before) / 2000

  short, long = used(10, "short"), used(4000, "long")
  assert long < short + 100
  assert long < 2500

"""A store on both sides of a fork: the child neither changes the folder nor reads what may be half changed."""

import os
import traceback

import numpy as np
import pytest

from selfrag_jax.files import FolderInUseError
from selfrag_jax.memory.journal import StoreError
from selfrag_jax.memory.store import MemoryStore

D = 4
pytestmark = [
  pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
  pytest.mark.filterwarnings("ignore:os.fork"),
]


def in_fork(body):
  """Run `body` in a fork; its exception is what fails here."""
  read, write = os.pipe()
  pid = os.fork()
  if pid == 0:
    try:
      body()
      report = ""
    except BaseException:
      report = traceback.format_exc()
    os.write(write, report.encode()[-4000:])
    os._exit(0)
  os.close(write)
  with open(read) as pipe:
    report = pipe.read()
  os.waitpid(pid, 0)
  assert not report, report


def make(folder, **options):
  store = MemoryStore(D, 10, path=None if folder is None else str(folder), backend="numpy", **options)
  store.add("first", np.eye(D)[0])
  return store


def test_a_fork_cannot_change_or_read_a_store_that_its_parent_writes_to(tmp_path):
  store = make(tmp_path)

  def child():
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for use in (
      lambda: store.add("child", np.eye(D)[1]),
      lambda: store.update("0", metadata={"a": 1}),
      lambda: store.delete("0"),
      lambda: store.clear(),
      lambda: store.save(),
      lambda: store.save(str(tmp_path / "copy")),
      lambda: store.search(np.ones(D)),
      lambda: store.get("0"),
      lambda: store.chunks,
      lambda: len(store),
      lambda: "0" in store,
    ):
      with pytest.raises(
        StoreError, match=rf"opened in process {os.getppid()}, of which this one is a fork: use .* or"
      ):
        use()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

  in_fork(child)
  assert store.add("parent", np.eye(D)[1]) == "1"
  store.close()
  with MemoryStore.load(str(tmp_path), backend="numpy") as again:
    assert [(c.id, c.text) for c in again.search(np.eye(D)[1], 1)] == [("1", "parent")]
    assert again.chunks == ["first", "parent"]


def test_a_fork_may_open_the_folder_itself(tmp_path):
  store = make(tmp_path)

  def beside_the_parent():
    with MemoryStore.load(str(tmp_path), backend="numpy", read_only=True) as reader:
      assert reader.chunks == ["first"]
    with pytest.raises(FolderInUseError, match=f"pid {os.getppid()}"):
      MemoryStore.load(str(tmp_path), backend="numpy")

  in_fork(beside_the_parent)
  reader = MemoryStore.load(str(tmp_path), backend="numpy", read_only=True)
  in_fork(lambda: reader.search(np.ones(D), 1)[0].text == "first" or pytest.fail("a reader is a copy"))
  store.close()

  def after_the_parent():
    with MemoryStore.load(str(tmp_path), backend="numpy") as own:
      own.add("child", np.eye(D)[1])

  in_fork(after_the_parent)
  with MemoryStore.load(str(tmp_path), backend="numpy") as again:
    assert again.chunks == ["first", "child"]


def test_a_store_without_a_folder_is_copied_by_a_fork():
  store = make(None)
  in_fork(lambda: store.add("child", np.ones(D)) == "1" or pytest.fail("a copy goes on"))
  assert store.chunks == ["first"]


def test_a_fork_that_closes_the_store_leaves_the_folder_to_its_parent(tmp_path):
  store = make(tmp_path)
  in_fork(store.close)
  with pytest.raises(FolderInUseError):
    MemoryStore.load(str(tmp_path), backend="numpy")
  store.add("still open", np.eye(D)[1])
  store.close()


def test_a_fork_that_lives_on_does_not_keep_the_folder(tmp_path):
  store = make(tmp_path)
  read, write = os.pipe()
  pid = os.fork()
  if pid == 0:
    os.close(write)
    os.read(read, 1)  # until the parent is done
    os._exit(0)
  try:
    store.close()
    MemoryStore.load(str(tmp_path), backend="numpy").close()
  finally:
    os.close(write)
    os.close(read)
    os.waitpid(pid, 0)

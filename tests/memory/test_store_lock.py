"""A store after a fork: the child neither changes the folder nor reads arrays that may be half changed."""

import os
import signal
import threading
import traceback

import numpy as np
import pytest

from selfrag_jax.memory.journal import StoreError
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.storage.lock import FolderInUseError

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
    signal.alarm(20)  # ends it where it hangs
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
  _, status = os.waitpid(pid, 0)
  assert not report, report
  assert status == 0, "it hung"


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


class Blocking:
  """An encoder that stays inside the first call until it is let go."""

  def __init__(self):
    self.entered, self.go_on = threading.Event(), threading.Event()

  def __call__(self, texts):
    if not self.entered.is_set():
      self.entered.set()
      self.go_on.wait(30)
    return np.ones((len(texts), D))


@pytest.mark.parametrize("is_reader", [False, True])
def test_a_fork_while_another_thread_searches_does_not_wait_for_it(tmp_path, is_reader):
  encoder = Blocking()
  if is_reader:
    make(tmp_path).close()
    store = MemoryStore.load(str(tmp_path), read_only=True, backend="numpy", encoder=encoder)
  else:
    store = make(None, encoder=encoder)
  thread = threading.Thread(target=store.search, args=("query",))
  thread.start()
  assert encoder.entered.wait(30)

  def child():
    assert store.search(np.ones(D), 1)[0].text == store.search("query", 1)[0].text == "first"
    if not is_reader:
      assert store.add("child", np.ones(D)) == "1"

  try:
    in_fork(child)
  finally:
    encoder.go_on.set()
    thread.join()
  assert store.chunks == ["first"]


@pytest.mark.parametrize("name", ["ids", "chunks", "token_ids", "embeddings", "metadata"])
def test_another_thread_may_delete_as_soon_as_the_lock_is_free(name):
  store = make(None)

  class Contested(type(store._lock)):
    def __exit__(self, *_):
      super().__exit__()
      del Contested.__exit__
      store.clear()

  store._lock = Contested()
  assert len(getattr(store, name)) == 1
  assert len(getattr(store, name)) == 0


def test_a_fork_in_the_middle_of_a_change_by_another_thread_is_refused(monkeypatch):
  store, encoder = make(None), Blocking()
  real = store._table._put
  monkeypatch.setattr(store._table, "_put", lambda record, slot: (encoder(["x"]), real(record, slot)))
  thread = threading.Thread(target=store.add, args=("second", np.ones(D)))
  thread.start()
  assert encoder.entered.wait(30)

  def child():
    for use in (lambda: store.search(np.ones(D)), lambda: len(store), lambda: store.add("x", np.ones(D))):
      with pytest.raises(StoreError, match="cut short, so it is half made, and closed: make it again"):
        use()
    store.close()

  try:
    in_fork(child)
  finally:
    encoder.go_on.set()
    thread.join()
  assert store.chunks == ["first", "second"]


def test_the_thread_that_forks_inside_a_search_goes_on_in_the_child():
  children = []

  def encode(texts):
    if not children:
      children.append(os.fork())
    return np.ones((len(texts), D))

  store = make(None, encoder=encode)
  found = [chunk.text for chunk in store.search("query")]
  if children == [0]:
    os._exit(0 if found == ["first"] and len(store) == 1 else 1)
  assert os.waitpid(children[0], 0)[1] == 0


def test_a_store_that_jax_has_searched_is_refused_in_a_fork():
  store = MemoryStore(D, 10)
  store.add("first", np.ones(D))
  assert store.search(np.ones(D))

  def child():
    for use in (lambda: store.search(np.ones(D)), store.state):
      with pytest.raises(StoreError, match=r"JAX does not work in a fork: .* backend='numpy'"):
        use()
    assert store.chunks == ["first"]

  in_fork(child)


def test_a_store_without_a_folder_that_ctrl_c_has_left_half_changed_is_refused(monkeypatch):
  store = make(None)

  def interrupt(record, slot):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(store._table, "_put", interrupt)
    with pytest.raises(KeyboardInterrupt):
      store.update("0", metadata={"a": 1})
  with pytest.raises(StoreError, match="cut short, so it is half made, and closed: make it again"):
    store.search(np.ones(D))

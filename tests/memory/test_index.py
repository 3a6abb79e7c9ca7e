"""The index under the host's memories: its slots are those of a plain list, and backends follow it without help."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfrag_jax.memory.backends import make_backend
from selfrag_jax.memory.index import VectorIndex
from selfrag_jax.memory.state import put, write
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.memory.table import Change, Table
from selfrag_jax.memory.topk import search
from selfrag_jax.memory.topk_numpy import search_numpy

D = 4
ARRAYS = ("embeddings", "norms", "tokens", "lengths", "valid", "changed_at")


def vectors(n, seed=0):
  return np.random.default_rng(seed).standard_normal((n, D)).astype(np.float32)


class Slots:
  """The slow twin: which row is in which slot, one at a time."""

  def __init__(self, size):
    self.rows, self.order = [None] * size, []

  def add(self, row):
    if None not in self.rows:
      self.delete(self.order[0])
    slot = self.rows.index(None)
    self.rows[slot] = row
    self.order.append(slot)
    return slot

  def delete(self, slot):
    self.rows[slot] = None
    self.order.remove(slot)


change = st.one_of(
  st.tuples(st.just("add"), st.integers(0, 20)),
  st.tuples(st.just("delete"), st.lists(st.integers(0, 6), max_size=3)),
  st.tuples(st.just("reserve"), st.integers(0, 9)),
  st.tuples(st.just("reopen"), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(change, min_size=1, max_size=10))
def test_slots_and_rows_are_those_of_a_list(changes):
  """Batches larger than the index, and restored indices, among them."""
  index, twin, rows = VectorIndex(7, D, 2, backend=make_backend("numpy")), Slots(7), iter(range(1000))
  for kind, what in changes:
    if kind == "add":
      numbers = [next(rows) for _ in range(what)]
      embeddings = np.array([[n, n + 1, 0, 0] for n in numbers], np.float32).reshape(-1, D)
      tokens, lengths = np.array([[n, 0] for n in numbers], np.int32).reshape(-1, 2), np.ones(what, np.int32)
      assert index.add(embeddings, tokens, lengths) == [twin.add(n) for n in numbers]
    elif kind == "delete":
      slots = [slot for slot in dict.fromkeys(what) if twin.rows[slot] is not None]
      index.delete(slots)
      for slot in slots:
        twin.delete(slot)
    elif kind == "reserve":
      index.reserve(what)
      assert len(index.valid) >= len(index) + what
      twin.rows += [None] * (len(index.valid) - len(twin.rows))
    else:
      opened = VectorIndex(len(index.valid), D, 2, backend=make_backend("numpy"))
      order = twin.order
      opened.restore(list(order), *(getattr(index, name)[order] for name in ("embeddings", "tokens", "lengths")))
      index = opened
  assert index.valid.tolist() == [row is not None for row in twin.rows]
  assert len(index) == len(twin.order)
  held = np.array([row for row in twin.rows if row is not None], np.float32)
  for found, expected in (
    (index.embeddings[index.valid][:, 1], held + 1),
    (index.tokens[index.valid][:, 0], held),
    (index.lengths[index.valid], np.ones(len(held))),
  ):
    np.testing.assert_array_equal(found, expected)
  np.testing.assert_allclose(index.norms[index.valid], np.hypot(held, held + 1), rtol=1e-6)


def test_a_batch_of_chunks_fills_the_slots_that_they_fill_one_by_one():
  """Logs of any version replay to the same slots, those of a full store too."""
  tables = [Table(VectorIndex(5, D, backend=make_backend("numpy"))) for _ in range(2)]
  record = lambda id: {"id": id, "text": "t", "key": f"key of {id}", "count": 1, "metadata": {}}
  for step, (remove, n) in enumerate([((), 4), (("0.1", "0.0"), 1), ((), 4), (("2.1",), 13), ((), 2)]):
    rows, ids = vectors(n, seed=step), [f"{step}.{i}" for i in range(n)]
    arrays = {"embeddings": rows, "tokens": np.zeros((n, 0), np.int32), "lengths": np.zeros(n, np.int32)}
    header = {"remove": list(remove), "add": [record(id) for id in ids], "count": {}, "added": step}
    tables[0].apply(Change(header, arrays))
    for i in range(n):
      part = {name: array[i : i + 1] for name, array in arrays.items()}
      tables[1].apply(Change({**header, "remove": header["remove"] * (i == 0), "add": [record(ids[i])]}, part))
    assert tables[0].slots == tables[1].slots
    assert list(tables[0].slots) == list(tables[0].records) == list(tables[0].keys.values()) == list(tables[1].slots)
    assert tables[0].ids == {slot: id for id, slot in tables[0].slots.items()}
    np.testing.assert_array_equal(tables[0].index.embeddings, tables[1].index.embeddings)


def test_backends_follow_one_index_each_on_its_own_and_a_search_leaves_no_trace():
  index = VectorIndex(6, D, 1, backend=make_backend("numpy"))
  backends = [make_backend("numpy"), make_backend("exact"), make_backend("exact"), make_backend("scann")]
  queries = vectors(5, seed=9)

  def check(which):
    held = {name: getattr(index, name).copy() for name in ARRAYS}
    version, oracle = index.version, search_numpy({"embeddings": index.embeddings, "valid": index.valid}, queries, 3)
    for backend in which:
      index.backend = backend
      found = index.search(queries, 3)
      np.testing.assert_array_equal(found.slots, oracle.slots)
      np.testing.assert_array_equal(found.scores, oracle.scores)
    assert index.version == version
    for name, before in held.items():
      np.testing.assert_array_equal(getattr(index, name), before)

  index.add(vectors(4), np.ones((4, 1), np.int32), np.ones(4, np.int32))
  check(backends[:2])
  index.delete([1])
  check(backends[1:])
  index.add(vectors(5, seed=1))  # the oldest is lost
  check(backends)
  index.delete([0, 5])
  index.reserve(20)  # a copy of the old size is begun again
  check(backends[1:2])
  index.add(vectors(21, seed=2))
  check(backends)


def test_what_a_store_gives_to_a_compiled_search_cannot_be_written_over():
  store = MemoryStore(D, 4, chunk_size=2, backend="exact")
  ids = store.add_many(["a", "b", "c"], vectors(3), token_ids=[[1], [2, 3], []])
  store.delete(ids[1])  # slot 0 is alive, and so is slot 2: no cursor stands before free slots alone
  rows = store.state()
  assert rows.valid.tolist() == [True, False, True, False]
  with pytest.raises(AttributeError, match="cursor"):
    write(rows, vectors(1, seed=1))
  with pytest.raises(AttributeError, match="cursor"):
    jax.jit(write)(rows, vectors(1, seed=1))
  found = jax.jit(search, static_argnames="k")(rows, vectors(3), k=4)
  assert found.slots[:, 2:].tolist() == [[-1, -1]] * 3
  assert [c.id for c in store.search(vectors(3)[2], 1)] == [ids[found.slots[2, 0]]]
  changed = put(rows, np.array([1]), vectors(1, seed=1))  # a copy of one's own
  assert changed.valid.tolist() == [True, True, True, False]
  assert store.ids == [ids[0], ids[2]]

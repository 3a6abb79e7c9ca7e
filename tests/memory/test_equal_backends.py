"""Every backend of a store gives the same answers: ties, deletions, many devices, vectors that are next to nothing."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from selfrag_jax.memory.records import Recency
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.memory.topk_numpy import search_numpy

D = 6
operation = st.one_of(
  st.tuples(st.just("add"), st.integers(1, 9)),
  st.tuples(st.just("delete"), st.integers(0, 30)),
  st.tuples(st.just("update"), st.integers(0, 30)),
  st.tuples(st.just("clear"), st.just(0)),
)
MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
BACKENDS = {
  "numpy": {"backend": "numpy"},
  "exact": {"backend": "exact"},
  "sharded": {"backend": "exact", "mesh": MESH},
}


@settings(max_examples=40, deadline=None)
@given(st.lists(operation, min_size=1, max_size=12), st.integers(0, 2**31), st.sampled_from(["cosine", "dot"]))
def test_every_backend_answers_as_numpy_whatever_happened_before(operations, seed, metric):
  """64 queries an example, 40 examples, 2 searches: 5120 cases a backend, wraps, deletions and ties among them."""
  rng = np.random.default_rng(seed)
  stores = {name: MemoryStore(D, 12, chunk_size=1, metric=metric, **options) for name, options in BACKENDS.items()}
  expected: dict[str, np.ndarray] = {}  # oldest first
  pool = rng.standard_normal((5, D)).astype(np.float32)  # few different rows, so there are ties
  pool[0] = 0
  for kind, number in operations:
    rows = pool[rng.integers(0, 5, max(number, 1))]
    alive = list(expected)
    victim = alive[number % len(alive)] if alive else None
    for store in stores.values():
      if kind == "add":
        ids = store.add_many(["t"] * number, rows, metadata=[{"timestamp": 0}] * number)
      elif kind == "clear":
        store.clear()
      elif victim is not None and kind == "delete":
        store.delete(victim)
      elif victim is not None:
        store.update(victim, embedding=rows[0])
    if kind == "add":
      expected.update(zip(ids, rows, strict=True))
      expected = dict(list(expected.items())[-12:])
    elif kind == "clear":
      expected = {}
    elif victim is not None:
      del expected[victim]
      if kind == "update":
        expected[victim] = rows[0]

  assert stores["numpy"].ids == list(expected)
  queries = np.concatenate([rng.standard_normal((60, D)).astype(np.float32), pool[:4]])
  for where in (None, lambda metadata: metadata["position"] % 2 == 0):
    table = stores["numpy"]._table
    keep = [i for i, m in zip(stores["numpy"].ids, stores["numpy"].metadata, strict=True) if where is None or where(m)]
    slots = np.array([table.slots[i] for i in keep], int)
    valid = np.zeros(12, bool)
    valid[slots] = True
    oracle = search_numpy({"embeddings": table.index.embeddings, "valid": valid}, queries, 3, metric=metric)
    for name, store in stores.items():
      found = store.search_batched(queries, 3, where=where)
      for row, scores, slots in zip(found, oracle.scores, oracle.slots, strict=True):
        assert [c.id for c in row] == [table.ids[s] for s in slots.tolist() if s >= 0], name
        assert [c.score for c in row] == [s for s in scores.tolist() if s > -np.inf], name


@pytest.mark.parametrize("backend", ["numpy", "exact", "scann"])
def test_a_vector_whose_square_float32_cannot_hold_counts_as_zero(backend):
  x, y, *_ = np.eye(D, dtype=np.float32)
  store = MemoryStore(D, 16, backend=backend, dedupe_threshold=0.9)
  rows = [*(x * length for length in (1e-22, *[1e-20] * 6, 1e-18)), np.full(D, 0.9e-19), x + y]
  assert store.add_many(list("abcdefghij"), np.stack(rows)) == list("0123456789")
  found = {chunk.text: chunk.score for chunk in store.search(x, 10)}
  assert found == {"h": pytest.approx(1), "j": pytest.approx(0.5**0.5), **dict.fromkeys("abcdefgi", 0)}
  assert [chunk.text for chunk in store.search(x, 1)] == ["h"]  # the short ones are no candidates
  store = MemoryStore(D, 16, backend=backend)
  store.add_many(["oldest", *["later"] * 8], np.stack([-x, *[x] * 8]))
  (found,) = store.search(1e-20 * x, 1, recency=Recency(-1, 1, "position"))  # a bonus for old ones decides alone
  assert (found.text, found.score) == ("oldest", pytest.approx(-(0.5**8)))


def test_a_saved_store_answers_the_same_on_eight_devices_four_and_one(tmp_path):
  rng = np.random.default_rng(0)
  rows, queries = rng.standard_normal((50, D)).astype(np.float32), rng.standard_normal((9, D)).astype(np.float32)
  folder, found, store = str(tmp_path / "store"), [], None
  for n in (8, 4, 1):
    mesh = jax.make_mesh((n,), ("data",), devices=jax.devices()[:n], axis_types=(AxisType.Auto,))
    store = MemoryStore.load(folder, mesh=mesh) if store else MemoryStore(D, 64, chunk_size=1, path=folder, mesh=mesh)
    if n == 8:
      store.add_many([f"text {i}" for i in range(50)], rows)
    found.append([[(hit.id, hit.score) for hit in store.search(query, 7)] for query in queries])
    store.close()
  assert found[0] == found[1] == found[2]
  assert len(found[0][0]) == 7

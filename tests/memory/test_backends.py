"""The ScaNN backend while its store changes, and how often the device backend compiles."""

import time
import types

import jax
import numpy as np
import pytest

from selfrag_jax.memory.backends import device, scann
from selfrag_jax.memory.backends.scann import ScannBackend
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.memory.topk_numpy import search_numpy

pytest.importorskip("scann", reason="ScaNN has no wheel for this platform")


def clusters(n, seed, D=32):
  """Rows in clusters, as real embeddings are; ScaNN's partitions are made for that."""
  rng = np.random.default_rng(seed)
  centres = np.random.default_rng(99).standard_normal((60, D))
  return (centres[rng.integers(0, 60, n)] + 0.4 * rng.standard_normal((n, D))).astype(np.float32)


def recall(store, queries, k=10, **options):
  table = store._table
  valid = {"embeddings": table.index.embeddings, "valid": table.index.valid}
  exact = search_numpy(valid, queries, k, metric=store._settings["metric"]).slots
  found = store.search_batched(queries, k, **options)
  hits = [len({table.slots[c.id] for c in row} & set(slots.tolist())) for row, slots in zip(found, exact, strict=True)]
  return sum(hits) / (k * len(queries))


@pytest.mark.parametrize("metric", ["cosine", "dot"])
def test_scann_follows_the_store(metric, monkeypatch):
  store = MemoryStore(32, 6000, chunk_size=0, backend="scann", metric=metric)
  backend = store._table.index.backend = ScannBackend(smallest=1000)
  queries = clusters(40, seed=5)
  rows = clusters(3000, seed=1)
  store.add_many(["t"] * 999, rows[:999])
  store.wait_for_index()
  assert backend._built is None  # too small
  assert recall(store, queries) == 1
  store.add_many(["t"] * 2001, rows[999:])
  assert recall(store, queries) == 1  # exact while the index is being built
  store.wait_for_index()
  built = backend._built
  assert built is not None
  assert recall(store, queries) >= 0.9
  assert all(len({chunk.id for chunk in row}) == 60 for row in store.search_batched(queries, 60))

  # what came later is found before there is a new index
  new = store.add_many(["new"] * 50, 3 * queries.repeat(2, 0)[:50])
  assert all(row[0].id in new for row in store.search_batched(queries[:25], 1))
  assert backend._built is built
  # what is gone is not found, and does not starve the rest
  store.delete(new)
  for _ in range(3):
    found = store.search_batched(queries, 10)
    assert all(len(row) == 10 for row in found)
    store.delete({chunk.id for row in found for chunk in row})
  assert recall(store, queries) >= 0.9
  # a slot that is taken again means its new chunk
  target = store.ids[0]
  store.update(target, embedding=100 * queries[0])
  assert store.search(queries[0], 1)[0].id == target
  # filters and recency are exact
  other = store.add("other", -queries[0], metadata={"source": "b"})
  assert [chunk.id for chunk in store.search(queries[0], 3, where={"source": "b"})] == [other]
  # much has changed by now, so there will be a new index
  store.add_many(["t"] * 400, clusters(400, seed=8))
  store.search(queries[0])
  store.wait_for_index()
  assert backend._built is not built
  assert recall(store, queries) >= 0.9

  def fail(_):
    raise MemoryError("no room for the index")

  before = backend._built
  monkeypatch.setattr(scann, "_build_scann", fail)
  store.add_many(["t"] * 800, clusters(800, seed=9))
  backend.update(store._table.index, metric)
  with pytest.raises(MemoryError, match="no room"):
    store.wait_for_index()
  store.add_many(["t"] * 800, clusters(800, seed=10))
  for _ in range(20):  # without waiting a failure stops nothing
    assert recall(store, queries) >= 0.9
    time.sleep(0.01)
  assert backend._build is None
  assert backend._built is before


def test_an_update_that_fails_half_way_is_made_again(monkeypatch):
  store = MemoryStore(4, 3000, chunk_size=0)
  rows = np.random.default_rng(0).standard_normal((2500, 4)).astype(np.float32)
  store.add_many(["t"] * 2500, rows)
  programs, calls = device._programs(), []

  def put(*args, **fields):
    calls.append(args)
    if len(calls) == 2:
      raise KeyboardInterrupt
    return programs.put(*args, **fields)

  with monkeypatch.context() as patch:
    patch.setattr(device, "_programs", lambda: types.SimpleNamespace(put=put, search=programs.search))
    with pytest.raises(KeyboardInterrupt):
      store.search(rows[0])
  assert store.search(rows[2400], 1)[0].id == "2400"


def test_filling_and_searching_compile_once(caplog):
  store = MemoryStore(16, 700, chunk_size=4)
  rng = np.random.default_rng(0)
  with jax.log_compiles(), caplog.at_level("WARNING"):
    for i in range(15):
      store.add_many(["t"] * 64, rng.standard_normal((64, 16)))
      store.search_batched(rng.standard_normal((3 + i % 2, 16)), 5)  # padded to 4
  compiled = [record.getMessage() for record in caplog.records if "Compiling" in record.getMessage()]
  assert sum("put" in message for message in compiled) == 1
  assert sum("search_allowed" in message for message in compiled) == 1

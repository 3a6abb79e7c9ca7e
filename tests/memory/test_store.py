"""`MemoryStore` against a list of dictionaries, and the values that it refuses."""

import subprocess
import sys
import tracemalloc

import jax
import numpy as np
import pytest

from selfrag_jax.memory import dedupe
from selfrag_jax.memory.records import Recency
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.memory.topk_numpy import search_numpy

D = 6


def vectors(n, seed=0):
  return np.random.default_rng(seed).standard_normal((n, D)).astype(np.float32)


def filled(n=8, **options):
  store = MemoryStore(D, **{"max_chunks": 16, "chunk_size": 4, "backend": "numpy", **options})
  store.add_many(
    [f"text {i}" for i in range(n)],
    vectors(n),
    token_ids=[[i, i + 1] for i in range(n)],
    metadata=[{"source": "even" if i % 2 == 0 else "odd", "timestamp": 100.0 + i} for i in range(n)],
  )
  return store


def test_what_is_added_comes_back():
  store = filled()
  assert store.size == len(store) == 8
  assert store.ids == [str(i) for i in range(8)]
  assert store.chunks[3] == "text 3"
  assert store.metadata[3] == {"position": 3, "timestamp": 103.0, "source": "odd"}
  np.testing.assert_array_equal(store.token_ids[3], [3, 4])
  np.testing.assert_array_equal(store.embeddings, vectors(8))
  best, second = store.search(vectors(8)[5], 2)
  assert (best.id, best.text, best.count) == ("5", "text 5", 1)
  assert best.score == pytest.approx(1, abs=1e-6)
  assert second.score < best.score
  assert "5" in store
  assert "9" not in store


def test_returned_chunks_do_not_share_the_stores_memory():
  store = filled()
  store.get("1").metadata["source"] = "changed"
  store.get("1").token_ids[:] = 0
  store.embeddings[:] = 0
  store.update("2", metadata={"tags": ["a"]})
  store.get("2").metadata["tags"].append("b")
  assert store.get("2").metadata["tags"] == ["a"]
  assert store.delete(where={"tags": "b"}) == 0
  assert store.get("1").metadata["source"] == "odd"
  assert store.get("1").token_ids.tolist() == [1, 2]
  assert store.search(vectors(8)[1], 1)[0].id == "1"


def test_full_store_loses_its_oldest_chunks_and_reuses_freed_slots_first():
  store = filled(16)
  store.delete(["3", "12"])
  store.add_many(["a", "b", "c"], vectors(3, seed=1))
  assert store.size == 16
  assert "0" not in store  # two slots were free, the third came from the oldest
  assert "1" in store
  store.add_many([f"many {i}" for i in range(40)], vectors(40, seed=2))
  assert store.chunks == [f"many {i}" for i in range(24, 40)]


def test_deleting_by_id_and_by_metadata():
  store = filled()
  assert store.delete("0") == 1
  assert store.delete(where={"source": "odd"}) == 4
  assert store.delete(where=lambda metadata: metadata["timestamp"] > 105) == 1
  assert store.ids == ["2", "4"]
  assert store.delete(where={"source": "nothing"}) == 0
  with pytest.raises(KeyError, match="'7'"):
    store.delete(["2", "7"])
  assert store.size == 2
  with pytest.raises(ValueError, match="ids or where"):
    store.delete()
  store.clear()
  assert store.size == 0
  assert store.search(vectors(1)[0]) == []
  store.add("again", vectors(1)[0])
  assert store.ids == ["8"]  # no id is given twice


def test_updates_replace_in_place_and_become_the_newest():
  store = filled()
  store.update("2", metadata={"note": "n"})
  chunk = store.get("2")
  assert chunk.text == "text 2"
  assert chunk.metadata["note"] == "n"
  assert chunk.metadata["timestamp"] > 1e9
  assert chunk.token_ids.tolist() == [2, 3]
  assert store.ids[-1] == "2"
  np.testing.assert_array_equal(store.embeddings[-1], vectors(8)[2])
  store.update("2", "new text", vectors(1, seed=5)[0], token_ids=[9])
  assert store.search(vectors(1, seed=5)[0], 1)[0].text == "new text"
  assert store.get("2").token_ids.tolist() == [9]
  with pytest.raises(ValueError, match="no encoder: give embeddings"):
    store.update("2", "another")
  with pytest.raises(KeyError, match="'99'"):
    store.update("99", "text")


def test_the_newest_of_a_key_wins():
  store = filled(2)
  store.add("the port of Avalor is Bergen", vectors(1, seed=3)[0], key="port of Avalor")
  ids = store.add_many(
    ["it is Cadiz", "no key", "it is Dover"], vectors(3, seed=4), keys=["port of Avalor", None, "port of Avalor"]
  )
  assert store.chunks == ["text 0", "text 1", "no key", "it is Dover"]
  store.delete(ids[2])
  store.add("it is Emden", vectors(1, seed=3)[0], key="port of Avalor")
  assert store.chunks[-1] == "it is Emden"


def test_near_duplicates_are_counted_and_not_added():
  store = filled(4, dedupe_threshold=0.999)
  rows = vectors(3, seed=7)
  near = np.stack([rows[0], rows[0] * 2, vectors(4)[1], rows[1]])
  ids = store.add_many(["new", "same as new", "same as text 1", "other"], near)
  assert ids == ["4", "4", "1", "7"]
  assert store.chunks[-2:] == ["new", "other"]
  store.add("again", rows[0])
  assert (store.get("4").count, store.get("1").count, store.get("7").count) == (3, 2, 1)
  store.add("with a key", rows[0], key="k")  # a key says that it is another fact
  assert store.size == 7
  for within in (None, "source"):
    one = MemoryStore(D, backend="numpy", dedupe_threshold=-np.inf, dedupe_within=within)
    assert one.add_many(["a"], rows[:1]) == one.add_many(["b"], -rows[:1]) == ["0"]
    assert (one.add("c", rows[0], metadata={"source": "s"}) == "0") == (within is None)


def test_near_duplicates_within_a_field():
  axes = np.eye(D, dtype=np.float32)
  near = 0.92 * axes[0] + np.sqrt(1 - 0.92**2) * axes[1:]  # of the first axis, and not of each other
  store = MemoryStore(D, 20, backend="numpy", dedupe_threshold=0.9, dedupe_within="role")
  kinds = [{"role": "a"}] * (D - 2) + [{"role": "b"}]  # more of another kind than are asked for
  ids = store.add_many([f"text {i}" for i in range(D - 1)], near, metadata=kinds)
  assert len(set(ids)) == D - 1
  query = axes[0] - 0.01 * axes[D - 1]  # the least like the one of its own kind
  assert store.add("as b", query, metadata={"role": "b"}) == ids[-1]
  assert store.add("as none", query, metadata={"role": "c"}) not in ids
  both = store.add_many(["c", "d", "d"], [-query] * 3, metadata=[{"role": r} for r in "cdd"])
  assert both[0] != both[1] == both[2]


def test_what_repeats_a_chunk_that_must_go_is_added():
  store = MemoryStore(D, 2, backend="numpy", dedupe_threshold=0.99)
  rows = vectors(3)
  store.add_many(["a", "b"], rows[:2])
  ids = store.add_many(["a again", "c"], rows[[0, 2]])
  assert store.chunks == ["a again", "c"]
  assert ids == store.ids


@pytest.mark.parametrize("metric", ["cosine", "dot"])
def test_the_numpy_backend_prunes_as_the_exact_search_would(metric):
  rows = vectors(300, seed=3)
  rows[100:] = rows[7]  # 200 equal ones: the lowest slots win
  store = MemoryStore(D, 400, chunk_size=0, metric=metric, backend="numpy")
  ids = store.add_many(["t"] * 300, rows)
  store.delete(ids[3:50:4])
  queries = np.concatenate([vectors(50, seed=4), rows[[7, 200]], np.zeros((1, D), np.float32)])
  table = store._table
  oracle = search_numpy({"embeddings": table.index.embeddings, "valid": table.index.valid}, queries, 5, metric=metric)
  for where in (None, lambda metadata: True):
    found = store.search_batched(queries, 5, where=where)
    assert [[table.slots[c.id] for c in row] for row in found] == oracle.slots.tolist()


def test_min_score_of_the_store_and_of_a_search():
  store = filled(min_score=0.5)
  query = vectors(8)[0]
  scores = [chunk.score for chunk in store.search(query, 8, min_score=-1)]
  assert len(scores) == 8
  assert len(store.search(query, 8)) == sum(score >= 0.5 for score in scores)
  assert store.search(query, 8, min_score=1.5) == []


@pytest.mark.parametrize("backend", ["numpy", "exact"])
def test_a_filter_never_starves_the_result(backend):
  store = MemoryStore(D, 512, chunk_size=0, backend=backend)
  query = vectors(1)[0]
  near = query + 0.01 * vectors(500, seed=1)
  far = vectors(3, seed=2)
  store.add_many(
    ["near"] * 500 + ["far"] * 3, np.concatenate([near, far]), metadata=[{"source": "a"}] * 500 + [{"source": "b"}] * 3
  )
  assert [chunk.text for chunk in store.search(query, 3, where={"source": "b"})] == ["far"] * 3
  assert len(store.search(query, 5, where={"source": ["b", "c"]})) == 3
  assert store.search(query, 5, where={"source": "none"}) == []


@pytest.mark.parametrize("backend", ["numpy", "exact"])
def test_recency_prefers_the_newer_of_two_equals(backend):
  store = MemoryStore(D, backend=backend, max_chunks=16)
  row = vectors(1)[0]
  store.add_many(
    ["old", "new", "newest"], np.stack([row, row, -row]), metadata=[{"timestamp": t} for t in (0, 60, 120)]
  )
  assert [c.text for c in store.search(row, 3)] == ["old", "new", "newest"]
  found = store.search(row, 3, recency=Recency(weight=0.4, half_life=60))
  assert [c.text for c in found] == ["new", "old", "newest"]
  np.testing.assert_allclose([c.score for c in found], [1.2, 1.1, -0.6], atol=1e-6)
  found = store.search(row, 1, recency=Recency(weight=10, half_life=1, field="position"))
  assert found[0].text == "newest"
  store.add("no number", row, metadata={"day": "monday"})
  with pytest.raises(ValueError, match="a number 'day'"):
    store.search(row, 1, recency=Recency(1, 1, "day"))
  store.update(store.ids[-1], metadata={"day": None})
  with pytest.raises(ValueError, match="a number 'day'"):
    store.search(row, 1, recency=Recency(1, 1, "day"))
  with pytest.raises(ValueError, match="half_life = 0"):
    Recency(1, 0)


def test_an_encoder_makes_texts_enough():
  encoder = lambda texts: np.stack([np.eye(26)[[ord(c) - 97 for c in text]].sum(0) for text in texts])
  store = MemoryStore(26, encoder=encoder, backend="numpy")
  store.add_many(["abc", "xyz"])
  store.add("kkk")
  assert store.search("xyy", 1)[0].text == "xyz"
  assert [found[0].text for found in store.search_batched(["cab", "k"], 1)] == ["abc", "kkk"]
  store.update("0", "qqq")
  assert store.search("q", 1)[0].id == "0"
  assert filled().search_batched([]) == []
  with pytest.raises(ValueError, match="no encoder"):
    filled().search("text")


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"embeddings": np.ones((1, D + 1))}, r"shape \(1, 7\), expected \(1, 6\)"),
    ({"embeddings": np.ones((2, D))}, r"shape \(2, 6\), expected \(1, 6\)"),
    ({"embeddings": np.full((1, D), np.nan)}, "embedding 0 has NaN"),
    ({"texts": [""]}, "chunk 0 has no text"),
    ({"texts": [" \n\t"]}, "chunk 0 has no text"),
    ({"token_ids": [[1] * 5]}, "chunk 0 has 5 tokens, chunk_size is 4"),
    ({"ids": ["2"]}, "the id '2' of chunk 0 is taken"),
    ({"texts": ["a", "b"], "embeddings": np.ones((2, D)), "ids": ["x", "x"]}, "the id 'x' of chunk 1 is taken"),
    ({"ids": [""]}, "ids are texts"),
    ({"ids": ["a", "b"]}, "2 ids for 1 texts"),
    ({"metadata": [{"f": object()}]}, "metadata of chunk 0 cannot be written as JSON"),
    ({"metadata": [{"f": float("nan")}]}, "metadata of chunk 0 cannot be written as JSON"),
    ({"metadata": [{3: "x"}]}, "names that are not texts"),
    ({"keys": [("port", "avalor")]}, "keys are texts"),
  ],
)
def test_bad_chunks_are_refused_and_nothing_is_added(tmp_path, arguments, message):
  store = filled(path=str(tmp_path / "store"))
  log = tmp_path / "store" / "log-1.bin"
  before = log.read_bytes()
  with pytest.raises(ValueError, match=message):
    store.add_many(**{"texts": ["text"], "embeddings": np.ones((1, D)), **arguments})
  assert store.size == 8
  assert log.read_bytes() == before


def test_bad_queries_and_settings_are_refused():
  store = filled()
  with pytest.raises(ValueError, match=r"shape \(1, 3\), expected \(1, 6\)"):
    store.search(np.ones(3))
  with pytest.raises(ValueError, match="embedding 0 has NaN"):
    store.search(np.full(D, np.nan))
  with pytest.raises(ValueError, match="k = 0"):
    store.search(np.ones(D), 0)
  with pytest.raises(ValueError, match="unknown backend 'faiss'; use exact, approx, scann or numpy"):
    MemoryStore(D, backend="faiss")
  with pytest.raises(ValueError, match="unknown metric 'l2'"):
    MemoryStore(D, metric="l2")
  with pytest.raises(ValueError, match="max_chunks = 0"):
    MemoryStore(D, 0)
  with pytest.raises(ValueError, match="belong to 'exact' and 'approx'"):
    MemoryStore(D, backend="numpy", dtype="int8")
  for wrong, message in (
    ({"dtype": "banana"}, "dtype = 'banana'; use float32, bfloat16, int8"),
    ({"dtype": "int32"}, "dtype = 'int32'; use float32, bfloat16, int8"),
    ({"mesh": "x"}, "mesh = 'x'; give a jax.sharding.Mesh with an axis 'data'"),
    ({"mesh": jax.make_mesh((1,), ("model",))}, "with an axis 'data'"),
    ({"encoder": "minilm"}, "encoder is 'minilm'; give a function of texts to vectors, or None"),
  ):
    with pytest.raises(ValueError, match=message):
      MemoryStore(D, **wrong)
  with pytest.raises(ValueError, match="recency = 'new'; give a Recency"):
    store.search(np.ones(D), recency="new")
  with pytest.raises(ValueError, match="nothing on the devices"):
    store.state()
  with pytest.raises(ValueError, match="no folder"):
    store.save()


def test_an_empty_memory_finds_nothing():
  for backend in ("numpy", "exact", "scann"):
    assert MemoryStore(D, backend=backend).search_batched(np.ones((3, D)), 4) == [[], [], []]
  assert filled().search_batched(np.zeros((0, D))) == []


@pytest.mark.parametrize("backend", ["numpy", "exact", "scann"])
def test_no_more_is_allocated_than_there_are_chunks_to_find(backend):
  store = filled(backend=backend, max_chunks=2000)
  store.search(vectors(1)[0], 10**7 + 1)  # compiles
  tracemalloc.start()
  try:
    found = store.search_batched(vectors(3), 10**7)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
  finally:
    tracemalloc.stop()
  assert [len(row) for row in found] == [8] * 3
  assert str(found) == str(store.search_batched(vectors(3), 8))


def test_the_candidates_of_many_queries_are_compared_in_parts():
  store = MemoryStore(256, 1000, chunk_size=0, backend="numpy")
  rng = np.random.default_rng(0)
  store.add_many(["t"] * 1000, rng.standard_normal((1000, 256)))
  queries = rng.standard_normal((300, 256)).astype(np.float32)
  table = store._table
  tracemalloc.start()
  try:  # all at once they are 300 x 1000 x 256 numbers, 300 MiB, and several times that to score them
    found = table.index.search(queries, 250, metric="dot")
    assert tracemalloc.get_traced_memory()[1] < 500 << 20
  finally:
    tracemalloc.stop()
  expected = search_numpy({"embeddings": table.index.embeddings[:1000]}, queries[:9], 250, metric="dot")
  np.testing.assert_array_equal(found.slots[:9], expected.slots)


def test_small_stores_need_no_jax():
  program = """
import sys
import numpy as np
from selfrag_jax.memory.store import MemoryStore
store = MemoryStore(4, backend="numpy")
store.add("a", np.ones(4))
assert store.search(np.ones(4), 1)[0].text == "a"
assert "jax" not in sys.modules and "tensorflow" not in sys.modules, [m for m in sys.modules if "jax" in m]
"""
  subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("at_once", [1, 40, 10**6])
def test_repeats_among_new_rows_are_those_of_every_pair_in_any_blocks(at_once, monkeypatch):
  monkeypatch.setattr(dedupe, "SIMILARITIES", at_once)
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(40, 4)).astype(np.float32)
  rows[7], exempt = 0, rng.random(40) < 0.2
  expected: list[int | None] = []
  length = lambda i, j: float(np.linalg.norm(rows[j]) * np.linalg.norm(rows[i])) or np.inf
  close = lambda i, j: float(rows[j] @ rows[i]) / length(i, j) >= 0.8
  for i in range(40):
    firsts = [j for j in range(i) if not exempt[j] and expected[j] is None and close(i, j)]
    expected.append(firsts[0] if firsts and not exempt[i] else None)
  assert 5 < sum(first is not None for first in expected) < 35
  assert dedupe.repeats(rows, 0.8, exempt) == expected

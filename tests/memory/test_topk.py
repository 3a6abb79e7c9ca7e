"""The top-k against numpy, against itself on eight devices, and the programs that it compiles to."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from selfrag_jax.memory import topk
from selfrag_jax.memory.state import delete, dequantize, init_memory, partition_specs, write
from selfrag_jax.memory.topk import search
from selfrag_jax.memory.topk_numpy import search_numpy

DTYPES = [jnp.float32, jnp.bfloat16, jnp.int8]
METRICS = ["cosine", "dot"]
jit_search = jax.jit(search, static_argnames=("k", "metric", "method", "mesh", "axis"))
jit_write = jax.jit(write, donate_argnums=0)
jit_delete = jax.jit(delete)


def random_memory(rng, C, D, dtype, *, whole_numbers=False):
  """A memory that has wrapped or is part full, with duplicates, zero rows, three groups and deletions."""
  state = init_memory(C, D, dtype=dtype)
  B = C // 2
  for _ in range(rng.integers(1, 5)):
    rows = rng.integers(-4, 5, (B, D)) if whole_numbers else rng.standard_normal((B, D))
    rows[rng.integers(0, B, 4)] = rows[0]
    rows[rng.integers(0, B, 2)] = 0
    group_ids = rng.integers(0, 3, B).astype(np.int32)
    state = jit_write(state, rows.astype(np.float32), mask=rng.random(B) < 0.9, group_ids=group_ids)
  return jit_delete(state, rng.random(C) < 0.1)


def random_queries(rng, state, B, *, whole_numbers=False):
  """Queries of which some are rows of the memory and some are zero."""
  C, D = state.embeddings.shape
  queries = rng.integers(-4, 5, (B, D)) if whole_numbers else rng.standard_normal((B, D))
  rows = np.asarray(dequantize(state.embeddings, state.scales))
  queries[: B // 4] = rows[rng.integers(0, C, B // 4)]
  queries[B // 4] = 0
  return queries.astype(np.float32), rng.integers(0, 3, B).astype(np.int32)


def assert_same(result, expected):
  np.testing.assert_array_equal(result.slots, expected.slots)
  np.testing.assert_array_equal(result.scores, expected.scores)


def float64_scores(state, queries, group_ids, metric):
  """The oracle: scores [B, C] of the stored rows in float64, -inf where the query may not look."""
  rows = np.asarray(dequantize(state.embeddings, state.scales), np.float64)
  queries = queries.astype(np.float64)
  scores = queries @ rows.T
  if metric == "cosine":
    norms = np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(rows, axis=1)
    scores = np.divide(scores, norms, out=np.zeros_like(scores), where=norms > 0)
  allowed = np.asarray(state.valid)
  if group_ids is not None:
    allowed = allowed & (np.asarray(state.group_ids) == group_ids[:, None])
  return np.where(allowed, scores, -np.inf)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_numpy_bit_for_bit(dtype, metric):
  """1792 random queries per dtype and metric: 10752 in all."""
  rng = np.random.default_rng(0)
  for C, k in [(64, 5), (12, 20)]:  # the second asks for more than there is room for
    for _ in range(7):
      state = random_memory(rng, C, 12, dtype)
      queries, group_ids = random_queries(rng, state, 128)
      result = jit_search(state, queries, k=k, group_ids=group_ids, metric=metric)
      assert_same(result, search_numpy(state, queries, k, group_ids=group_ids, metric=metric))

      oracle = float64_scores(state, queries, group_ids, metric)
      best = np.full((128, k), -np.inf)
      best[:, : min(k, C)] = -np.sort(-oracle, axis=1)[:, :k]
      np.testing.assert_allclose(result.scores, best, rtol=1e-5, atol=1e-5)
      slots = np.asarray(result.slots)
      of_slots = np.where(slots < 0, -np.inf, np.take_along_axis(oracle, slots, axis=1))
      np.testing.assert_allclose(of_slots, best, rtol=1e-5, atol=1e-5)


def test_lowest_slot_wins_every_tie():
  """Whole numbers have exact inner products, so a stable sort knows the one right answer."""
  rng = np.random.default_rng(1)
  for _ in range(10):
    state = random_memory(rng, 64, 8, jnp.float32, whole_numbers=True)
    queries, group_ids = random_queries(rng, state, 128, whole_numbers=True)
    oracle = float64_scores(state, queries, group_ids, "dot")
    expected = np.argsort(-oracle, axis=1, kind="stable")[:, :5]
    expected[np.take_along_axis(oracle, expected, axis=1) == -np.inf] = -1
    np.testing.assert_array_equal(jit_search(state, queries, k=5, group_ids=group_ids, metric="dot").slots, expected)
    np.testing.assert_array_equal(search_numpy(state, queries, 5, group_ids=group_ids, metric="dot").slots, expected)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_adds_to_every_score(dtype, metric):
  rng = np.random.default_rng(9)
  mesh = make_mesh((8,), ("data",))
  for size in (0.1, 100):
    state = random_memory(rng, 64, 12, dtype)
    queries, _ = random_queries(rng, state, 32)
    bias = (size * rng.standard_normal(64)).astype(np.float32)
    result = jit_search(state, queries, k=5, bias=bias, metric=metric)
    assert_same(result, search_numpy(state, queries, 5, bias=bias, metric=metric))
    assert_same(jit_search(shard(state, mesh, "data"), queries, k=5, bias=bias, metric=metric, mesh=mesh), result)
    best = -np.sort(-(float64_scores(state, queries, None, metric) + bias), axis=1)[:, :5]
    np.testing.assert_allclose(result.scores, best, rtol=1e-5, atol=1e-5)
  with pytest.raises(ValueError, match=r"bias has shape \(3,\), expected \(64,\)"):
    search(state, queries, 5, bias=np.zeros(3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_duplicates_than_candidates(dtype):
  row = np.random.default_rng(2).standard_normal(19).astype(np.float32)
  state = jit_write(init_memory(120, 19, dtype=dtype), -row[None, :])
  for size in (1, 96):  # the batch that a row came in does not matter
    state = jit_write(state, np.tile(row, (size, 1)))
  np.testing.assert_array_equal(jit_search(state, row[None, :], k=3).slots, [[1, 2, 3]])


def test_zero_vectors_score_zero_and_signs_of_zero_tie():
  state = jit_write(init_memory(40, 3), np.array([[0, 0, 0], [-0.0, 0, -0.0], [1, 0, 0], [0, 0, 0], [-1, 0, 0]]))
  for metric in METRICS:
    result = jit_search(state, np.array([[-1.0, -1.0, 1.0], [0, 0, 0]], np.float32), k=4, metric=metric)
    np.testing.assert_array_equal(result.slots, [[4, 0, 1, 3], [0, 1, 2, 3]])
    np.testing.assert_array_equal(np.asarray(result.scores)[:, 1:], 0)
    assert not np.signbit(result.scores)[:, 1:].any()


def test_many_rows_of_either_zero_tie():
  state = jit_write(init_memory(40, 1), np.repeat([-0.0, 0.0], 10)[:, None])
  np.testing.assert_array_equal(jit_search(state, np.ones((1, 1), np.float32), k=1, metric="dot").slots, [[0]])


def test_ties_that_the_first_pass_does_not_see():
  """Both rows score 1 + 2^-10, but the third number of the query rounds to 1 in bfloat16."""
  state = jit_write(init_memory(40, 3, dtype=jnp.bfloat16), np.array([[0, 0, 1.0], [1, 1, 0]]))
  query = np.array([[1, 2**-10, 1 + 2**-10]], np.float32)
  np.testing.assert_array_equal(jit_search(state, query, k=2, metric="dot").slots, [[0, 1]])


def test_a_row_that_is_not_a_number_is_never_found():
  rows = np.random.default_rng(3).standard_normal((30, 4)).astype(np.float32)
  rows[:20, 1] = np.nan
  state = jit_write(init_memory(40, 4), rows)
  for metric in METRICS:
    for k in (3, 12):  # there are 10 numbers
      result = jit_search(state, rows[20:], k=k, metric=metric)
      assert (np.sort(result.slots)[:, -min(k, 10) :] >= 20).all()
      assert np.isfinite(result.scores)[:, :10].all()
      assert (np.asarray(result.slots)[:, 10:] == -1).all()
      assert_same(result, search_numpy(state, rows[20:], k, metric=metric))


def test_nothing_there_is_minus_infinity_and_minus_one():
  empty = init_memory(4, 2)
  one = jax.jit(write)(empty, np.array([[-3.0, 0.0]]), group_ids=np.array([7], np.int32))
  query = np.array([[1.0, 0.0]], np.float32)
  for state, groups, k, slots, scores in [
    (empty, None, 2, [-1, -1], [-np.inf] * 2),
    (one, None, 6, [0] + [-1] * 5, [-3] + [-np.inf] * 5),
    (one, np.array([7]), 2, [0, -1], [-3, -np.inf]),
    (one, np.array([0]), 2, [-1, -1], [-np.inf] * 2),
  ]:
    result = jit_search(state, query, k=k, group_ids=groups, metric="dot")
    np.testing.assert_array_equal(result.slots, [slots])
    np.testing.assert_array_equal(result.scores, [scores])
    assert (result.slots.dtype, result.scores.dtype) == (jnp.int32, jnp.float32)


def test_searching_while_filling_compiles_once():
  find = jax.jit(lambda *args: search(*args, k=2))
  state = init_memory(16, 4)
  for n in range(10):
    state = jit_write(state, np.full((3, 4), n, np.float32))
    find(state, np.ones((2, 4), np.float32))
  assert find._cache_size() == 1


@pytest.mark.parametrize("metric", METRICS)
def test_more_candidates_than_are_counted_give_the_same(metric):
  rng = np.random.default_rng(3)
  state = random_memory(rng, 1200, 4, jnp.float32)
  queries, group_ids = random_queries(rng, state, 40)
  for k in (300, 1500):
    result = jit_search(state, queries, k=k, group_ids=group_ids, metric=metric)
    assert_same(result, search_numpy(state, queries, k, group_ids=group_ids, metric=metric))


@pytest.mark.parametrize(("C", "B", "k"), [(3000, 256, 3000), (3000, 256, 10**5), (1, 2, 10**6)])
def test_nothing_inside_is_larger_than_the_result_or_a_block(C, B, k):
  """A query that asks for everything compares everything: not all with all, and not for all queries at a time."""
  shapes = jax.eval_shape(lambda: init_memory(C, 256))
  program = jax.make_jaxpr(lambda state, queries: search(state, queries, k))(shapes, np.ones((B, 256), np.float32))
  assert [out.shape for out in program.out_avals] == [(B, k)] * 2
  assert max(sizes(program.jaxpr)) <= max(topk.LARGEST, C * 256, B * k)


def sizes(program):
  """Yield how many numbers each intermediate array of a program has, those of the programs inside included."""
  for equation in program.eqns:
    yield from (math.prod(out.aval.shape) for out in equation.outvars)
    for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
      if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
        yield from sizes(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("dtype", DTYPES)
def test_program_has_no_sort(dtype):
  """XLA:CPU turns a top-k over anything but float32 into a full sort, a hundred times slower."""
  program = jit_search.lower(init_memory(64, 8, dtype=dtype), np.ones((4, 8), np.float32), k=3).compile().as_text()
  assert "TopK" in program
  assert " sort(" not in program


@pytest.mark.parametrize(("dtype", "product"), [(jnp.bfloat16, "bf16"), (jnp.int8, "i8")])
def test_first_pass_reads_the_storage_as_it_is(dtype, product):
  lowered = jit_search.trace(init_memory(64, 8, dtype=dtype), np.ones((4, 8), np.float32), k=3).lower
  accumulator = {"bf16": "f32", "i8": "i32"}[product]
  for platform, operands in (("tpu", rf"{product}>, tensor<64x8x{product}>\) -> tensor<4x64x"),
                             ("cpu", rf"64x8x{product}>, tensor<4x8x{product}>\) -> tensor<64x4x")):  # fmt: skip
    program = lowered(lowering_platforms=(platform,)).as_text()
    assert re.search(rf"dot_general.*{operands}{accumulator}>", program), platform


@pytest.mark.parametrize("metric", METRICS)
def test_approximate_search_finds_nearly_all_with_exact_scores(metric):
  rng = np.random.default_rng(4)
  state = jit_write(init_memory(256, 16), rng.standard_normal((256, 16)))
  queries = rng.standard_normal((32, 16)).astype(np.float32)
  exact = search_numpy(state, queries, 5, metric=metric)
  approx = jit_search(state, queries, k=5, metric=metric, method="approx")
  assert np.mean([np.isin(a, e).mean() for a, e in zip(approx.slots, exact.slots, strict=True)]) >= 0.95
  all_scores = float64_scores(state, queries, None, metric)
  np.testing.assert_allclose(approx.scores, np.take_along_axis(all_scores, approx.slots, axis=1), rtol=1e-5)
  program = str(jax.make_jaxpr(lambda s, q: search(s, q, 5, method="approx"))(state, queries))
  assert "approx_top_k" in program


def make_mesh(shape, names):
  return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


def shard(state, mesh, axis):
  return jax.device_put(state, jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition_specs(state, axis)))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_eight_devices_answer_as_one(dtype, metric):
  rng = np.random.default_rng(5)
  mesh, axis = make_mesh((2, 4), ("data", "fsdp")), ("data", "fsdp")
  for _ in range(3):
    single = random_memory(rng, 320, 19, dtype)
    sharded = shard(single, mesh, axis)
    queries, group_ids = random_queries(rng, single, 48)
    expected = jit_search(single, queries, k=5, group_ids=group_ids, metric=metric)
    assert_same(jit_search(sharded, queries, k=5, group_ids=group_ids, metric=metric, mesh=mesh, axis=axis), expected)


def test_rows_over_one_axis_of_two_and_more_neighbours_than_a_shard_holds():
  rng = np.random.default_rng(6)
  mesh = make_mesh((2, 4), ("data", "tensor"))
  single = random_memory(rng, 16, 8, jnp.float32)
  queries, _ = random_queries(rng, single, 16)
  for axis, k in [("data", 11), ("tensor", 20)]:
    result = jit_search(shard(single, mesh, axis), queries, k=k, mesh=mesh, axis=axis)
    assert_same(result, search_numpy(single, queries, k))


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_send_k_pairs_and_nothing_else(dtype):
  mesh, B, k, R = make_mesh((8,), ("data",)), 4, 3, 8
  state = shard(init_memory(8 * 32, 16, dtype=dtype), mesh, "data")
  program = jit_search.lower(state, np.ones((B, 16), np.float32), k=k, mesh=mesh).compile().as_text()
  lines = [line for line in program.splitlines() if re.search(r" (all-\w+|reduce-scatter|collective-\w+)\(", line)]
  sent = [shape for line in lines for shape in re.findall(r"(\w+)\[([\d,]+)\]", line.split(" all-gather(")[0])]
  assert len(sent) >= 2
  assert sorted(kind for kind, _ in sent) == ["f32", "s32"]
  assert all(np.prod([int(n) for n in size.split(",")]) == B * R * k for _, size in sent)


def test_float64_stays_float64():
  with jax.enable_x64(True):
    rng = np.random.default_rng(7)
    rows, queries = rng.standard_normal((40, 8)), rng.standard_normal((6, 8))
    state = jit_write(init_memory(40, 8, dtype=jnp.float64), rows)
    result = jit_search(state, queries, k=3, metric="dot")
    assert result.scores.dtype == jnp.float64
    np.testing.assert_allclose(result.scores, -np.sort(-(queries @ rows.T), axis=1)[:, :3], rtol=1e-13)
    assert_same(result, search_numpy(state, queries, 3, metric="dot"))


def test_numpy_twin_takes_a_plain_mapping():
  rows = {"embeddings": np.array([[1, 0], [2, 2], [0, -1]], np.float32)}
  query = np.array([[0, 2]], np.float32)
  np.testing.assert_array_equal(search_numpy(rows, query, 2).slots, [[1, 0]])
  np.testing.assert_allclose(search_numpy(rows, query, 2).scores, [[np.sqrt(0.5), 0]], rtol=1e-6)
  some = {**rows, "valid": np.array([True, False, True]), "group_ids": np.array([0, 0, 5])}
  np.testing.assert_array_equal(search_numpy(some, query, 2).slots, [[0, 2]])
  np.testing.assert_array_equal(search_numpy(some, query, 2, group_ids=np.array([5])).slots, [[2, -1]])
  small = {"embeddings": np.array([[1, 0], [0, 2]], np.int8), "scales": np.array([1, 0.25], np.float32)}
  np.testing.assert_array_equal(search_numpy(small, query, 1, metric="dot").scores, [[1]])


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"queries": np.ones((2, 5))}, r"queries \(2, 5\) must be \[B, 4\]"),
    ({"k": 0}, "k = 0 must be at least 1"),
    ({"group_ids": np.ones(3, np.int32)}, r"group_ids has shape \(3,\), expected \(2,\)"),
    ({"metric": "learned"}, "unknown metric 'learned'; use 'cosine' or 'dot'"),
    ({"method": "fast"}, "unknown method 'fast'; use 'exact' or 'approx'"),
    ({"shape": (8,)}, "max_chunks = 12 is not divisible by the 8 shards of axis 'data'; use 16"),
    ({"shape": (8,), "axis": "rows"}, r"has no axis \['rows'\]"),
  ],
)
def test_errors_name_the_fix(kwargs, message):
  arguments = {"queries": np.ones((2, 4)), "k": 1, **kwargs}
  if shape := arguments.pop("shape", None):
    arguments["mesh"] = make_mesh(shape, ("data",))
  with pytest.raises(ValueError, match=message):
    search(init_memory(12, 4), **arguments)

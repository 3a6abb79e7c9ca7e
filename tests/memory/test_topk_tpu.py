"""The kernel of a TPU, interpreted, against the search that every device has, and compiled for devices not there."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from selfrag_jax.aot.chips import topology
from selfrag_jax.aot.hbm import moved
from selfrag_jax.aot.hlo import parse
from selfrag_jax.memory import topk, topk_tpu
from selfrag_jax.memory.scoring import OVERSAMPLING
from selfrag_jax.memory.state import init_memory, init_rows, partition_specs, put, write
from selfrag_jax.mesh import abstract, make_mesh, replicated

DTYPES = [jnp.float32, jnp.bfloat16, jnp.int8]
ROWS, WIDTH, QUERIES, K = 3 * topk_tpu.ROWS + 100, 48, 16, 5  # the last block ends within


def memory(rng, dtype):
  """Rows with duplicates and zeros, of three groups, some not valid."""
  rows = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
  rows[rng.integers(0, ROWS, 64)] = rows[0]
  rows[rng.integers(0, ROWS, 64)] = 0
  valid, groups = rng.random(ROWS) < 0.9, rng.integers(0, 3, ROWS).astype(np.int32)
  slots = np.arange(ROWS, dtype=np.int32)
  return put(init_rows(ROWS, WIDTH, dtype=dtype), slots, rows, valid=valid, group_ids=groups)


def by_kernel(state, queries, groups, bias, k, metric):
  score = partial(topk._first_pass, metric=metric, product=topk._products)
  candidates = partial(topk._binned_candidates, score, min(OVERSAMPLING * k, len(state.norms)), interpret=True)
  return jax.jit(partial(topk._top_k, k, metric, candidates))(state, queries, groups, bias)


@pytest.mark.parametrize("metric", ["cosine", "dot"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_finds_what_every_device_finds(dtype, metric):
  rng = np.random.default_rng(0)
  state = memory(rng, dtype)
  queries = rng.standard_normal((QUERIES, WIDTH)).astype(np.float32)
  queries[0] = 0
  groups, bias = rng.integers(0, 3, QUERIES).astype(np.int32), rng.standard_normal(ROWS).astype(np.float32)
  for arguments in ((None, None), (groups, None), (None, bias), (groups, bias)):
    expected = topk.search(state, queries, K, group_ids=arguments[0], bias=arguments[1], metric=metric)
    scores, slots = by_kernel(state, queries, *arguments, K, metric)
    np.testing.assert_array_equal(slots, expected.slots)
    np.testing.assert_array_equal(scores, expected.scores)


def test_the_best_rows_are_found_though_they_share_one_bin_or_are_nearly_all():
  rng = np.random.default_rng(1)
  queries = rng.standard_normal((2, WIDTH)).astype(np.float32)
  rows = 0.1 * rng.standard_normal((topk_tpu.ROWS, WIDTH)).astype(np.float32)
  rows[7 :: topk_tpu.LANES] += queries[0]  # the bin of row 7
  state = put(init_rows(len(rows), WIDTH), np.arange(len(rows), dtype=np.int32), rows)
  for k in (topk_tpu.BIN, topk_tpu.ROWS - 1):
    expected = topk.search(state, queries, k)
    scores, slots = by_kernel(state, queries, None, None, k, "cosine")
    np.testing.assert_array_equal(slots[:, :k], expected.slots)
    np.testing.assert_array_equal(scores[:, :k], expected.scores)
  assert set(np.asarray(slots[0, : topk_tpu.BIN]) % topk_tpu.LANES) == {7}


def test_a_ring_buffer_is_searched_too():
  rng = np.random.default_rng(3)
  rows, queries = (rng.standard_normal((n, WIDTH)).astype(np.float32) for n in (ROWS, 4))
  state = write(init_memory(ROWS, WIDTH, chunk_tokens=3), rows)
  scores, slots = by_kernel(state, queries, None, None, K, "cosine")
  expected = topk.search(state, queries, K)
  np.testing.assert_array_equal(slots, expected.slots)
  np.testing.assert_array_equal(scores, expected.scores)


def test_bins_hold_the_highest_scores_of_their_rows():
  state = memory(np.random.default_rng(2), jnp.float32)

  def score(rows, queries, group_ids, bias):
    return jnp.where(rows.valid, rows.norms, -jnp.inf)[None] + jnp.zeros((len(queries), 1))

  maxima = topk_tpu.bin_maxima(score, state, jnp.zeros((2, WIDTH)), None, None, interpret=True)
  norms = np.where(state.valid, state.norms, -np.inf)
  blocks = np.pad(norms, (0, topk_tpu.ROWS - 100), constant_values=-np.inf).reshape(-1, topk_tpu.BIN, topk_tpu.LANES)
  of_bins = blocks.max(1).ravel()
  np.testing.assert_array_equal(maxima, np.stack([of_bins, of_bins]))


@pytest.mark.parametrize(("rows", "width", "dtype"), [(1000, 8, jnp.float32), (2048, 2**17, jnp.int8)])
def test_what_does_not_fit_the_kernel_is_left_to_xla(rows, width, dtype):
  assert not topk_tpu.fits(jax.eval_shape(lambda: init_rows(rows, width, dtype=dtype)))
  assert topk_tpu.fits(jax.eval_shape(lambda: init_rows(2048, 4096 // 8, dtype=dtype)))


@pytest.mark.parametrize("queries", [1, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tpu_reads_the_memory_once_and_writes_no_scores(dtype, queries):
  mesh = make_mesh(4, 1, 1, topology("v5e:2x2")[1])
  shards, width = 2**20, 384
  state = jax.eval_shape(lambda: init_rows(4 * shards, width, dtype=dtype))
  specs = jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition_specs(state, ("data",)), is_leaf=_is_spec)
  asked = jax.ShapeDtypeStruct((queries, width), jnp.float32, sharding=replicated(mesh))
  program = jax.jit(lambda state, asked: topk.search(state, asked, 8, mesh=mesh)).lower(abstract(state, specs), asked)
  module = parse(program.compile().as_text())
  assert module.kernels == {"bin_maxima": 1}
  embeddings = shards * width * np.dtype(dtype).itemsize
  assert embeddings <= moved(module)[""] <= 1.15 * embeddings


def _is_spec(x):
  return isinstance(x, P)

"""The ring buffer against a Python loop over a list."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from selfrag_jax.memory.scoring import ordered_dot
from selfrag_jax.memory.state import (
  clear,
  delete,
  dequantize,
  init_memory,
  partition_specs,
  put,
  quantize,
  write,
)

jit_write = jax.jit(write, donate_argnums=0)
keep_write = jax.jit(write)


class ListRing:
  """The oracle: one row after another into a list."""

  def __init__(self, size):
    self.rows, self.cursor, self.written = [None] * size, 0, 0

  def write(self, embeddings, mask, group_ids, tokens, lengths):
    for keep, *row in zip(mask, embeddings, group_ids, tokens, lengths, strict=True):
      if keep:
        self.rows[self.cursor] = row
        self.cursor = (self.cursor + 1) % len(self.rows)
        self.written += 1


def assert_same(state, ring):
  np.testing.assert_array_equal(state.valid, [row is not None for row in ring.rows])
  assert (int(state.cursor), int(state.written)) == (ring.cursor, ring.written)
  for slot, row in enumerate(ring.rows):
    if row is not None:
      embedding, group_id, tokens, length = row
      np.testing.assert_array_equal(state.embeddings[slot], embedding)
      np.testing.assert_array_equal(state.tokens[slot], tokens)
      assert (int(state.group_ids[slot]), int(state.lengths[slot])) == (group_id, length)


@pytest.mark.parametrize(("C", "B"), [(7, 3), (7, 7), (5, 16), (1, 4)])
def test_write_equals_a_list(C, B):
  rng = np.random.default_rng(C * B)
  state, ring = init_memory(C, 4, chunk_tokens=3), ListRing(C)
  for _ in range(12):
    batch = {
      "mask": rng.random(B) < rng.choice([0, 0.5, 1]),
      "group_ids": rng.integers(0, 9, B).astype(np.int32),
      "tokens": rng.integers(0, 99, (B, 3)).astype(np.int32),
      "lengths": rng.integers(0, 4, B).astype(np.int32),
    }
    embeddings = rng.standard_normal((B, 4)).astype(np.float32)
    state = jit_write(state, embeddings, **batch)
    ring.write(embeddings, **batch)
    assert_same(state, ring)


def test_three_times_max_chunks_overwrites_oldest_first():
  C = 6
  state = init_memory(C, 1)
  for n in range(3 * C):
    state = jit_write(state, np.full((1, 1), n, np.float32))
    held = sorted(np.asarray(state.embeddings)[np.asarray(state.valid), 0])
    assert held == list(range(max(0, n + 1 - C), n + 1))
  assert int(state.written) == 3 * C


def test_filling_compiles_once_and_writes_in_place():
  fill = jax.jit(lambda *args, **kwargs: write(*args, **kwargs), donate_argnums=0)  # a cache of its own
  state = init_memory(16, 4, chunk_tokens=2)
  for n in range(10):
    before = state
    pointer = before.embeddings.unsafe_buffer_pointer()
    state = fill(state, np.full((3, 4), n, np.float32), mask=np.array([True, n % 2 == 0, True]))
    assert before.embeddings.is_deleted()
    assert state.embeddings.unsafe_buffer_pointer() == pointer
  assert fill._cache_size() == 1


def test_defaults_of_a_write():
  state = jit_write(init_memory(4, 2, chunk_tokens=3), np.ones((2, 2)), tokens=np.ones((2, 3), np.int32))
  np.testing.assert_array_equal(state.lengths, [3, 3, 0, 0])
  np.testing.assert_array_equal(state.group_ids, 0)
  np.testing.assert_array_equal(jit_write(state, np.ones((1, 2))).lengths, [3, 3, 0, 0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_storage_precision(dtype):
  rows = (
    np.random.default_rng(0).standard_normal((5, 33)).astype(np.float32)
    * np.logspace(-3, 3, 5, dtype=np.float32)[:, None]
  )
  rows[2] = 0
  state = jit_write(init_memory(5, 33, dtype=dtype), rows)
  assert state.embeddings.dtype == dtype
  stored = np.asarray(dequantize(state.embeddings, state.scales))
  largest = np.abs(rows).max(axis=1, keepdims=True)
  tolerance = {jnp.float32: 0 * rows, jnp.bfloat16: np.abs(rows) / 256, jnp.int8: largest / 254 * 1.0001}[dtype]
  assert (np.abs(stored - rows) <= tolerance).all()
  np.testing.assert_allclose(state.norms, np.linalg.norm(stored.astype(np.float64), axis=1), rtol=1e-6)


def test_rows_are_rounded_where_a_cast_and_its_reversal_would_be_left_out():
  rows = jax.ShapeDtypeStruct((2, 8), jnp.float32)
  lowered = jit_write.lower(init_memory(4, 8, dtype=jnp.bfloat16), rows).as_text()
  assert "reduce_precision" in lowered  # XLA's GPU compiler takes the two casts for nothing


def test_quantize_uses_the_whole_range():
  rows, scales = quantize(jnp.array([[-2.0, 1.0], [0.0, 0.0]]))
  np.testing.assert_array_equal(rows, [[-127, 64], [0, 0]])
  np.testing.assert_allclose(scales, [2 / 127, 1])


def test_deleted_slots_come_back_with_the_ring():
  state = jit_write(init_memory(4, 1), np.arange(4.0)[:, None])
  state = delete(state, np.array([False, True, True, False]))
  np.testing.assert_array_equal(state.valid, [True, False, False, True])
  state = jit_write(state, np.array([[10.0], [11.0]]))  # the ring continues at slot 0
  np.testing.assert_array_equal(state.valid, [True, True, False, True])
  np.testing.assert_array_equal(state.embeddings[:2, 0], [10, 11])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_cleared_equals_new(dtype):
  new = init_memory(4, 3, chunk_tokens=2, dtype=dtype)
  used = keep_write(new, np.ones((3, 3)), group_ids=np.ones(3, np.int32), tokens=np.ones((3, 2), np.int32))
  jax.tree.map(np.testing.assert_array_equal, clear(used), new)


def test_writing_to_shards_sends_no_rows():
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  single = init_memory(16, 4, chunk_tokens=2)
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition_specs(single))
  sharded = jax.device_put(single, shardings)
  rows = np.random.default_rng(0).standard_normal((11, 4)).astype(np.float32)
  program = keep_write.lower(sharded, rows).compile().as_text()
  assert not re.findall(r"all-gather|all-to-all|all-reduce|collective-permute", program)
  for _ in range(2):  # not donated: the two memories may share the buffers of their scalars
    single, sharded = keep_write(single, rows), keep_write(sharded, rows)
  assert sharded.embeddings.sharding.is_equivalent_to(shardings.embeddings, 2)
  jax.tree.map(np.testing.assert_array_equal, sharded, single)


def test_put_sets_slots_wherever_the_ring_stands():
  state = keep_write(init_memory(6, 4, chunk_tokens=2), np.ones((4, 4)), tokens=np.full((4, 2), 7))
  rows = np.arange(12, dtype=np.float32).reshape(3, 4)
  after = jax.jit(put)(state, np.array([5, 9, 1]), rows, valid=np.array([True, True, False]))  # 9 is outside
  np.testing.assert_array_equal(after.embeddings[np.array([5, 1])], rows[[0, 2]])
  np.testing.assert_array_equal(after.valid, [True, False, True, True, False, True])
  np.testing.assert_array_equal(after.lengths, [2, 0, 2, 2, 0, 0])
  np.testing.assert_allclose(after.norms[5], np.linalg.norm(rows[0]), rtol=1e-6)
  assert (int(after.cursor), int(after.written)) == (4, 4)
  with pytest.raises(ValueError, match=r"slots has shape \(2,\), expected \(3,\)"):
    put(state, np.array([1, 2]), rows)


@pytest.mark.parametrize("D", [1, 5, 64, 100])
def test_ordered_dot_has_the_same_bits_everywhere(D):
  rng = np.random.default_rng(D)
  x, y = rng.standard_normal((2, 37, D)).astype(np.float32)
  result = ordered_dot(x, y, np)
  np.testing.assert_array_equal(jax.jit(partial(ordered_dot, xp=jnp))(x, y), result)
  np.testing.assert_array_equal(jax.jit(partial(ordered_dot, xp=jnp))(x[5:8], y[5:8]), result[5:8])
  np.testing.assert_allclose(result, (x.astype(np.float64) * y).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"embeddings": np.ones((2, 5))}, r"\(2, 5\) must be \[B, 4\]"),
    ({"embeddings": np.ones(4)}, r"must be \[B, 4\]"),
    ({"mask": np.ones(3, bool)}, r"mask has shape \(3,\), expected \(2,\)"),
    ({"group_ids": np.ones((), np.int32)}, r"group_ids has shape \(\), expected \(2,\)"),
    ({"lengths": np.ones(1, np.int32)}, r"lengths has shape \(1,\), expected \(2,\)"),
    ({"tokens": np.ones((2, 4), np.int32)}, r"tokens has shape \(2, 4\), expected \(2, 3\): pad .* chunk_tokens = 3"),
  ],
)
def test_shape_errors_name_the_fix(kwargs, message):
  with pytest.raises(ValueError, match=message):
    write(init_memory(6, 4, chunk_tokens=3), **{"embeddings": np.ones((2, 4)), **kwargs})


def test_other_errors_name_the_fix():
  with pytest.raises(ValueError, match="int32 is not supported; use float32, bfloat16 or int8"):
    init_memory(4, 4, dtype=jnp.int32)
  with pytest.raises(ValueError, match="max_chunks = 0"):
    init_memory(0, 4)
  with pytest.raises(ValueError, match=r"expected \(4,\)"):
    delete(init_memory(4, 4), np.ones(3, bool))

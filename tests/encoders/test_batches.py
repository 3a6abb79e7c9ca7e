"""Batches of rows of all lengths: the vectors come back in their order, and batches are nearly full."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from selfrag_jax.encoders.batches import ROW_TOKENS, Spread, embed_by_length, reporting, trace_spread
from selfrag_jax.mesh import make_mesh


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 18, 50, 64, 700])
def test_rows_come_back_and_batches_are_nearly_full(n):
  rng = np.random.default_rng(n)
  rows = [rng.integers(1, 100, length).tolist() for length in rng.integers(0, 200, n)]
  shapes = []

  def embed(tokens, lengths):
    shapes.append((*tokens.shape, np.count_nonzero(lengths)))
    assert (tokens[np.arange(tokens.shape[1])[None] >= lengths[:, None]] == 0).all()
    return np.stack([tokens.sum(axis=1), lengths], axis=1)

  found = embed_by_length(rows, embed, 2, lambda length: -(-max(length, 1) // 16) * 16)
  np.testing.assert_array_equal(found, [[sum(row), len(row)] for row in rows] if n else np.zeros((0, 2)))
  for batch, width, _ in shapes:
    assert batch & (batch - 1) == 0
    assert batch * width <= ROW_TOKENS
  assert sum(batch for batch, *_ in shapes) <= 4 / 3 * n + 1


def test_every_batch_is_reported():
  told, rows = [], [[1]] * 300 + [[1] * 4000] * 5
  with reporting(told.append):
    embed_by_length(rows, lambda tokens, lengths: lengths[:, None], 1, lambda length: length)
  embed_by_length(rows, lambda tokens, lengths: lengths[:, None], 1, lambda length: length)
  assert sum(told) == len(rows)
  assert len(told) >= 4


def test_rows_are_spread_over_all_devices_and_kernels_see_them():
  meshes = []

  def function(params, tokens, lengths):
    meshes.append(dict(jax.sharding.get_abstract_mesh().shape))
    return tokens.sum(axis=1) * params + lengths

  spread, tokens = Spread(jax.jit(function), jnp.float32(2)), np.arange(48).reshape(16, 3)
  found = spread(tokens, np.ones(16, int))
  assert len(found.sharding.device_set) == 8
  assert meshes == [{"data": 8, "fsdp": 1, "sequence": 1, "tensor": 1}]
  assert len(spread(tokens[:3], np.ones(3, int)).sharding.device_set) == 1
  np.testing.assert_array_equal(found, 2 * tokens.sum(axis=1) + 1)


@pytest.mark.parametrize(("time", "rows"), [(256, 32), (300, 16), (ROW_TOKENS, 8)])
def test_a_full_batch_is_traced(time, rows):
  mesh = make_mesh()
  traced = trace_spread(lambda params, tokens, lengths: tokens.sum(axis=1) * params, np.float32(2), time, mesh)
  assert traced.out_info.shape == (rows,)

"""Batches of rows of all lengths: the vectors come back in their order, and batches are nearly full."""

import numpy as np
import pytest

from selfrag_jax.encoders.batches import ROW_TOKENS, embed_by_length, reporting


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

"""The progress bar of a build, which moves as texts are embedded."""

import numpy as np
import pytest

from selfrag_jax.encoders import cached
from selfrag_jax.encoders.base import FunctionEncoder
from selfrag_jax.encoders.batches import embed_by_length
from selfrag_jax.encoders.cached import BlockEncoder


class Bar(list):
  """What a bar of tqdm is told, as it stood then."""

  def __init__(self):
    super().__init__()
    self.n = 0

  def __call__(self, **options):
    return self

  def __enter__(self):
    return self

  def __exit__(self, *_):
    return None

  def update(self, n):
    assert n >= 0
    self.n += n
    self.append(self.n)


def in_batches(texts):
  rows = [[1] * 2000 for _ in texts]
  return embed_by_length(rows, lambda tokens, lengths: lengths[:, None].astype(np.float32), 1, lambda length: length)


@pytest.mark.parametrize(
  ("encoder", "stood"), [(in_batches, {4, 8, 10, 14, 15}), (lambda texts: np.ones((len(texts), 1)), {10, 15})]
)
def test_the_bar_moves_with_every_batch_inside_a_block(tmp_path, monkeypatch, encoder, stood):
  bar = Bar()
  monkeypatch.setattr(cached, "tqdm", bar)
  monkeypatch.setattr(cached, "BLOCK", 10)
  texts = [f"text {i}" for i in range(15)]
  BlockEncoder(FunctionEncoder(encoder), "mine", tmp_path)(texts)
  assert set(bar) == stood
  bar.n = 0
  bar.clear()
  BlockEncoder(FunctionEncoder(encoder), "mine", tmp_path)(texts)  # all blocks are there
  assert bar == [10, 15]

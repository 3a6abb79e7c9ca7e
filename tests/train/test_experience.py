"""The rows that an update of a policy reads: what counts is in them once, with its own values, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfrag_jax.train.experience import Experience, Trajectories, packed
from selfrag_jax.train.state import LossSums, TrainState, make_update, micro_batches

WIDTH = 12


def trajectories(n, seed, *, demonstrations=False, pulled=False):
  """Random ones, whose tokens tell them apart and are never 0."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, WIDTH + 1, n)
  inside = np.arange(WIDTH) < lengths[:, None]
  return Trajectories(
    advantages=rng.standard_normal(n).astype(np.float32),
    kept=rng.random(n) < 0.6,
    pulled=rng.random(n) < 0.3 if pulled else None,
    lengths=lengths,
    sampled=inside & (rng.random((n, WIDTH)) < 0.5),
    tokens=np.where(inside, 1000 * seed + 20 * np.arange(n)[:, None] + np.arange(WIDTH) + 1, 0),
    log_probs=None if demonstrations else rng.standard_normal((n, WIDTH)).astype(np.float64),
  )


@settings(max_examples=50, deadline=None)
@given(
  n=st.integers(1, 20), micro=st.integers(1, 4), pulled=st.booleans(), shown=st.booleans(), seed=st.integers(0, 99)
)
def test_rows_hold_what_counts_once_and_the_first_micro_batches_first(n, micro, pulled, shown, seed):
  parts = [trajectories(n, seed + 1, pulled=pulled)]
  if shown:
    parts.append(trajectories(n, seed + 200, demonstrations=True))
  n_rows = -(-n * len(parts) // micro) * micro
  rows = packed(parts, n_rows, micro)
  assert rows.tokens.shape == (n_rows, WIDTH)
  assert (rows.pulled is None, rows.shown is None) == (not pulled, not shown)
  assert rows.log_probs.dtype == np.float64
  found = {}
  for row in range(n_rows):
    ids = rows.segment_ids[row]
    used = ids[ids > 0]
    assert (ids[: len(used)] == used).all()  # padding is behind
    assert (np.diff(used) >= 0).all()
    for segment in range(1, ids.max(initial=0) + 1):
      inside = ids == segment
      found[tuple(rows.tokens[row, inside])] = row, inside
  n_counted = 0
  for part in parts:
    for i in range(n):
      pull = part.pulled is not None and part.pulled[i]
      text, here = tuple(part.tokens[i, : part.lengths[i]]), slice(part.lengths[i])
      assert (text in found) == (part.kept[i] or pull)
      if text not in found:
        continue
      n_counted += 1
      at, wanted = found[text], part.sampled[i, here]
      assert (rows.advantages[at] == part.advantages[i]).all()
      nothing = np.zeros_like(wanted)
      is_shown = part.log_probs is None
      assert rows.rewarded[at].tolist() == (wanted if part.kept[i] and not is_shown else nothing).tolist()
      if shown:
        assert rows.shown[at].tolist() == (wanted if part.kept[i] and is_shown else nothing).tolist()
      if pulled:
        assert rows.pulled[at].tolist() == (wanted if pull else nothing).tolist()
      if not is_shown:
        np.testing.assert_array_equal(rows.log_probs[at], part.log_probs[i, here])
  assert n_counted == len(found)
  tokens = [int((part.segment_ids > 0).sum()) for part in split(rows, micro)]
  used = sum(rows.segment_ids.any(axis=1))
  assert (np.diff(np.array(tokens) == 0) >= 0).all()  # what is empty comes last
  assert np.count_nonzero(tokens) == -(-used // (n_rows // micro))
  assert sum(tokens) == sum(map(len, found))


def test_the_longest_come_first_and_the_others_fill_their_rows():
  made = trajectories(4, 0)._replace(kept=np.ones(4, bool), lengths=np.array([6, 5, 7, 6]))
  assert packed([made], 4, 2).segment_ids.any(axis=1).tolist() == [True, False, True, False]  # 7 + 5, 6 + 6


def split(rows, micro):
  """The micro-batches, as an update makes them."""
  parts = micro_batches(jax.tree.map(jnp.asarray, rows), micro)
  return [Experience(*(None if column is None else column[i] for column in parts)) for i in range(micro)]


@pytest.mark.parametrize("skips", [True, False])
def test_an_update_leaves_out_micro_batches_without_a_token(skips):
  """Their loss is infinite here, and would spoil the sum."""
  rows = jnp.asarray([[1.0], [0.0], [2.0], [0.0]])  # micro-batches of rows 0 and 2, and 1 and 3

  def loss(params, batch):
    total = jnp.sum(params / batch)
    return LossSums(total, jnp.asarray(2.0), {})

  count = (lambda batch: (batch > 0).sum()) if skips else None
  optimizer = optax.sgd(0.1)
  params = jnp.asarray(1.0)
  state = TrainState(jnp.asarray(0), params, optimizer.init(params), jax.random.key(0))
  state, metrics = make_update(loss, optimizer, 2, count=count)(state, rows)
  if skips:
    assert metrics["loss"] == (1 + 0.5) / 2
    np.testing.assert_allclose(state.params, 1 - 0.1 * 0.75)
  else:
    assert not np.isfinite(metrics["loss"])

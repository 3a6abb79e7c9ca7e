"""The reward model: its loss is Bradley and Terry's, it reads to the last token alone, and it is loaded again."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from selfrag_jax.mesh import make_mesh
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, init_params
from selfrag_jax.model.reward_model import add_head, init_reward_model, score
from selfrag_jax.text.tokenizer import ByteTokenizer
from selfrag_jax.train.load import load_model, load_reward_model
from selfrag_jax.train.loop import LoopConfig, train
from selfrag_jax.train.optimizer import OptimizerConfig
from selfrag_jax.train.phases.reward_model import RewardModelConfig, RewardModelPhase, preference_loss

TOKENIZER = ByteTokenizer()
MODEL = ModelConfig(
  vocab_size=TOKENIZER.vocab_size, d_model=32, n_layers=2, n_heads=2, block_pattern="MT",
  ssm_state=8, ssm_head_dim=16, ssm_chunk=8, init_scale=0.2,
)  # fmt: skip
METADATA = {
  "config": {},
  "model": MODEL.to_dict(),
  "tokenizer": {"name": TOKENIZER.name, "fingerprint": TOKENIZER.fingerprint},
}


def render(index):
  """Prefer the row that ends like it begins."""
  rng = np.random.default_rng(index)
  first, other = rng.choice(4, 2, replace=False)
  middle = rng.integers(8, 16, size=rng.integers(1, 8)).tolist()
  return [int(first), *middle, int(first)], [int(first), *middle, int(other)]


def make_phase(devices=1, size=None, params=None, render=render, **options):
  optimizer = OptimizerConfig(learning_rate=5e-3)
  config = RewardModelConfig(**{"steps": 4, "batch_size": 8, "max_tokens": 12, "optimizer": optimizer, **options})
  mesh = make_mesh(-1, 1, 1, jax.devices()[:devices])
  start = {"mesh": mesh, "seed": 0, "params": params, "evaluate": lambda _: {"accuracy": 0.5}}
  return RewardModelPhase("reward_model", render, size, MODEL, config, **start)


@pytest.fixture(scope="module")
def params():
  """Parameters with a head that is not zero."""
  params = nn.unbox(init_reward_model(MODEL, jax.random.key(0)))
  kernel = jax.random.normal(jax.random.key(1), (MODEL.d_model,))
  return {**params, "head": {"kernel": kernel, "bias": jnp.float32(0.25)}}


@pytest.mark.parametrize("center_weight", [0.0, 0.3])
def test_the_loss_is_that_of_bradley_and_terry(center_weight):
  chosen, rejected = np.random.default_rng(0).normal(size=(2, 9)) * 3
  chosen[:3], rejected[:3] = (60, -60, 1), (-60, 60, 1)
  sums = preference_loss(jnp.asarray(chosen, jnp.float32), jnp.asarray(rejected, jnp.float32), center_weight)
  probability = 1 / (1 + np.exp(rejected - chosen))  # of the chosen one
  expected = -np.log(probability) + center_weight * (chosen + rejected) ** 2
  assert float(sums.loss) == pytest.approx(expected.sum(), rel=1e-5)
  right = (chosen > rejected).sum() + (chosen == rejected).sum() / 2
  assert (float(sums.weight), float(sums.metrics["accuracy"])) == (9, right)


def test_a_score_reads_the_state_of_the_last_token_and_no_padding(params):
  rows = [render(i)[0] for i in range(5)]
  expected = []
  for row in rows:
    states = np.asarray(LM(MODEL).apply(params["model"], jnp.asarray([row])), np.float64)
    expected.append(states[0, -1] @ np.asarray(params["head"]["kernel"], np.float64) + 0.25)
  lengths = np.array(list(map(len, rows)))
  for width in (lengths.max(), 16):
    for junk in (0, 77):
      tokens = np.full((5, width), junk, np.int32)
      for place, row in zip(tokens, rows, strict=True):
        place[: len(row)] = row
      np.testing.assert_allclose(score(MODEL, params, tokens, lengths), expected, atol=1e-4)
  assert score(MODEL, params, tokens, lengths).dtype == jnp.float32


def test_a_fresh_head_prefers_nothing_and_the_model_is_the_given_one():
  model = nn.unbox(init_params(MODEL, jax.random.key(3)))
  phase = make_phase(params=model)
  with jax.set_mesh(phase._mesh):
    state = phase.initial_state()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), jax.device_get(add_head(MODEL, model)))
    _, metrics = phase.step(state, phase.batch(0))
  assert float(metrics["loss"]) == pytest.approx(np.log(2))
  assert float(metrics["accuracy"]) == 0.5


def test_devices_and_micro_batches_change_nothing():
  found = []
  for devices, accumulate in ((1, 1), (4, 2)):
    phase = make_phase(devices, accumulate=accumulate)
    with jax.set_mesh(phase._mesh):
      state = phase.initial_state()
      for step in range(3):
        state, metrics = phase.step(state, phase.batch(step))
    found.append((jax.device_get(state.params), float(metrics["loss"])))
  assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-4), found[0][0], found[1][0])


def test_it_learns_what_is_preferred():
  phase = make_phase(steps=150, batch_size=32)
  accuracy = []
  with jax.set_mesh(phase._mesh):
    state = phase.initial_state()
    for step in range(150):
      state, metrics = phase.step(state, phase.batch(step))
      accuracy.append(float(metrics["accuracy"]))
  assert np.mean(accuracy[-10:]) > 0.95  # of pairs that it has not seen


def test_a_run_that_was_interrupted_ends_like_one_that_was_not(tmp_path):
  def crashing(index):
    if index >= 3 * 8:
      raise RuntimeError("crash")
    return render(index)

  states = {}
  loop = LoopConfig(checkpoint_every=2)
  with jax.set_mesh(make_phase()._mesh):
    states["whole"] = train(make_phase(), tmp_path / "whole", loop, METADATA)
    with pytest.raises(RuntimeError, match="crash"):
      train(make_phase(render=crashing), tmp_path / "resumed", loop, METADATA)
    states["resumed"] = train(make_phase(), tmp_path / "resumed", loop, METADATA)
  jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(states[name].params) for name in states))

  rewards = load_reward_model(tmp_path / "resumed", tokenizer=TOKENIZER)
  batch = make_phase().batch(0)
  tokens, lengths = batch["tokens"].reshape(16, 12), batch["lengths"].reshape(16)
  found = np.asarray(rewards(tokens, lengths))
  assert (found.shape, found.dtype) == ((16,), np.float32)
  scores = np.asarray(score(MODEL, jax.device_get(states["whole"].params), tokens, lengths), np.float64)
  assert np.ptp(scores) > 0
  np.testing.assert_allclose(found, 1 / (1 + np.exp(-scores)), atol=1e-5)

  with pytest.raises(ValueError, match="reward_model holds a reward model, which writes no text: see load_reward"):
    load_model(tmp_path / "whole")
  other = ByteTokenizer()
  other.fingerprint = "another"
  with pytest.raises(ValueError, match="was trained with the tokenizer"):
    load_reward_model(tmp_path / "whole", tokenizer=other)


def test_no_reward_model_is_said(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"checkpoints/reward_model has no intact checkpoint: train one, with"):
    load_reward_model(tmp_path / "nowhere")
  assert not (tmp_path / "nowhere").exists()


def test_pairs_that_are_too_long_are_left_out_and_counted():
  rows = {0: 5, 1: 20, 2: 20, 3: 5}
  render = lambda index: ([index] * 5, [index] * rows[index % 4])
  batch = make_phase(size=4, render=render, batch_size=4).batch(0)
  assert batch["tokens"][:, 0, 0].tolist() == [0, 3, 3, 3]
  with pytest.raises(ValueError, match=r"a conversation of 20 tokens exceeds reward_model\.max_tokens = 12"):
    make_phase(render=render, batch_size=4).batch(0)
  with pytest.raises(ValueError, match=r"none of 4 preference pairs fits into reward_model\.max_tokens = 12"):
    make_phase(size=4, render=lambda _: ([0] * 20, [0] * 5))
  with pytest.raises(ValueError, match="there are no preference pairs"):
    make_phase(size=0)

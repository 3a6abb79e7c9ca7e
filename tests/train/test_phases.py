"""Phases on a mesh: eight devices teach what one does, and activations are constrained."""

import jax
import numpy as np
import pytest

from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.generate.sampling import SamplingConfig
from selfrag_jax.mesh import make_mesh
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.tasks.two_hop_search import TwoHopSearch
from selfrag_jax.text.chat import render_conversation
from selfrag_jax.train.episodes import MemoryConfig, Player
from selfrag_jax.train.optimizer import OptimizerConfig
from selfrag_jax.train.phases.refrag import Refrag
from selfrag_jax.train.phases.sft import SFT
from selfrag_jax.train.settings import EvalConfig, RLConfig, SFTConfig

TASK = TwoHopSearch(n_entities=8, n_relations=2)
MODEL = ModelConfig(
  vocab_size=TASK.tokenizer.vocab_size, d_model=32, n_layers=2, n_heads=2, block_pattern="TM",
  ssm_state=8, ssm_head_dim=16, ssm_chunk=16, init_scale=0.2,
)  # fmt: skip
SFT_CONFIG = SFTConfig(steps=3, batch_size=8, max_tokens=64, demonstrations="random")


def run(mesh):
  """Three steps of SFT, then one of RL with greedy rollouts, which both meshes must decode alike."""
  losses = []
  with jax.set_mesh(mesh):
    sft = SFT("sft", TASK, MODEL, SFT_CONFIG, max_hops=2, mesh=mesh, seed=0, params=None, evaluate_policy=lambda _: {})
    state = sft.initial_state()
    for batch in sft.batches(0):
      state, metrics = sft.step(state, batch)
      losses.append(float(metrics["loss"]))
    rollout = RolloutConfig(2, 1, 4, 2, SamplingConfig(temperature=0.0))
    rl = RLConfig(steps=1, questions_per_step=8, rollouts_per_question=2, optimizer=OptimizerConfig(learning_rate=0.1))
    player = Player(TASK, MODEL, MemoryConfig(d_embed=32), mesh)
    episodes = player.play(state.params, "train", np.arange(8), rollout, jax.random.key(0), repeats=2)
    phase = Refrag("rl", player, MODEL, rl, rollout, EvalConfig(), mesh=mesh, seed=0, params=state.params)
    lowered = {**sft.lower(), **{f"rl {name}": program for name, program in phase.lower().items()}}
    return losses, jax.device_get(state.params), episodes.host, lowered


def sft_phase(task, **overrides):
  config = SFTConfig(**({"steps": 20, "batch_size": 4, "max_tokens": 160, "demonstrations": "gold"} | overrides))
  mesh = make_mesh((1, 1, 1), jax.devices()[:1])
  return SFT("sft", task, MODEL, config, max_hops=2, mesh=mesh, seed=3, params=None, evaluate_policy=lambda _: {})


class Finite:
  """The task with its first questions only."""

  def __init__(self, n):
    self.n = n

  def __getattr__(self, name):
    return getattr(TASK, name)

  def size(self, split):
    return self.n


@pytest.mark.parametrize("task", [TASK, Finite(11)], ids=["endless", "finite"])
def test_rows_hold_whole_demonstrations_apart_from_each_other(task):
  phase = sft_phase(task)
  batch, rows = phase.batch(7), [phase.row(7 * 4 + i) for i in range(4)]
  assert max(map(len, rows)) > 1
  pad = task.tokenizer.special["<|pad|>"]
  for i, row in enumerate(rows):
    ends = 0
    for segment, index in enumerate(row, 1):
      ids, mask = render_conversation(task.tokenizer, task.demonstration("sft", index, "gold", 2), task.template)
      [inside] = np.nonzero(batch["segment_ids"][i] == segment)
      assert inside.tolist() == list(range(ends, ends + len(ids)))
      assert batch["tokens"][i, inside].tolist() == ids
      assert batch["mask"][i, inside].tolist() == [bool(x) for x in mask]
      ends += len(ids)
    assert (batch["segment_ids"][i, ends:] == 0).all()
    assert not batch["mask"][i, ends:].any()
    assert (batch["tokens"][i, ends:] == pad).all()


def test_a_data_set_that_ends_is_shown_whole_in_every_epoch():
  phase = sft_phase(Finite(11))
  shown = [index for row in range(40) for index in phase.row(row)]
  epochs = [shown[i : i + 11] for i in range(0, len(shown) - 10, 11)]
  assert len(epochs) > 3
  assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
  assert epochs[0] != epochs[1]


def test_a_row_does_not_depend_on_the_rows_made_before_it():
  for task in (TASK, Finite(11)):
    walked, jumped = sft_phase(task), sft_phase(task)
    for step in range(5):
      expected = walked.batch(step)
    np.testing.assert_equal(jumped.batch(4), expected)


def test_endless_rows_share_no_demonstration():
  phase = sft_phase(TASK)
  shown = [index for row in range(40) for index in phase.row(row)]
  assert len(set(shown)) == len(shown)


def test_demonstrations_that_are_too_long():
  with pytest.raises(ValueError, match=r"a demonstration of \d+ tokens exceeds sft\.max_tokens = 8"):
    sft_phase(TASK, max_tokens=8).batch(0)
  with pytest.raises(ValueError, match=r"no demonstration fits into sft\.max_tokens = 8"):
    sft_phase(Finite(11), max_tokens=8)


@pytest.fixture(scope="module")
def single():
  return run(make_mesh((1, 1, 1), jax.devices()[:1]))


@pytest.fixture(scope="module")
def sharded():
  return run(make_mesh((2, 2, 2)))


def test_eight_devices_train_as_one(single, sharded):
  np.testing.assert_allclose(single[0], sharded[0], rtol=1e-5)
  assert single[0][-1] < single[0][0]
  # AdamW's first steps divide small gradients by their own size: compare what the model computes, not its last bits
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), single[1], sharded[1])


def test_eight_devices_roll_out_as_one(single, sharded):
  for name in ("tokens", "sampled", "lengths", "slots"):
    np.testing.assert_array_equal(getattr(single[2], name), getattr(sharded[2], name), err_msg=name)


def test_activations_are_constrained_in_every_program(sharded):
  """Logical constraints are silent without a mesh; count that they arrive: two a layer and one of the embedding."""
  for name, lowered in sharded[3].items():
    constraints = lowered.as_text().count("sdy.sharding_constraint") + lowered.as_text().count('"Sharding"')
    assert constraints >= 2 * MODEL.n_layers + 1, (name, constraints)

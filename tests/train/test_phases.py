"""Phases on a mesh: eight devices train like one, and activations are constrained."""

import dataclasses

import jax
import numpy as np
import pytest

from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.mesh import batch_sharding, make_mesh
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM
from selfrag_jax.tasks.two_hop_search import TwoHopSearch
from selfrag_jax.text.chat import render_conversation
from selfrag_jax.train.optimizer import OptimizerConfig
from selfrag_jax.train.phases.refrag import Refrag, RLConfig
from selfrag_jax.train.phases.sft import SFT, SFTConfig
from selfrag_jax.train.rollouts import MemoryConfig, RolloutRunner
from selfrag_jax.train.state import param_shardings

TASK = TwoHopSearch(n_entities=8, n_relations=2)
MODEL = ModelConfig(
  vocab_size=TASK.tokenizer.vocab_size, d_model=32, n_layers=2, n_heads=2, block_pattern="TM",
  ssm_state=8, ssm_head_dim=16, ssm_chunk=16, init_scale=0.2, tie_embeddings=False,
)  # fmt: skip
SFT_CONFIG = SFTConfig(steps=3, batch_size=8, max_tokens=64, demonstrations="random")


RL_CONFIG = RLConfig(steps=1, questions_per_step=8, rollouts_per_question=2, control="random_reward")
ROLLOUT = RolloutConfig(2, 1, 4, 2)


def run(mesh):
  """Three steps of SFT: the losses, the parameters, and the traced programs of both phases."""
  losses = []
  with jax.set_mesh(mesh):
    sft = SFT("sft", TASK, MODEL, SFT_CONFIG, max_hops=2, mesh=mesh, seed=0, params=None, evaluate=lambda _: {})
    state = sft.initial_state()
    for batch in sft.batches(0):
      state, metrics = sft.step(state, batch)
      losses.append(float(metrics["loss"]))
    programs = {
      **sft.trace(),
      **{f"rl {name}": program for name, program in refrag(mesh, state.params, runner(mesh)).trace().items()},
    }
    return losses, jax.device_get(state.params), programs


def runner(mesh):
  return RolloutRunner(TASK, MODEL, MemoryConfig(d_embed=32), mesh)


def refrag(mesh, params, runner):
  return Refrag("rl", runner, MODEL, RL_CONFIG, ROLLOUT, mesh=mesh, seed=0, params=params, evaluate=lambda _: {})


def sft_phase(task, **overrides):
  config = SFTConfig(**({"steps": 20, "batch_size": 4, "max_tokens": 160, "demonstrations": "gold"} | overrides))
  mesh = make_mesh(1, 1, 1, jax.devices()[:1])
  return SFT("sft", task, MODEL, config, max_hops=2, mesh=mesh, seed=3, params=None, evaluate=lambda _: {})


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
  assert len(shown) > 4 * 11
  assert shown == list(range(len(shown)))


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


def test_demonstrations_that_are_too_long_are_left_out_of_an_epoch(caplog):
  class Long(Finite):
    def demonstration(self, split, index, strategy, max_hops):
      words = 200 if index % 11 in (0, 4) else 1
      return {"messages": [{"role": "assistant", "content": "port " * words}]}

  phase = sft_phase(Long(11))
  assert "2 of 11 demonstrations exceed sft.max_tokens: left out" in caplog.text
  shown = [index for row in range(4) for index in phase.row(row)]
  assert len(shown) > 11
  assert shown == [index for index in range(shown[-1] + 1) if index % 11 not in (0, 4)]


ONE, EIGHT = make_mesh(1, 1, 1, jax.devices()[:1]), make_mesh(2, 2, 2)


@pytest.fixture(scope="module")
def single():
  return run(ONE)


@pytest.fixture(scope="module")
def sharded():
  return run(EIGHT)


def test_eight_devices_train_as_one(single, sharded):
  np.testing.assert_allclose(single[0], sharded[0], rtol=1e-5)
  assert single[0][-1] < single[0][0]
  # AdamW's first steps divide small gradients by their own size: compare what the model computes, not its last bits
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), single[1], sharded[1])


@pytest.fixture(scope="module")
def params(single):
  """One copy of the parameters for both meshes, whose policy is pushed to begin with a search."""
  head, asked = single[1]["params"]["unembed"].copy(), TASK.batch("train", range(8))
  beginning = jax.jit(LM(MODEL).apply)(single[1], asked.prompts)[:, -1].mean(axis=0)
  head[TASK.tokenizer.special["<|search_start|>"]] = beginning
  return {"params": single[1]["params"] | {"unembed": head}}


@pytest.fixture(scope="module")
def episodes(params):
  """What the policy writes on one device, and on eight."""
  played = []
  for mesh in (ONE, EIGHT):
    placed = jax.device_put(params, param_shardings(MODEL, mesh))
    with jax.set_mesh(mesh):
      played.append(runner(mesh).run(placed, TASK.batch("train", range(8)), ROLLOUT, jax.random.key(0), repeats=2))
  return played


def test_eight_devices_roll_out_as_one(episodes):
  one, eight = (played.host for played in episodes)
  for name in ("tokens", "sampled", "lengths", "slots"):
    np.testing.assert_array_equal(getattr(one, name), getattr(eight, name), err_msg=name)
  np.testing.assert_allclose(one.log_probs, eight.log_probs, atol=1e-4)
  assert (one.slots >= 0).sum() > 8


def test_eight_devices_reinforce_as_one(params, episodes):
  """The same rollouts and rewards on both meshes: one step gives the same gradient, and the same parameters."""
  results = []
  for mesh in (ONE, EIGHT):
    with jax.set_mesh(mesh):
      judge = runner(mesh)
      judge.run = lambda *_, mesh=mesh, **__: episodes[0]._replace(
        rollout=jax.device_put(episodes[0].host, batch_sharding(mesh))
      )
      phase = refrag(mesh, params, judge)
      results.append(jax.device_get(phase.step(phase.initial_state(), phase.batch(0))))
  (one, one_metrics), (eight, eight_metrics) = results
  assert one_metrics["grad_norm"] > 0.01
  for name, value in one_metrics.items():
    np.testing.assert_allclose(value, eight_metrics[name], rtol=1e-3, atol=1e-6, err_msg=name)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one.opt_state, eight.opt_state)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), one.params, eight.params)


def test_activations_are_constrained_in_every_program(sharded):
  """Logical constraints are silent without a mesh; count that they arrive: two a layer and one of the embedding."""
  for name, traced in sharded[2].items():
    lowered = traced.lower()
    constraints = lowered.as_text().count("sdy.sharding_constraint") + lowered.as_text().count('"Sharding"')
    assert constraints >= 2 * MODEL.n_layers + 1, (name, constraints)


def test_muon_trains_on_eight_devices_what_it_trains_on_one():
  losses = []
  for mesh in (make_mesh(), make_mesh(1, 1, 1, jax.devices()[:1])):
    with jax.set_mesh(mesh):
      config = dataclasses.replace(SFT_CONFIG, optimizer=OptimizerConfig(name="muon", learning_rate=5e-3))
      sft = SFT("sft", TASK, MODEL, config, max_hops=2, mesh=mesh, seed=0, params=None, evaluate=lambda _: {})
      state = sft.initial_state()
      for batch in sft.batches(0):
        state, metrics = sft.step(state, batch)
      losses.append(float(metrics["loss"]))
  np.testing.assert_allclose(*losses, rtol=1e-4)

"""The training loop: resumed = uninterrupted, and every way to stop leaves a good checkpoint."""

import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.mesh import make_mesh
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.tasks.two_hop_search import TwoHopSearch
from selfrag_jax.train import checkpoint
from selfrag_jax.train.alarm import CollapseError
from selfrag_jax.train.data import batches
from selfrag_jax.train.loop import LoopConfig, NonFiniteLossError, checkpoints, train
from selfrag_jax.train.phases.refrag import Refrag, RLConfig
from selfrag_jax.train.phases.sft import SFT, SFTConfig
from selfrag_jax.train.rollouts import MemoryConfig, RolloutRunner, evaluate
from tests.train.walk import METADATA, STEPS, Walk, assert_same_run, config, saved_steps


def test_every_step_is_logged_evaluated_and_saved(tmp_path, uninterrupted):
  _, metrics = uninterrupted
  assert [row["step"] for row in metrics if "loss" in row] == list(range(1, STEPS + 1))
  assert [row["step"] for row in metrics if "eval/score" in row] == [4, 8, 12]
  train(Walk(steps=10), tmp_path, config(), METADATA)
  assert saved_steps(tmp_path) == [4, 9, 10]  # the best, and the two latest
  assert checkpoint.read_metadata(checkpoints(tmp_path, "walk")) == METADATA | {"phase": "walk", "data_position": 10}


@pytest.mark.parametrize("crash", [1, 3, 4, 8, 12])
def test_a_run_that_crashed_ends_like_one_that_did_not(tmp_path, uninterrupted, crash):
  def fail(step, metrics):
    if step == crash:
      raise KeyboardInterrupt
    return metrics

  with pytest.raises(KeyboardInterrupt):
    train(Walk(on_step=fail), tmp_path, config(), METADATA)
  assert_same_run(tmp_path, train(Walk(), tmp_path, config(), METADATA), uninterrupted)


class Watched(Walk):
  """A walk that notes what it is shown, and ends at a step."""

  def __init__(self, end=None):
    super().__init__()
    self.seen, self.end = [], end

  def watch(self, step, metrics):
    if "loss" in metrics:
      self.seen.append((step, metrics["loss"]))
    if step == self.end:
      raise CollapseError("the policy has collapsed")


def test_a_phase_that_watches_a_collapse_ends_with_its_best_checkpoint(tmp_path):
  with pytest.raises(CollapseError, match="the policy has collapsed"):
    train(Watched(end=11), tmp_path, config(), METADATA)
  assert saved_steps(tmp_path) == [4, 8, 9]  # the best, and the two latest


def test_a_phase_watches_every_step_and_a_resumed_one_those_before_it(tmp_path, uninterrupted):
  with pytest.raises(CollapseError, match="the policy has collapsed"):
    train(Watched(end=7), tmp_path, config(), METADATA)
  assert saved_steps(tmp_path) == [4, 6]  # the step that ended it is not saved
  resumed = Watched()
  assert_same_run(tmp_path, train(resumed, tmp_path, config(), METADATA), uninterrupted)
  assert resumed.seen == [(row["step"], row["loss"]) for row in uninterrupted[1] if "loss" in row]


# 7 is an ordinary step, 9 and 12 would be saved
@pytest.mark.parametrize(("name", "value"), [("loss", np.nan), ("loss", np.inf), ("grad_norm", np.nan)])
@pytest.mark.parametrize("bad", [7, 9, 12])
def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(tmp_path, bad, name, value):
  phase = Walk(on_step=lambda step, metrics: metrics | ({name: value} if step == bad else {}))
  with pytest.raises(NonFiniteLossError, match=f"{name} is {value} at step {bad};"):
    train(phase, tmp_path, config(), METADATA)
  good = max(step for step in (3, 4, 6, 8, 9) if step < bad)
  assert saved_steps(tmp_path)[-1] == good
  # nothing is lost: the run goes on from there
  resumed = Walk()
  train(resumed, tmp_path, config(), METADATA)
  assert resumed.taken[0] == good + 1


# 6 would be saved as a checkpoint, 8 with an evaluation, 12 is the last step; 7 is seen by the save of step 8
@pytest.mark.parametrize("part", ["params", "opt_state"])
@pytest.mark.parametrize(("bad", "seen"), [(6, 6), (7, 8), (8, 8), (12, 12)])
def test_an_update_that_destroys_the_state_is_not_saved_and_the_only_good_checkpoint_stays(tmp_path, bad, seen, part):
  class Destroyed(Walk):
    def initial_state(self):
      return super().initial_state().replace(opt_state={"mu": jnp.zeros(2)})

    def step(self, state, batch):
      state, metrics = super().step(state, batch)  # loss and gradient of the step are finite
      if self.taken[-1] == bad:
        state = state.replace(**{part: {name: x.at[0].set(jnp.nan) for name, x in getattr(state, part).items()}})
      return state, metrics | {"loss": 1.0}

    def evaluate(self, state):
      assert not np.isnan(state.params["w"]).any()
      return super().evaluate(state)

  name = {"params": "params/w", "opt_state": "opt_state/mu"}[part]
  good = max(step for step in (3, 4, 6, 8, 9) if step < bad)
  phase = Destroyed()
  phase.best_metric = None
  with pytest.raises(NonFiniteLossError, match=f"{name} is not finite after step {seen}, which is not saved"):
    train(phase, tmp_path, config(keep_checkpoints=1), METADATA)
  assert saved_steps(tmp_path) == [good]
  assert checkpoint.load(checkpoints(tmp_path, "walk"), {"params": {"w": jnp.zeros(3)}}).step == good


def test_a_finished_phase_takes_no_step(tmp_path):
  first = train(Walk(), tmp_path, config(), METADATA)
  again = Walk()
  state = train(again, tmp_path, config(), METADATA)
  assert again.taken == []
  np.testing.assert_array_equal(state.params["w"], first.params["w"])


def test_fewer_steps_than_are_taken_are_refused(tmp_path):
  train(Walk(), tmp_path, config(), METADATA)
  with pytest.raises(ValueError, match=r"walk is already at step 12, config\.walk\.steps is 10: use another workdir"):
    train(Walk(steps=10), tmp_path, config(), METADATA)
  assert saved_steps(tmp_path)[-1] == 12


@pytest.mark.parametrize("name", ["model", "origin"])
def test_another_model_or_origin_is_refused(tmp_path, name):
  train(Walk(steps=6), tmp_path, config(), METADATA | {name: {"steps": 3, "kind": "T"}})
  with pytest.raises(ValueError, match=rf"another {name} \({{'steps': 3}}, this run has {{'steps': 4}}\)"):
    train(Walk(), tmp_path, config(), METADATA | {name: {"steps": 4, "kind": "T"}})
  assert saved_steps(tmp_path)[-1] == 6


def test_a_phase_that_another_one_began_from_takes_no_step_beyond(tmp_path):
  train(Walk(steps=6), tmp_path, config(), METADATA)
  later, origin = Walk(steps=3), {"origin": {"phase": "walk", "steps": 6}}
  later.name = "later"
  train(later, tmp_path, config(), METADATA | origin)
  longer = Walk(steps=9)
  with pytest.raises(ValueError, match=r"later began where walk was at step 6, config\.walk\.steps is 9: use another"):
    train(longer, tmp_path, config(), METADATA)
  assert longer.taken == []
  assert saved_steps(tmp_path)[-1] == 6
  shutil.rmtree(checkpoints(tmp_path, "walk"))  # what was lost is trained again
  train(Walk(steps=6), tmp_path, config(), METADATA)
  train(later, tmp_path, config(), METADATA | origin)


def test_a_resumed_run_says_what_has_changed(tmp_path, capsys):
  train(Walk(steps=6), tmp_path, config(), {"config": {"walk": {"steps": 6, "rate": 0.1}, "walks": ((1,), (1, None))}})
  assert capsys.readouterr().err.count("continues") == 0
  train(Walk(), tmp_path, config(), {"config": {"walk": {"steps": 12, "decay": 0.5}, "walks": ((1,), (1, None))}})
  said = capsys.readouterr().err.splitlines()
  assert [line.strip() for line in said if "walk" in line and "eta" not in line.lower()] == [
    "walk: continues after step 6 of 12",
    "config.walk.decay was None, is now 0.5",
    "config.walk.rate was 0.1, is now None",
    "config.walk.steps was 6, is now 12",
  ]


def test_data_that_ends_early_is_an_error(tmp_path):
  phase = Walk()
  phase.batches = lambda start: iter([np.zeros(3, np.float32)] * 2)
  with pytest.raises(RuntimeError, match="walk ran out of data before step 12"):
    train(phase, tmp_path, config(), METADATA)


@pytest.mark.parametrize("start", [0, 1, 6, 9, 10])
def test_batches_are_a_function_of_the_step(start):
  make = lambda step: {"x": np.random.default_rng([3, step]).normal(size=4)}
  got = list(batches(make, start, 10))
  assert len(got) == 10 - start
  for step, batch in enumerate(got, start):
    np.testing.assert_array_equal(batch["x"], make(step)["x"])


def test_an_error_in_making_a_batch_arrives():
  def make(step):
    if step == 2:
      raise ValueError("a bad row")
    return step

  with pytest.raises(ValueError, match="a bad row"):
    list(batches(make, 0, 4))


class Counted:
  """A phase that notes what each of its steps and evaluations compiled."""

  def __init__(self, phase, compiled):
    self._phase, self._compiled, self.by_step, self.by_evaluation = phase, compiled, [], []

  def __getattr__(self, name):
    return getattr(self._phase, name)

  def _counted(self, call, notes, *args):
    before = len(self._compiled)
    result = call(*args)
    notes.append(self._compiled[before:])
    return result

  def step(self, state, batch):
    return self._counted(self._phase.step, self.by_step, state, batch)

  def evaluate(self, state):
    return self._counted(self._phase.evaluate, self.by_evaluation, state)


@pytest.fixture
def compiled():
  """The names of the programs that are compiled meanwhile."""
  names, logger = [], logging.getLogger("jax._src.interpreters.pxla")
  handler = logging.Handler()
  handler.emit = lambda record: names.append(record.getMessage()) if record.msg.startswith("Compiling") else None
  logger.addHandler(handler)
  with jax.log_compiles(True):
    yield names
  logger.removeHandler(handler)


def test_a_phase_compiles_in_its_first_step_and_evaluation_only(tmp_path, compiled):
  mesh = make_mesh(1, 2, 2, jax.devices()[:4])
  task = TwoHopSearch(n_entities=4, n_relations=2)
  model = ModelConfig(
    task.tokenizer.vocab_size, d_model=32, n_layers=2, n_heads=2, block_pattern="MT", ssm_state=8, ssm_head_dim=16
  )
  rollout = RolloutConfig(max_hops=1, max_query_tokens=2, max_answer_tokens=1)
  runner = RolloutRunner(task, model, MemoryConfig(d_embed=16), mesh)
  sft_config = SFTConfig(steps=4, batch_size=8, max_tokens=64, accumulate=2)
  loop = LoopConfig(checkpoint_every=2, eval_every=1)
  score = lambda params: evaluate(runner, params, "valid", 4, 4, rollout).means()
  with jax.set_mesh(mesh):
    sft = SFT("sft", task, model, sft_config, max_hops=2, mesh=mesh, seed=0, params=None, evaluate=score)
    counted = Counted(sft, compiled)
    params = train(counted, tmp_path, loop, METADATA).params
    assert counted.by_step[0]
    assert counted.by_evaluation[0]
    assert counted.by_step[1:] == counted.by_evaluation[1:] == [[]] * 3
    rl_config = RLConfig(steps=4, questions_per_step=4, rollouts_per_question=2, kl_weight=0.1)
    rl = Refrag("rl", runner, model, rl_config, rollout, mesh=mesh, seed=0, params=params, evaluate=score)
    counted = Counted(rl, compiled)
    state = train(counted, tmp_path, loop, METADATA)
    assert counted.by_step[0]
    assert counted.by_step[1:] == [[]] * 3
    assert counted.by_evaluation == [[]] * 4  # phase sft has compiled it
    # and training has not pulled the parameters apart from where the mesh wants them
    wanted = rl.abstract_state().params
    same = jax.tree.map(lambda x, want: x.sharding.is_equivalent_to(want.sharding, x.ndim), state.params, wanted)
    assert all(jax.tree.leaves(same))

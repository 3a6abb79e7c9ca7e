"""The alarm of reinforcement: it fires on collapses and not on learning, and a resumed run remembers."""

import jax
import numpy as np
import pytest

from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.mesh import make_mesh
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.tasks.two_hop_search import TwoHopSearch
from selfrag_jax.train.alarm import AlarmConfig, CollapseAlarm, CollapseError
from selfrag_jax.train.checkpoint import load
from selfrag_jax.train.loop import LoopConfig, checkpoints, train
from selfrag_jax.train.phases.refrag import Refrag, RLConfig
from selfrag_jax.train.rollouts import MemoryConfig, RolloutRunner

CONFIG = AlarmConfig(window=5)
GOOD = {"exact_match": 0.8, "valid": 0.95, "searches": 2.0, "right_log_prob": -0.2, "surprise": 0.3}


def watch(alarm, rows):
  for step, row in enumerate(rows, 1):
    alarm.watch(step, row)


def learning(n):
  """Metrics of a run that learns, with noise."""
  rng = np.random.default_rng(0)
  for i in range(n):
    share = min(1.0, i / 40)
    yield {
      "exact_match": np.clip(0.05 + 0.9 * share + rng.normal(0, 0.03), 0, 1),
      "valid": np.clip(0.85 + 0.15 * share + rng.normal(0, 0.03), 0, 1),
      "searches": 1.9 + rng.normal(0, 0.05),
      "right_log_prob": -0.5 + 0.4 * share + rng.normal(0, 0.05),
      "surprise": 0.5 - 0.4 * share + rng.normal(0, 0.03),
    }


def test_learning_does_not_set_it_off():
  watch(CollapseAlarm(CONFIG), learning(200))


@pytest.mark.parametrize(
  ("name", "value", "said"),
  [
    ("exact_match", 0.3, r"exact_match was 0\.8 over 5 steps and is 0\.3"),
    ("valid", 0.1, "valid was"),
    ("searches", 0.5, "searches was"),
    ("right_log_prob", -2.0, r"right_log_prob was -0\.2 over 5 steps and is -2 at step 15"),
    ("surprise", 3.0, r"surprise was 0\.3 over 5 steps and is"),
  ],
)
def test_a_collapse_sets_it_off(name, value, said):
  with pytest.raises(CollapseError, match=said):
    watch(CollapseAlarm(CONFIG), [GOOD] * 10 + [{**GOOD, name: value}] * 10)
  watch(CollapseAlarm(AlarmConfig(window=0)), [GOOD, {**GOOD, name: value}] * 10)


def test_one_bad_step_and_chance_do_not_set_it_off():
  watch(CollapseAlarm(CONFIG), [GOOD] * 10 + [{**GOOD, "valid": 0.0}] + [GOOD] * 10)
  chance = [{**GOOD, "exact_match": 0.1}] * 10 + [{**GOOD, "exact_match": 0.01}] * 10
  watch(CollapseAlarm(CONFIG), chance)


def test_few_questions_in_a_step_do_not_set_it_off_by_their_noise():
  """Four questions of which a fifth is answered: without the spread of the steps, 26 of 200 runs stop."""
  fired = {errors: 0 for errors in (0.0, 3.0)}
  for seed in range(200):
    rng = np.random.default_rng(seed)
    rows = [{"exact_match": rng.beta(0.2, 0.8, 4).mean()} for _ in range(28)]
    for errors in fired:
      try:
        watch(CollapseAlarm(AlarmConfig(errors=errors)), rows)
      except CollapseError:
        fired[errors] += 1
  print(f"\nof 200 runs, stopped by standard errors asked for: {fired}")
  assert fired[3.0] <= 4
  assert fired[0.0] >= 15


def test_a_collapse_amid_noise_sets_it_off():
  rng = np.random.default_rng(0)
  draw = lambda share: {"exact_match": rng.binomial(32, share) / 32}
  with pytest.raises(CollapseError, match="exact_match"):
    watch(CollapseAlarm(AlarmConfig()), [draw(0.5) for _ in range(15)] + [draw(0.05) for _ in range(15)])


def test_steps_without_a_right_rollout_say_nothing_of_their_likelihood():
  silent = {name: value for name, value in GOOD.items() if name != "right_log_prob"}
  watch(CollapseAlarm(CONFIG), [GOOD] * 10 + [silent, {**GOOD, "right_log_prob": None}] * 20)


TASK = TwoHopSearch(n_entities=4, n_relations=2)
MODEL = ModelConfig(TASK.tokenizer.vocab_size, d_model=16, n_layers=1, n_heads=2)
LOOP = LoopConfig(checkpoint_every=2, keep_checkpoints=1, eval_every=4)


class Scripted(Refrag):
  """The reinforcement of `phase`, but the metrics of its steps are given, and it is best at step 4."""

  def batches(self, start):
    return iter(range(start, self.total_steps))

  def step(self, state, batch):
    self.taken.append(batch + 1)
    return state.replace(step=state.step + 1), self.script[batch]

  def evaluate(self, state):
    return {"exact_match": 1 - abs(int(state.step) - 4) / 100}


@pytest.fixture(scope="module")
def scripted():
  """Make a phase whose steps have these metrics."""
  mesh = make_mesh(1, 1, 1, jax.devices()[:1])
  runner = RolloutRunner(TASK, MODEL, MemoryConfig(d_embed=16), mesh)

  def make(script, window=2):
    config = RLConfig(steps=len(script), questions_per_step=2, alarm=AlarmConfig(window=window))
    start = {"mesh": mesh, "seed": 0, "params": None, "evaluate": lambda _: {}}
    phase = Scripted("rl", runner, MODEL, config, RolloutConfig(1, 1, 3, 2), **start)
    phase.script, phase.taken = script, []
    return phase

  return make


def saved(workdir):
  return sorted(int(path.parent.name) for path in checkpoints(workdir, "rl").glob("*/manifest.json"))


@pytest.mark.parametrize("name", [*GOOD])
def test_a_collapse_ends_reinforcement_and_the_best_checkpoint_stays(scripted, tmp_path, name):
  """Good until step 8, then each of the alarm's metrics on its own; step 10, the second bad one, ends it."""
  bad = {**GOOD, name: 9.0 if name == "surprise" else 0.0 if name != "right_log_prob" else -9.0}
  phase = scripted([GOOD] * 8 + [bad] * 8)
  with pytest.raises(CollapseError, match=rf"the policy has collapsed: {name} was .* at step 10"):
    train(phase, tmp_path, LOOP, {})
  assert saved(tmp_path) == [4, 8]  # the best, and the one before the collapse
  best = load(checkpoints(tmp_path, "rl"), {"params": phase.abstract_state().params}, step=4)  # it can be read
  assert best.metadata["data_position"] == 4


def test_a_resumed_reinforcement_remembers_the_steps_before(scripted, tmp_path):
  """Alone, the steps behind the resume are as bad as each other: only those before it tell that they are a fall."""
  good, bad = [GOOD] * 4, [{**GOOD, "exact_match": 0.1}] * 8
  train(scripted(good), tmp_path, LOOP, {})
  resumed = scripted(good + bad)
  with pytest.raises(CollapseError, match=r"exact_match was 0\.8 over 2 steps and is 0\.1 at step 6"):
    train(resumed, tmp_path, LOOP, {})
  assert resumed.taken == [5, 6]
  assert saved(tmp_path) == [4]
  train(scripted(good + bad, window=0), tmp_path, LOOP, {})
  assert saved(tmp_path) == [4, 12]

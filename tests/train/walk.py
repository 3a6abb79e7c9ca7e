"""A phase that takes no time to train, and what its runs are compared by."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.train.data import batches
from selfrag_jax.train.loop import LoopConfig, checkpoints
from selfrag_jax.train.state import TrainState

METADATA = {"config": {"seed": 0}}
STEPS = 12


class Walk:
  """A phase whose parameters walk by its batch and a random number; `on_step` may interfere with its metrics."""

  name, best_metric = "walk", "score"

  def __init__(self, steps: int = STEPS, on_step=lambda step, metrics: metrics):
    self.total_steps, self.on_step, self.taken = steps, on_step, []
    self._update = jax.jit(self._traced, donate_argnums=0)

  def initial_state(self):
    return TrainState(jnp.zeros((), jnp.int32), {"w": jnp.zeros(3)}, (), jax.random.key(7))

  def abstract_state(self):
    return jax.eval_shape(self.initial_state)

  def batches(self, start):
    return batches(lambda step: np.full(3, step, np.float32), start, self.total_steps)

  def _traced(self, state, batch):
    noise = jax.random.normal(jax.random.fold_in(state.key, state.step), (3,))
    w = 0.9 * state.params["w"] + batch + noise
    return state.replace(step=state.step + 1, params={"w": w}), {"loss": w.sum(), "tokens": 3}

  def step(self, state, batch):
    state, metrics = self._update(state, batch)
    self.taken.append(int(state.step))
    return state, self.on_step(self.taken[-1], metrics)

  def evaluate(self, state):
    return {"score": -abs(int(state.step) - 4)}  # best at step 4

  def watch(self, step, metrics):
    pass

  def model_params(self, params):
    return params

  def metadata(self):
    return {}

  def model_work(self):
    return None


def config(**overrides):
  return LoopConfig(**({"checkpoint_every": 3, "eval_every": 4} | overrides))


def rows(workdir):
  """Return the metrics of a run, apart from what the clock wrote."""
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


def saved_steps(workdir):
  return sorted(int(folder.parent.name) for folder in checkpoints(workdir, "walk").glob("*/manifest.json"))


def assert_same_run(workdir, state, uninterrupted):
  expected, metrics = uninterrupted
  np.testing.assert_array_equal(state.params["w"], expected.params["w"])
  assert int(state.step) == STEPS
  assert rows(workdir) == metrics

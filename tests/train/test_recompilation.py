"""A program that is compiled again in a later step is a warning with what is different; others are none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from selfrag_jax.mesh import batch_sharding, make_mesh, replicated
from selfrag_jax.train.loop import train
from tests.train.walk import METADATA, Walk, config


class Batches(Walk):
  """A walk by given batches."""

  def __init__(self, *given):
    super().__init__(steps=len(given))
    self.given = given

  def batches(self, start):
    return iter(self.given[start:])

  def _traced(self, state, batch):
    moved = state.params["w"] + jnp.sum(batch["x"] * 1.0)
    return state.replace(step=state.step + 1, params={"w": moved}), {"loss": moved.sum(), "tokens": 3}

  def step(self, state, batch):
    return super().step(state, {"x": batch["x"]})


def warnings(caplog):
  return [text for text in (record.getMessage() for record in caplog.records) if "recompilation" in text]


def test_a_run_of_equal_shapes_warns_of_nothing(tmp_path, caplog):
  train(Walk(), tmp_path, config(), METADATA)  # it evaluates and saves on the way, too
  train(Walk(steps=15), tmp_path, config(), METADATA)
  assert warnings(caplog) == []


def test_other_shapes_are_named_each_time_that_they_are_compiled(tmp_path, caplog):
  short, long = {"x": np.zeros((2, 3), np.float32), "asked": ["a"]}, {"x": np.zeros((2, 5), np.float32), "asked": ["b"]}
  train(Batches(short, short, long, short, long, {"x": np.zeros(3, np.int32)}), tmp_path, config(), METADATA)
  first, second = warnings(caplog)  # short and long are compiled by then
  assert first.startswith("step 3 of walk compiled jit(_traced) in ")
  assert first.endswith(" s (recompilation 1): batch/x was float32[2,3], is float32[2,5]")
  assert second.endswith(" s (recompilation 2): batch/x was float32[2,5], is int32[3]")


def test_another_sharding_is_named(tmp_path, caplog):
  mesh = make_mesh(2, 1, 1, jax.devices()[:2])
  on = lambda sharding: {"x": jax.device_put(np.zeros((4, 4), np.float32), sharding)}
  rows, whole = on(batch_sharding(mesh)), on(replicated(mesh))

  class Meshed(Batches):
    def initial_state(self):
      return jax.device_put(super().initial_state(), replicated(mesh))

  train(Meshed(rows, rows, whole), tmp_path, config(), METADATA)
  (text,) = warnings(caplog)
  assert "; and" not in text
  assert text.endswith("batch/x was float32[4,4] on P(('data', 'fsdp'),), is float32[4,4] on P()")


def test_a_state_that_changes_its_type_is_named(tmp_path, caplog):
  class Weak(Batches):
    def initial_state(self):
      return super().initial_state().replace(params={"w": jnp.asarray(0.0)})  # of weak type, until it is added to

    def abstract_state(self):
      return jax.eval_shape(self.initial_state)

  batch = {"x": np.zeros(3, np.float32)}
  train(Weak(batch, batch, batch), tmp_path, config(), METADATA)
  (text,) = warnings(caplog)
  assert text.endswith("state/params/w was float32[] of weak type, is float32[]")


def test_what_no_argument_explains_is_said_to_lie_within(tmp_path, caplog):
  class Forgetful(Walk):
    def step(self, state, batch):
      jax.jit(lambda x: x + 1)(batch)  # another function each time
      return super().step(state, batch)

  train(Forgetful(steps=3), tmp_path, config(), METADATA)
  second, third = warnings(caplog)
  assert second.startswith("step 2 of walk compiled jit(<lambda>) in ")
  assert third.endswith("the shapes, types and shardings of the step before, so something within has changed")


def test_of_many_differences_some_are_named(tmp_path, caplog):
  class Many(Batches):
    def step(self, state, batch):
      return Walk.step(self, state, {"x": sum(jnp.sum(x) for x in batch.values())})

  batch = lambda n: {name: np.zeros(n, np.float32) for name in "abcdefg"}
  train(Many(batch(2), batch(3)), tmp_path, config(), METADATA)
  (text,) = warnings(caplog)
  assert text.count(" was ") == 5
  assert text.endswith("; and 2 more")


@pytest.mark.parametrize("change", [{"y": np.zeros(2, np.float32)}, {}])
def test_arrays_that_come_or_go_are_named(tmp_path, caplog, change):
  class Whole(Batches):
    def step(self, state, batch):
      return Walk.step(self, state, {"x": sum(map(jnp.sum, batch.values())), **({"y": 0} if "y" in batch else {})})

  one = {"x": np.zeros(2, np.float32), "y": np.zeros(2, np.float32)}
  first = {name: x for name, x in one.items() if name not in change}
  second = one if change else {"x": one["x"]}
  train(Whole(first, second), tmp_path, config(), METADATA)
  (text,) = warnings(caplog)
  assert text.endswith(f"batch/y is {'new' if change else 'gone'}")

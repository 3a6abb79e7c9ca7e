"""A training goes on with fewer devices, and learns what it would have learned on one."""

import jax
import numpy as np
import pytest

from selfrag_jax.mesh import make_mesh
from selfrag_jax.train.checkpoint import Checkpointer
from selfrag_jax.train.phases.base import GradientPhase
from selfrag_jax.train.state import TrainState
from tests.train.every_phase import phases, reinforced, told
from tests.train.test_every_phase import ONE, names, on_one_device, same

DEVICES = (8, 4, 1)


def make(name: str, mesh) -> GradientPhase:
  return reinforced(mesh, 1, steps=3) if name == "rl" else phases(mesh)[name]()


def abstract(phase: GradientPhase) -> TrainState:
  """Return the state to restore, in float64: BERT's config makes float32, and the test has cast that."""
  wide = lambda x: jax.ShapeDtypeStruct(x.shape, np.float64, sharding=x.sharding) if x.dtype == np.float32 else x
  return jax.tree.map(wide, phase.abstract_state())


def uninterrupted(name: str) -> list[dict[str, float]]:
  return told(make(name, ONE), ONE) if name == "rl" else on_one_device(name)


@pytest.mark.parametrize("name", names("sft"))
def test_eight_devices_then_four_then_one_learn_what_one_learns(name, tmp_path):
  found, start = [], 0
  with jax.enable_x64(True):
    for part, n in enumerate(DEVICES, 1):
      mesh = make_mesh(n // 4 or 1, min(n, 2), min(n, 2), jax.devices()[:n])
      with jax.set_mesh(mesh), Checkpointer(tmp_path) as checkpointer:
        phase = make(name, mesh)
        until = part * phase.total_steps // len(DEVICES)
        restored = checkpointer.restore(abstract(phase))
        state = restored.state if restored else phase.initial_state()
        assert int(state.step) == start
        for _, batch in zip(range(start, until), phase.batches(start), strict=False):
          state, metrics = phase.step(state, batch)
          found.append({key: float(value) for key, value in metrics.items()})
        checkpointer.save(until, state, metadata={})
        start = until
    expected = uninterrupted(name)
  same(found, expected)

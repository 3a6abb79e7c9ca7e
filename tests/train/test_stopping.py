"""A training that is told to stop saves its step, whenever that comes; what goes on ends like one that was not."""

import itertools
import os
import signal

import jax
import pytest

from selfrag_jax.train import checkpoint
from selfrag_jax.train.loop import Preempted, StopSignal, train
from tests.train.walk import METADATA, STEPS, Walk, assert_same_run, config, saved_steps


# 5 falls between the checkpoints, 8 on an evaluation, 12 is the last step
@pytest.mark.parametrize("stop", [5, 8, 12])
def test_sigterm_saves_at_the_step_and_ends_with_the_code(tmp_path, uninterrupted, stop):
  def terminate(step, metrics):
    if step == stop:
      os.kill(os.getpid(), signal.SIGTERM)
    return metrics

  before = signal.getsignal(signal.SIGTERM)
  phase = Walk(on_step=terminate)
  with pytest.raises(Preempted) as stopped:
    train(phase, tmp_path, config(preempted_exit_code=75), METADATA)
  assert stopped.value.code == 75
  assert phase.taken[-1] == saved_steps(tmp_path)[-1] == stop
  assert signal.getsignal(signal.SIGTERM) is before
  assert_same_run(tmp_path, train(Walk(), tmp_path, config(), METADATA), uninterrupted)


# 4 and 8 are evaluations on the way, at 12 the phase ends; 0 comes while its checkpoint is read
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stop", [4, 12, 0])
def test_a_signal_that_comes_during_an_evaluation_or_a_restore_is_not_lost(tmp_path, uninterrupted, stop, number):
  class Slow(Walk):
    def abstract_state(self):
      if not stop:
        os.kill(os.getpid(), number)
      return super().abstract_state()

    def evaluate(self, state):
      if int(state.step) == stop:
        os.kill(os.getpid(), number)
      return super().evaluate(state)

  if not stop:
    train(Walk(), tmp_path, config(), METADATA)
  with pytest.raises((KeyboardInterrupt, Preempted)) as stopped:
    train(Slow(), tmp_path, config(preempted_exit_code=75), METADATA)
  assert stopped.type is (KeyboardInterrupt if number == signal.SIGINT else Preempted)
  assert saved_steps(tmp_path)[-1] == min(stop + 1, STEPS) if stop else STEPS  # "after this step" is the one behind
  assert_same_run(tmp_path, train(Walk(), tmp_path, config(), METADATA), uninterrupted)


@pytest.mark.parametrize("begun", [False, True], ids=["while the state is copied", "while it is written"])
def test_a_preemption_during_a_save_loses_neither_that_step_nor_the_next(tmp_path, uninterrupted, monkeypatch, begun):
  name = "_commit" if begun else "save"
  original = getattr(checkpoint.Checkpointer, name)

  def interrupted(self, place, *args, **kwargs):
    if str(place).endswith("3"):
      os.kill(os.getpid(), signal.SIGTERM)
    return original(self, place, *args, **kwargs)

  monkeypatch.setattr(checkpoint.Checkpointer, name, interrupted)
  with pytest.raises(Preempted):
    train(Walk(), tmp_path, config(), METADATA)
  monkeypatch.undo()
  assert saved_steps(tmp_path)[0] == 3
  assert len(saved_steps(tmp_path)) == 2
  assert_same_run(tmp_path, train(Walk(), tmp_path, config(), METADATA), uninterrupted)


def test_ctrl_c_saves_at_the_step(tmp_path, uninterrupted, capsys):
  interrupt = lambda step, metrics: os.kill(os.getpid(), signal.SIGINT) or metrics if step == 5 else metrics
  before = signal.getsignal(signal.SIGINT)
  phase = Walk(on_step=interrupt)
  with pytest.raises(KeyboardInterrupt, match="step 5 of phase walk is saved"):
    train(phase, tmp_path, config(), METADATA)
  assert phase.taken[-1] == saved_steps(tmp_path)[-1] == 5
  assert "Ctrl-C again stops at once" in capsys.readouterr().err
  assert signal.getsignal(signal.SIGINT) is before
  assert_same_run(tmp_path, train(Walk(), tmp_path, config(), METADATA), uninterrupted)


def test_a_second_ctrl_c_stops_at_once(tmp_path, uninterrupted):
  def interrupt(step, metrics):
    for _ in range(2 if step == 5 else 0):
      os.kill(os.getpid(), signal.SIGINT)
    return metrics

  phase = Walk(on_step=interrupt)
  with pytest.raises(KeyboardInterrupt, match="at once"):
    train(phase, tmp_path, config(), METADATA)
  assert phase.taken[-1] == 5
  assert saved_steps(tmp_path)[-1] < 5
  assert_same_run(tmp_path, train(Walk(), tmp_path, config(), METADATA), uninterrupted)


def test_several_hosts_agree_on_a_number_that_grows_over_the_phases(monkeypatch):
  """A host that is told to stop in the last steps of a phase stops in the next one, whose steps begin again."""
  asked = []
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr("selfrag_jax.train.loop._ASKED", itertools.count(1))
  monkeypatch.setattr(
    "selfrag_jax.train.loop.multihost_utils.reached_preemption_sync_point", lambda n: asked.append(n) or n == 5
  )
  stop = StopSignal()
  assert [stop.asked() for _ in range(3)] == [False] * 3
  following = StopSignal()
  assert [following.asked() for _ in range(2)] == [False, True]
  assert asked == [1, 2, 3, 4, 5]

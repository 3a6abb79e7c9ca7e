"""Traces of the steps that a config names."""

import gzip
import json
import os
import signal

import pytest

from selfrag_jax.train.loop import LoopConfig, NonFiniteLossError, Preempted, train
from tests.train.walk import METADATA, Walk, config


def traced_steps(workdir):
  """Return the numbers of the steps in the traces of a workdir, one list for each trace."""
  files = sorted((workdir / "profile" / "walk").glob("plugins/profile/*/*.trace.json.gz"))
  events = [json.loads(gzip.decompress(file.read_bytes()))["traceEvents"] for file in files]
  return [sorted({int(event["args"]["step_num"]) for event in of if event.get("name") == "walk"}) for of in events]


def test_the_steps_from_the_first_to_the_last_are_traced(tmp_path):
  train(Walk(), tmp_path, config(profile_steps=(5, 7)), METADATA)
  assert traced_steps(tmp_path) == [[5, 6, 7]]
  assert len(list((tmp_path / "profile" / "walk").glob("plugins/profile/*/*.xplane.pb"))) == 1


def test_without_steps_nothing_is_written(tmp_path):
  train(Walk(), tmp_path, config(), METADATA)
  assert not (tmp_path / "profile").exists()


def test_a_phase_that_is_stopped_or_ends_before_writes_what_it_has_and_goes_on(tmp_path):
  def terminate(step, metrics):
    if step == 6:
      os.kill(os.getpid(), signal.SIGTERM)
    return metrics

  with pytest.raises(Preempted):
    train(Walk(on_step=terminate), tmp_path, config(profile_steps=(5, 100)), METADATA)
  assert traced_steps(tmp_path) == [[5, 6]]
  for file in (tmp_path / "profile").rglob("*.gz"):
    file.unlink()  # two traces of one second would be in one folder
  train(Walk(), tmp_path, config(profile_steps=(5, 100)), METADATA)
  assert traced_steps(tmp_path) == [list(range(7, 13))]


def test_a_phase_that_fails_writes_what_it_has(tmp_path):
  def fail(step, metrics):
    return metrics | ({"loss": float("nan")} if step == 6 else {})

  with pytest.raises(NonFiniteLossError, match="loss is nan"):
    train(Walk(on_step=fail), tmp_path, config(profile_steps=(5, 100)), METADATA)
  assert traced_steps(tmp_path)[0][:2] == [5, 6]


@pytest.mark.parametrize(("steps", "taken"), [((13, 20), "1 to 12"), ((2, 4), "7 to 12")])
def test_a_phase_without_these_steps_says_so(tmp_path, caplog, steps, taken):
  if taken.startswith("7"):
    train(Walk(steps=6), tmp_path, config(), METADATA)
  train(Walk(), tmp_path, config(profile_steps=steps), METADATA)
  (said,) = [text for text in (record.getMessage() for record in caplog.records) if "profile" in text]
  assert said == (
    f"phase walk takes the steps {taken}, none of which is among config.profile_steps = {steps[0]},{steps[1]}: "
    "it gets no profile"
  )
  assert not (tmp_path / "profile").exists()


ODD = [(13, 10), (10,), (1, 2, 3), (0, 3), (1.0, 2), (True, 3), ("10-13",), "10,13", 5, None]


@pytest.mark.parametrize("steps", ODD)
def test_other_values_are_refused(steps):
  with pytest.raises(ValueError, match=r"profile_steps is .*; give the first and the last step, such as 10,13"):
    LoopConfig(profile_steps=steps)

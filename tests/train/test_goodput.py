"""The clock of a training: every second is one activity, and goodput is the share of the steps."""

import contextlib
import io
import json
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from selfrag_jax.model.config import StepWork
from selfrag_jax.train import goodput, loop
from selfrag_jax.train.checkpoint import Checkpointer
from selfrag_jax.train.goodput import Clock, describe
from selfrag_jax.train.telemetry import Telemetry
from tests.train.walk import METADATA, Walk, config

XLA = "/jax/core/compile/backend_compile_duration"


class Time:
  """Time that tests let pass. `wait_for_devices` waits until the clock has noted the end of a step."""

  def __init__(self):
    self.now, self._noted = 100.0, threading.Semaphore(0)

  def monotonic(self):
    return self.now

  def wait_for_devices(self):
    assert self._noted.acquire(timeout=60)

  def replace(self, monkeypatch):
    """Let clocks read this time."""
    dispatched = Clock.dispatched

    def noted(clock, results):
      dispatched(clock, results)
      clock._last.add_done_callback(lambda _: self._noted.release())

    monkeypatch.setattr(goodput, "time", self)
    monkeypatch.setattr(Clock, "dispatched", noted)


@pytest.fixture
def time(monkeypatch):
  time = Time()
  time.replace(monkeypatch)
  return time


def spent(clock):
  return {activity: seconds for activity, seconds in clock.seconds.items() if seconds}


def test_every_second_is_one_activity_and_what_is_no_other_is_a_step(time):
  with Clock() as clock:
    time.now += 1
    with clock.during("start"):
      time.now += 2
    with contextlib.suppress(KeyError), clock.during("evaluation"):
      time.now += 4
      with clock.during("saving"):
        time.now += 8
      time.now += 16
      raise KeyError
    time.now += 32
    assert spent(clock) == {"step": 33, "start": 2, "evaluation": 20, "saving": 8}


def test_compilation_is_taken_from_the_activity_that_needs_it_and_counted_once(time):
  record = jax.monitoring.record_event_duration_secs
  with Clock() as clock:
    with clock.during("evaluation"):
      time.now += 10
      record("/jax/core/compile/jaxpr_trace_duration", 3.0, fun_name="f")
      time.now += 5
      record("/jax/checkpoint/write/duration", 1.0)
      record(XLA, 2.0, fun_name="inner")
      record(XLA, 4.0, fun_name="f")  # it began before the inner one
      other = threading.Thread(target=record, args=(XLA, 5.0))  # nobody waits for it
      other.start()
      other.join()
    assert spent(clock) == {"evaluation": 10, "compilation": 5}
    assert [name for name, _ in clock.programs] == ["inner", "f"]
  record(XLA, 1.0, fun_name="later")
  assert len(clock.programs) == 2


def test_jax_tells_of_its_compilations():
  with Clock() as clock:
    jax.jit(lambda x: x * 3 + 1)(np.ones(7))
    names, compiling = [name for name, _ in clock.programs], clock.seconds["compilation"]
  assert names == ["jit(<lambda>)"]
  assert compiling > 0


class Results:
  """Results of a step, which the devices have computed once `done` is set."""

  def __init__(self):
    self.done = threading.Event()

  def block_until_ready(self):
    self.done.wait()


# the devices have the results before, while or after the host waits ten seconds for a batch
@pytest.mark.parametrize(("done_after", "idle"), [(0, 10), (4, 6), (None, 0)])
def test_a_late_batch_is_lost_time_as_far_as_the_devices_wait_for_it(time, done_after, idle):
  results = Results()

  def source():
    time.now += 3
    yield "first"
    time.now += done_after or 0
    if done_after is not None:
      results.done.set()
      time.wait_for_devices()
    time.now += 10 - (done_after or 0)
    yield "second"

  with Clock() as clock:
    batches = clock.batches(source())
    assert next(batches) == "first"
    clock.dispatched(results)
    assert next(batches) == "second"
    assert spent(clock) == {"data_wait": 3 + idle} | ({"step": 10 - idle} if idle < 10 else {})
    results.done.set()
    assert list(batches) == []


def test_the_summary_has_the_speed_the_percentiles_and_the_utilization_of_the_steps(time, monkeypatch):
  device = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 3 * 2**30})
  silent = SimpleNamespace(memory_stats=lambda: None)
  monkeypatch.setattr(jax, "local_devices", lambda: [silent, device])
  with Clock(peak_tokens_per_second=400) as clock:
    for seconds in range(1, 102):
      time.now += seconds
      clock.dispatched({})
      time.wait_for_devices()
      with clock.during("evaluation"):
        time.now += 1
      clock.has_read(tokens=102)
    assert clock.so_far()["step_seconds"] == 101
    summary = clock.summary()
  assert summary["wall_seconds"] == 101 * 51 + 101
  assert (summary["step_seconds"], summary["evaluation_seconds"]) == (101 * 51, 101)
  assert summary["goodput"] == 51 / 52
  assert (summary["step_p50"], summary["step_p90"], summary["step_p99"]) == (51, 91, 100)
  assert (summary["tokens_per_second"], summary["mfu"]) == (2, 0.005)
  assert summary["device_gib"] == 3
  assert 0.05 < summary["host_gib"] < 1000  # of this process: the unit is right
  assert describe({**summary, "host_gib": 1.5}).splitlines() == [
    "  101 steps  2 tokens/s  MFU 0.5%  p50 51 s  p90 91 s  p99 100 s",
    "  goodput 98.1% of 1:27:32: compilation 0.0%  evaluation 1.9%  saving 0.0%  data wait 0.0%  start 0.0%",
    "  peak memory: host 1.50 GiB  device 3.00 GiB",
  ]


def test_what_is_not_known_is_not_said(time):
  with Clock() as clock:
    time.now += 1
    clock.dispatched({})
    clock.has_read(tokens=0)
    summary = clock.summary()
  assert not {"mfu", "tokens_per_second", "device_gib"} & summary.keys()
  assert describe(summary).splitlines()[0] == "  1 steps  p50 1 s  p90 1 s  p99 1 s"


def rows(workdir):
  return [json.loads(line) for line in (workdir / "goodput.jsonl").read_text().splitlines()]


def test_the_loop_counts_each_activity_as_what_it_is(tmp_path, monkeypatch):
  phase = Walk(steps=6)
  train = lambda folder: loop.train(phase, folder, config(checkpoint_every=2, eval_every=3), METADATA)
  train(tmp_path / "compiled")  # what comes now compiles nothing
  time = Time()
  time.replace(monkeypatch)

  def passing(seconds, function):
    def slow(*args, **kwargs):
      time.now += seconds
      return function(*args, **kwargs)

    return slow

  def late(start):
    for step in range(start, phase.total_steps):
      if step > start:
        time.wait_for_devices()
      time.now += 1
      yield np.full(3, step, np.float32)

  phase.taken.clear()
  phase.batches = late
  phase.step = passing(10, phase.step)
  phase.evaluate = passing(100, phase.evaluate)
  phase.initial_state = passing(1000, phase.initial_state)  # and again for the abstract state
  for name, seconds in (("save", 10_000), ("wait", 7)):
    monkeypatch.setattr(Checkpointer, name, passing(seconds, getattr(Checkpointer, name)))
  train(tmp_path / "run")
  (row,) = rows(tmp_path / "run")
  seconds = {name: row[f"{name}_seconds"] for name in ("step", "data_wait", "evaluation", "start", "saving")}
  # four saves wait for the one before, and the last for itself; JAX itself tells the time of what little it compiles
  expected = {"step": 60, "data_wait": 6, "evaluation": 200, "start": 2007, "saving": 40_035}
  assert seconds == pytest.approx(expected, abs=1)
  assert row["wall_seconds"] == sum(expected.values())
  assert row["goodput"] == pytest.approx(60 / 42_308, abs=1e-4)
  assert [row["step_p50"], row["step_p90"], row["step_p99"]] == pytest.approx([10, 10, 10], abs=1)
  assert (row["phase"], row["last_step"], row["steps"]) == ("walk", 6, 6)


def test_a_phase_that_is_resumed_adds_a_row_of_its_own_steps(tmp_path):
  loop.train(Walk(steps=4), tmp_path, config(), METADATA)
  loop.train(Walk(steps=9), tmp_path, config(), METADATA)
  loop.train(Walk(steps=9), tmp_path, config(), METADATA)  # takes no step
  assert [(row["last_step"], row["steps"]) for row in rows(tmp_path)] == [(4, 4), (9, 5)]
  for row in rows(tmp_path):
    activities = ("step", "compilation", "evaluation", "saving", "data_wait", "start")
    assert row["wall_seconds"] == pytest.approx(sum(row[f"{name}_seconds"] for name in activities))
    assert row["goodput"] == pytest.approx(row["step_seconds"] / row["wall_seconds"])
    assert row["compilation_seconds"] > 0


def test_the_utilization_is_that_of_the_models_formula_on_chips_of_known_speed(tmp_path, monkeypatch):
  class Formula(Walk):
    def model_work(self):  # type: ignore[override]
      return StepWork(tokens=6, flops=6e3)

  loop.train(Formula(steps=2), tmp_path / "cpu", config(), METADATA)
  assert "mfu" not in rows(tmp_path / "cpu")[0]
  monkeypatch.setattr(loop, "peak_flops", lambda devices: 1e9)
  loop.train(Formula(steps=2), tmp_path / "chip", config(), METADATA)
  (row,) = rows(tmp_path / "chip")
  assert row["mfu"] == pytest.approx(row["tokens_per_second"] * 1e3 / 1e9)
  loop.train(Walk(steps=2), tmp_path / "no_formula", config(), METADATA)
  assert "mfu" not in rows(tmp_path / "no_formula")[0]


def test_what_a_clock_tells_goes_to_tensorboard_and_to_the_terminal(tmp_path):
  stream = io.StringIO()
  with Telemetry(tmp_path, total_steps=2, phase="rl", stream=stream) as telemetry:
    for step in (1, 2):
      telemetry.log(step, {"loss": 2.0, "tokens": 3}, {"goodput": 0.5, "mfu": 0.25, "host_gib": 1.5})
  line = stream.getvalue().splitlines()[-1]
  assert "tokens/s  MFU 25%  goodput 50%  elapsed" in line
  assert "host" not in line
  (first, _) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
  assert first.keys() == {"phase", "step", "loss", "tokens", "seconds", "tokens_per_second"}
  events = EventAccumulator(str(tmp_path / "tensorboard" / "rl"))
  events.Reload()
  assert [event.value for event in events.Scalars("run/host_gib")] == [1.5, 1.5]
  assert len(events.Scalars("run/tokens_per_second")) == 1  # the first step has no rate


def test_the_summary_is_in_tensorboard_too(tmp_path):
  loop.train(Walk(), tmp_path, config(), METADATA)
  events = EventAccumulator(str(tmp_path / "tensorboard" / "walk"))
  events.Reload()
  (row,), (event,) = rows(tmp_path), events.Scalars("summary/goodput")
  assert (event.step, event.value) == (12, pytest.approx(row["goodput"]))
  assert len(events.Scalars("run/step_seconds")) == 12


def test_a_summary_that_cannot_be_written_is_named_with_the_folder(tmp_path):
  (tmp_path / "goodput.jsonl").mkdir()
  with pytest.raises(OSError, match=f"the metrics of step 2 cannot be written to {tmp_path}: .*Is a directory"):
    loop.train(Walk(steps=2), tmp_path, config(), METADATA)

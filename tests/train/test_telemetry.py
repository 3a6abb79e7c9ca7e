"""Telemetry: valid rows, no trace of a kill in the file, and rates without compilation."""

import io
import json
import re
import sys
import threading

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from selfrag_jax.train import telemetry as telemetry_lib
from selfrag_jax.train.telemetry import Telemetry, read_rows, seconds_spent

TIMES = ("seconds", "tokens_per_second")


@pytest.fixture
def clock(monkeypatch):
  """A clock that tests set by hand."""
  now = [100.0]
  monkeypatch.setattr(telemetry_lib.time, "monotonic", lambda: now[0])
  return now


def rows(workdir, drop=TIMES):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [{name: value for name, value in json.loads(line).items() if name not in drop} for line in lines]


def run(workdir, first, last, *, start_step=0, phase="pretrain"):
  with Telemetry(workdir, total_steps=10, start_step=start_step, phase=phase, stream=io.StringIO()) as telemetry:
    for step in range(first, last + 1):
      telemetry.log(step, {"loss": 1 / step, "tokens": 64})


def scalars(folder, tag):
  events = EventAccumulator(str(folder))
  events.Reload()
  return [(event.step, event.value) for event in events.Scalars(tag)]


def test_resumed_file_equals_uninterrupted(tmp_path):
  run(tmp_path / "whole", 1, 10)
  run(tmp_path / "killed", 1, 7)
  with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
    file.write('{"phase": "pretrain", "step": 8, "lo')
  run(tmp_path / "killed", 5, 10, start_step=4)
  assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
  assert len(rows(tmp_path / "whole")) == 10


def test_torn_line_goes_even_if_nothing_else_does(tmp_path):
  run(tmp_path, 1, 3)
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"phase": "pretrain", "st')
  run(tmp_path, 4, 4, start_step=3)
  assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


ODD = [
  b"5",
  b"{}",
  b"[]",
  b"null",
  b'"row"',
  b"\xff\xfe",
  b"\x00" * 100,
  b"[" * 100_000,
  b'{"phase": "pretrain", "step": 3, "loss": NaN, "seconds": 1}',
  b'{"phase": "pretrain", "step": 3, "loss": 1e999, "seconds": 1}',
  b'{"phase": "pretrain", "step": 3, "loss": "low", "seconds": 1}',
  b'{"phase": "pretrain", "step": "3", "seconds": 1}',
  b'{"phase": "pretrain", "step": true, "seconds": 1}',
  b'{"phase": 3, "step": 3, "seconds": 1}',
  b'{"phase": "pretrain", "step": 3, "seconds": "1"}',
  b'{"phase": "pretrain", "step": 3, "seconds": 1e300}',
  b'{"phase": "pretrain", "step": 3, "seconds": -5}',
  b'{"phase": "pretrain", "step": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("line", ODD, ids=range(len(ODD)))
def test_an_odd_line_is_left_out_of_a_resume_with_one_warning(tmp_path, line, caplog):
  path = tmp_path / "metrics.jsonl"
  run(tmp_path, 1, 3)
  before = path.read_bytes()
  path.write_bytes(line + b"\n" + before + line + b"\n")
  assert seconds_spent(tmp_path) == max(json.loads(row)["seconds"] for row in before.splitlines())
  assert [row["step"] for row in read_rows(tmp_path)] == [1, 2, 3]
  run(tmp_path, 4, 5, start_step=3)
  (warning,) = (record.getMessage() for record in caplog.records)
  assert warning.startswith(f"2 lines that are no rows of metrics are left out; the first: {path}, line 1: ")
  assert path.read_bytes().startswith(before)
  assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5]


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(st.data())
def test_whatever_happens_to_the_file_a_resume_writes_rows_that_are_read(tmp_path_factory, data):
  folder = tmp_path_factory.mktemp("run")
  row = '{{"phase": "pretrain", "step": {}, "loss": 0.5, "seconds": {}.25, "tokens_per_second": null}}\n'
  content = bytearray("".join(row.format(step, step) for step in range(1, 5)).encode())
  for _ in range(data.draw(st.integers(1, 4))):
    at = data.draw(st.integers(0, len(content)))
    content[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=20))
  (folder / "metrics.jsonl").write_bytes(content[: data.draw(st.integers(0, len(content)))])
  run(folder, 3, 5, start_step=2)
  assert [row["step"] for row in rows(folder)][-3:] == [3, 4, 5]
  assert list(read_rows(folder))[-1]["step"] == 5


def test_times_beyond_any_calendar_are_shown_as_unknown(tmp_path, clock):
  stream = io.StringIO()
  with Telemetry(tmp_path, total_steps=2**31, stream=stream) as telemetry:
    for step in (1, 2):
      clock[0] += 1e6
      telemetry.log(step, {})
  assert stream.getvalue().splitlines()[-1].endswith("ETA ?")


def test_other_phases_keep_their_rows(tmp_path):
  run(tmp_path, 1, 5, phase="pretrain")
  run(tmp_path, 1, 3, phase="rag")
  run(tmp_path, 2, 3, phase="rag", start_step=1)
  assert [(row["phase"], row["step"]) for row in rows(tmp_path)] == [
    *[("pretrain", step) for step in range(1, 6)],
    *[("rag", step) for step in range(1, 4)],
  ]


def test_fresh_start_repeats_no_row(tmp_path):
  for _ in range(2):
    with Telemetry(tmp_path, total_steps=1, stream=io.StringIO()) as telemetry:
      telemetry.log(0, {"accuracy": 0.5})
      telemetry.log(1, {"accuracy": 1.0})
  assert [row["step"] for row in rows(tmp_path)] == [0, 1]


def test_rows_are_on_disk_at_once_and_valid_json(tmp_path):
  stream = io.StringIO()
  with Telemetry(tmp_path, total_steps=2, phase="rag", stream=stream) as telemetry:
    telemetry.log(1, {"loss": float("nan"), "norm": np.float32("inf"), "reward": jax.numpy.float32(0.5)})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
  row = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
  assert row | {"seconds": 0} == {"phase": "rag", "step": 1, "loss": None, "norm": None, "reward": 0.5, "seconds": 0}
  assert stream.getvalue().startswith("rag 1/2  loss nan  norm inf  reward 0.5  elapsed 0:00:")


def test_rates_exclude_the_step_that_compiled(tmp_path, clock):
  stream = io.StringIO()
  with Telemetry(tmp_path, total_steps=100, start_step=40, stream=stream) as telemetry:
    for step, now in [(41, 1100.0), (42, 1102.0), (43, 1106.0)]:
      clock[0] = now
      telemetry.log(step, {"loss": 2.0, "tokens": 1200})
  # two steps took six seconds: 3 s a step, 57 steps to go, 2400 tokens in 6 s
  assert stream.getvalue().splitlines()[-1] == "43/100  loss 2  400 tokens/s  elapsed 0:16:46  ETA 0:02:51"
  assert rows(tmp_path, drop=())[-1]["tokens_per_second"] == 400.0
  assert rows(tmp_path, drop=())[0]["tokens_per_second"] is None


def test_seconds_go_on_after_a_restart_and_into_the_next_phase(tmp_path, clock):
  for phase, start, seconds in [("sft", 0, 10), ("sft", 1, 7), ("rl", 0, 5)]:
    with Telemetry(tmp_path, total_steps=9, start_step=start, phase=phase, stream=io.StringIO()) as telemetry:
      clock[0] += seconds
      telemetry.log(start + 1, {})
    clock[0] += 1000  # between two processes
  assert [row["seconds"] for row in rows(tmp_path, drop=())] == [10, 17, 22]
  assert seconds_spent(tmp_path) == 22
  assert seconds_spent(tmp_path / "new") == 0


def test_rates_follow_a_change_of_pace(tmp_path, clock):
  stream = io.StringIO()
  with Telemetry(tmp_path, total_steps=1000, stream=stream) as telemetry:
    for step in range(1, 501):
      clock[0] += 10.0 if step < 300 else 1.0
      telemetry.log(step, {})
  assert stream.getvalue().splitlines()[-1].endswith("ETA 0:08:20")


def test_terminal_has_every_nth_line_and_the_last(tmp_path):
  stream = io.StringIO()
  with Telemetry(tmp_path, total_steps=7, stream=stream, log_every=3) as telemetry:
    for step in range(1, 8):
      telemetry.log(step, {"loss": 1.0})
  assert re.findall(r"^(\d)/7", stream.getvalue(), re.M) == ["3", "6", "7"]
  assert len(rows(tmp_path)) == 7


def test_tensorboard_reads_the_resumed_run(tmp_path):
  run(tmp_path, 1, 7)
  run(tmp_path, 5, 10, start_step=4)
  assert scalars(tmp_path / "tensorboard" / "pretrain", "loss") == [
    (step, pytest.approx(1 / step)) for step in range(1, 11)
  ]


def test_only_process_0_writes(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  run(tmp_path / "run", 1, 2)
  assert not (tmp_path / "run").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no limit on the size of files")
def test_a_full_disk_is_an_error_and_nothing_waits_for_it(tmp_path):
  import resource

  said = []

  def log():  # beside the test, which must end also if this does not
    try:
      with Telemetry(tmp_path, total_steps=1000, stream=io.StringIO()) as telemetry:
        for step in range(1, 1000):
          telemetry.log(step, dict.fromkeys("abcdefgh", 0.5))
    except OSError as error:
      said.append(str(error))

  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
  try:
    writer = threading.Thread(target=log, daemon=True)
    writer.start()
    writer.join(30)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert said
  assert f"cannot be written to {tmp_path}: [Errno 27]" in said[0]
  assert [row["step"] for row in read_rows(tmp_path)][:3] == [1, 2, 3]  # what was written before is there

"""The telemetry of a run: `metrics.jsonl`, TensorBoard scalars and a line on the terminal."""

import collections
import contextlib
import datetime
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import jax
from absl import logging
from etils import epath

from selfrag_jax.storage.atomic import is_local, os_errors, write_bytes_atomic
from selfrag_jax.storage.json_lines import read_lines
from selfrag_jax.train.goodput import describe

LONGEST = 1e12  # seconds; a longer time is a mistake
_FLUSH_EVERY = 30.0  # seconds between writes of TensorBoard's file, and of files that each write uploads as a whole
_WINDOW = 50  # calls over which rates are averaged: smooth, yet follows a change of pace


class Telemetry:
  """Write each step's metrics to `<workdir>/metrics.jsonl`, TensorBoard and the terminal; process 0 only.

  On resume, the phase's rows beyond `start_step` and damaged lines are dropped first: the file equals that of an
  uninterrupted run, apart from `seconds` (training time of all processes of the run so far) and `tokens_per_second`.
  What else a clock or the machine tells goes to TensorBoard, under `run/` and `summary/`, and to `goodput.jsonl`.

  Args:
    workdir: the run's folder; event files go to `tensorboard/<phase>`.
    total_steps: the phase's last step, for the ETA.
    start_step: the step that the run resumes after; 0 starts the phase afresh, without any of its old rows.
    phase: the phase's name, part of every row.
    stream: where the terminal lines go; standard error by default.
    log_every: steps between terminal lines, 0 for none; files get every row. The last step always gets a line.
  """

  def __init__(
    self,
    workdir: epath.PathLike,
    *,
    total_steps: int,
    start_step: int = 0,
    phase: str = "",
    stream: TextIO | None = None,
    log_every: int = 1,
  ):
    self._total_steps, self._phase, self._log_every = total_steps, phase, log_every
    self._stream = stream or sys.stderr
    self._started = time.monotonic()
    self._tokens = 0.0
    # (time, step, tokens) after each call; the first one closes the step that compiled, so no rate contains it
    self._window: collections.deque[tuple[float, int, float]] = collections.deque(maxlen=_WINDOW)
    self._writes = jax.process_index() == 0
    if not self._writes:
      return
    self._workdir = folder = epath.Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    self._started -= seconds_spent(folder)
    _drop_rows_after(folder / "metrics.jsonl", phase, start_step)
    self._files, self._flushed = contextlib.ExitStack(), -math.inf
    self._file = self._files.enter_context((folder / "metrics.jsonl").open("a"))
    self._events = _Events(folder / "tensorboard" / phase, start_step, self._files)

  def log(self, step: int, metrics: Mapping[str, float], timed: Mapping[str, float] | None = None) -> None:
    """Write one row. `metrics["tokens"]`, if given, counts the tokens since the previous call and yields tokens/s.

    `timed` is for TensorBoard, and its `goodput` and `mfu` for the terminal.
    NaN and infinity become null in the file, as JSON cannot express them; the terminal line shows them. Raises OSError,
    with the folder, if a file cannot be written.
    """
    if not self._writes:
      return
    values, timed = {name: float(value) for name, value in metrics.items()}, dict(timed or {})
    now = time.monotonic()
    self._tokens += values.get("tokens", 0.0)
    self._window.append((now, step, self._tokens))
    seconds_per_step, tokens_per_second = self._rates()
    row = {"phase": self._phase, "step": step} | values | {"seconds": now - self._started}
    if "tokens" in values:
      row["tokens_per_second"] = tokens_per_second
    if "tokens" in values and math.isfinite(tokens_per_second):
      timed["tokens_per_second"] = tokens_per_second
    with self._writing(step):
      self._file.write(json.dumps({name: _finite_or_none(value) for name, value in row.items()}) + "\n")
      if is_local(self._workdir) or now >= self._flushed + _FLUSH_EVERY:
        self.flush()
      self._events.add(step, values | {f"run/{name}": value for name, value in timed.items()})
    if (self._log_every and step % self._log_every == 0) or step == self._total_steps:
      shown = [f"{name} {value:.4g}" for name, value in values.items() if name != "tokens"]
      if "tokens" in values and math.isfinite(tokens_per_second):
        shown.append(f"{tokens_per_second:,.0f} tokens/s")
      shown += [f"{word} {timed[name]:.0%}" for word, name in (("MFU", "mfu"), ("goodput", "goodput")) if name in timed]
      eta = seconds_per_step * (self._total_steps - step)
      shown += [f"elapsed {_clock(now - self._started)}", f"ETA {_clock(eta)}"]
      print(f"{self._phase} {step}/{self._total_steps}".strip(), *shown, sep="  ", file=self._stream, flush=True)

  def summarize(self, step: int, summary: Mapping[str, float]) -> None:
    """Write the summary of the steps of this process, after its last one: a row of `goodput.jsonl`, else as `log`."""
    if not self._writes:
      return
    row = {"phase": self._phase, "last_step": step, **summary}
    with self._writing(step):
      with (self._workdir / "goodput.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
      self._events.add(step, {f"summary/{name}": value for name, value in summary.items()})
    print(describe(summary), file=self._stream, flush=True)

  @contextlib.contextmanager
  def _writing(self, step: int) -> Iterator[None]:
    """Name the folder and what to do in the error of a file that cannot be written."""
    try:
      with os_errors():
        yield
    except OSError as error:
      raise OSError(
        f"the metrics of step {step} cannot be written to {self._workdir}: {error}. Checkpoints there are intact; "
        "if the disk is full or read-only, mend that, then start the run again"
      ) from error

  def flush(self) -> None:
    """Write the rows that wait: in object storage, where each write uploads the whole file, they do for half a minute.

    Call it before a checkpoint is saved, so that none of its rows is lost.
    """
    if self._writes:
      self._file.flush()
      self._flushed = time.monotonic()

  def _rates(self) -> tuple[float, float]:
    """Return seconds per step and tokens per second over the window; NaN until two calls have passed."""
    (first_time, first_step, first_tokens), (time_, step, tokens) = self._window[0], self._window[-1]
    if step == first_step or time_ == first_time:
      return math.nan, math.nan
    seconds = time_ - first_time
    return seconds / (step - first_step), (tokens - first_tokens) / seconds

  def close(self) -> None:
    """Flush and close the files."""
    if self._writes:
      with self._files:
        self._events.close()

  def __enter__(self) -> "Telemetry":
    return self

  def __exit__(self, kind: type[BaseException] | None, *_) -> None:
    # after a failed write the flush fails too, and the first error has the reason
    with contextlib.suppress(*(OSError,) if kind else ()), os_errors():
      self.close()


class _Events:
  """A writer of scalars for TensorBoard that works in the caller's thread.

  `SummaryWriter` has a thread of its own, which a full disk ends; the caller then waits for it forever.
  """

  def __init__(self, folder: epath.Path, start_step: int, files: contextlib.ExitStack):
    from tensorboardX.event_file_writer import EventsWriter  # imports slowly; only runs that write need it
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.record_writer import register_writer_factory

    register_writer_factory("gs", _Objects(files))
    folder.mkdir(parents=True, exist_ok=True)
    # without the suffix, a restart within one second would overwrite the killed run's file
    self._writer, self._flushed = EventsWriter(str(folder / "events"), f".{start_step}"), -math.inf
    # TensorBoard drops the scalars that a killed run logged from this step on
    start = SessionLog(status=SessionLog.START)
    self._writer.write_event(Event(wall_time=time.time(), step=start_step and start_step + 1, session_log=start))

  def add(self, step: int, values: Mapping[str, float]) -> None:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.summary import scalar

    for name, value in values.items():
      self._writer.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
    if (now := time.monotonic()) >= self._flushed + _FLUSH_EVERY:
      self._writer.flush()
      self._flushed = now

  def close(self) -> None:
    self._writer.close()


class _Objects:
  """How tensorboardX opens files in object storage: its own way needs one more client of that storage."""

  def __init__(self, files: contextlib.ExitStack):
    self._files = files

  def directory_check(self, path: str) -> None:
    pass

  def open(self, path: str) -> Any:
    return self._files.enter_context(epath.Path(path).open("wb"))


def seconds_spent(workdir: epath.PathLike) -> float:
  """Return the seconds that the run of this folder has trained so far, over all its processes; 0 for a new run."""
  return max((row.get("seconds") or 0.0 for row in read_rows(workdir)), default=0.0)


def read_rows(workdir: epath.PathLike) -> Iterator[dict[str, Any]]:
  """Yield the rows of `metrics.jsonl`; skip damaged lines, such as one that a kill cut short."""
  for row, _ in _rows(epath.Path(workdir) / "metrics.jsonl", []):
    yield row


def _rows(path: epath.Path, odd: list[ValueError]) -> Iterator[tuple[dict[str, Any], str]]:
  """Yield each row with its line; append to `odd` an error for each line that is not a row."""
  for number, line in read_lines(path, odd.append) if path.exists() else ():
    try:
      yield _parse_row(line), line + "\n"
    except ValueError as error:
      odd.append(ValueError(f"{path}, line {number}: {error}"))


def _parse_row(line: str) -> dict[str, Any]:
  """Parse a row that `Telemetry.log` wrote. Raises ValueError for any other line."""
  try:
    row = json.loads(line, parse_constant=lambda word: math.nan)
  except RecursionError:
    raise ValueError("nested too deeply") from None
  if not isinstance(row, dict) or not isinstance(row.get("phase"), str) or type(row.get("step")) is not int:
    raise ValueError("not an object with a phase, a step and seconds")
  numbers = [value for name, value in row.items() if name != "phase" and value is not None]
  if any(type(value) not in (int, float) or not math.isfinite(value) for value in numbers):
    raise ValueError("a value is no finite number")
  if not 0 <= (row.get("seconds") or 0) < LONGEST:
    raise ValueError(f"seconds is {row['seconds']}")
  return row


def _drop_rows_after(path: epath.Path, phase: str, step: int) -> None:
  """Rewrite `path` without this phase's rows beyond `step` and without damaged lines."""
  odd: list[ValueError] = []
  kept = [line for row, line in _rows(path, odd) if row["phase"] != phase or (step > 0 and row["step"] <= step)]
  if odd:
    logging.warning("%d lines that are no rows of metrics are left out; the first: %s", len(odd), odd[0])
  write_bytes_atomic(path, "".join(kept).encode())


def _finite_or_none(value):
  return None if isinstance(value, float) and not math.isfinite(value) else value


def _clock(seconds: float) -> str:
  return "?" if not seconds < LONGEST else str(datetime.timedelta(seconds=round(seconds)))

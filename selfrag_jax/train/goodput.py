"""The wall seconds of a training by activity; goodput is the share of them in which it took steps."""

import collections
import concurrent.futures
import contextlib
import datetime
import math
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import jax
import numpy as np

from selfrag_jax.chips import GIB

if sys.platform != "win32":
  import resource

T = TypeVar("T")
Activity = Literal["step", "data_wait", "compilation", "evaluation", "saving", "start"]
LOSSES: tuple[Activity, ...] = ("compilation", "evaluation", "saving", "data_wait", "start")
# JAX's names of the parts of a compilation: tracing, lowering, and XLA's part or its result in the persistent cache
COMPILING = "/jax/core/compile/"
BY_XLA = f"{COMPILING}backend_compile_duration"


class Clock:
  """A context that counts every second of its thread as one activity; what is nothing else is `step`.

  Steps are dispatched, and their results read while the next one runs. So the time of a step is what passes between the
  moments at which its results and those of the step before are computed, less the other activities between them.
  Rollouts, rewards and metrics that a phase makes within its step are work that the step needs, and count as such.

  Args:
    peak_tokens_per_second: the speed at which the FLOPs of the model alone would be the peak of the devices.
  """

  def __init__(self, peak_tokens_per_second: float | None = None):
    self.peak_tokens_per_second = peak_tokens_per_second
    self.programs: list[tuple[str, float]] = []  # compiled by this thread, with the seconds of XLA
    self._seconds: dict[Activity, float] = {"step": 0.0, **dict.fromkeys(LOSSES, 0.0)}
    self._activity: Activity = "step"
    self._since, self._compiled_until = time.monotonic(), 0.0
    self._lock = threading.RLock()  # between the thread that counts and the one that waits for results
    self._steps: list[float] = []  # seconds
    self._stepped = self._tokens = 0.0  # seconds and tokens of all of them
    self._running: collections.deque[concurrent.futures.Future[tuple[float, float]]] = collections.deque()
    self._last: concurrent.futures.Future[tuple[float, float]] | None = None  # when the devices became idle
    self._waiter = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="step_results")

  def __enter__(self) -> "Clock":
    self._thread = threading.get_ident()
    jax.monitoring.register_event_duration_secs_listener(self._compiled)
    return self

  def __exit__(self, *_) -> None:
    jax.monitoring.unregister_event_duration_listener(self._compiled)
    self._waiter.shutdown(wait=False, cancel_futures=True)

  @contextlib.contextmanager
  def during(self, activity: Activity) -> Iterator[None]:
    """Count what is done within this context as an activity; compilation within it stays apart."""
    before = self._activity
    self._switch(activity)
    try:
      yield
    finally:
      self._switch(before)

  def batches(self, source: Iterable[T]) -> Iterator[T]:
    """Yield batches, and count the wait for each of them as `data_wait`, as far as the devices waited, too.

    While they still compute the step before, a batch that is late costs nothing.
    """
    iterator = iter(source)
    while True:
      before = self._seconds["data_wait"]
      with self.during("data_wait"):
        try:
          batch = next(iterator)
        except StopIteration:
          return
      with self._lock:
        waited = self._seconds["data_wait"] - before
        idle = min(waited, self._idle_seconds())
        self._seconds["data_wait"] = before + idle
        self._seconds["step"] += waited - idle
      yield batch

  def dispatched(self, results: Any) -> None:
    """Take the results of a step that the devices may still compute, to know when they have done so."""
    self._last = self._waiter.submit(self._finish, results)
    self._running.append(self._last)

  def has_read(self, tokens: float) -> None:
    """Count the first of the dispatched steps that are not counted yet, once its results have been read."""
    _, stepped = self._running.popleft().result()
    self._steps.append(max(stepped - self._stepped, 0.0))
    self._stepped, self._tokens = stepped, self._tokens + tokens

  @property
  def seconds(self) -> Mapping[Activity, float]:
    """The seconds of each activity so far."""
    self._switch(self._activity)
    return self._seconds

  def so_far(self) -> dict[str, float]:
    """Return goodput, the share of data wait, the last step's seconds, MFU where it is known, and the peak memory."""
    seconds = self.seconds
    wall = sum(seconds.values())
    shares = {"goodput": seconds["step"] / wall, "data_wait": seconds["data_wait"] / wall}
    return {**shares, "step_seconds": self._steps[-1], **self._utilization(), **peak_memory()}

  def summary(self) -> dict[str, float]:
    """Return the numbers of all steps so far: seconds by activity, goodput, speed, percentiles and peak memory.

    Tokens per second, and the MFU that follows, are those of the step seconds; times goodput, they are those of the
    wall seconds.
    """
    seconds = self.seconds
    wall = sum(seconds.values())
    times = np.percentile(self._steps, [50, 90, 99]).tolist()
    return {
      "steps": len(self._steps),
      "wall_seconds": wall,
      **{f"{activity}_seconds": spent for activity, spent in seconds.items()},
      "goodput": seconds["step"] / wall,
      **({"tokens_per_second": self._speed} if self._tokens else {}),
      **self._utilization(),
      **dict(zip(("step_p50", "step_p90", "step_p99"), times, strict=True)),
      **peak_memory(),
    }

  @property
  def _speed(self) -> float:
    return self._tokens / self._stepped

  def _utilization(self) -> dict[str, float]:
    return {"mfu": self._speed / self.peak_tokens_per_second} if self.peak_tokens_per_second else {}

  def _idle_seconds(self) -> float:
    """Return for how long the devices have had nothing to do; infinity before the first step."""
    if self._last is None:
      return math.inf
    return self._since - self._last.result()[0] if self._last.done() else 0.0

  def _finish(self, results: Any) -> tuple[float, float]:
    """Wait for the results of a step; return when they were computed, and the seconds of steps until then."""
    jax.block_until_ready(results)
    with self._lock:
      now = time.monotonic()
      # until now the devices were busy, and a wait for data was no loss
      is_step = self._activity in ("step", "data_wait")
      return now, self._seconds["step"] + (now - self._since if is_step else 0.0)

  def _switch(self, activity: Activity) -> None:
    """Count the time since the last switch, and begin an activity."""
    with self._lock:
      now = time.monotonic()
      self._seconds[self._activity] += now - self._since
      self._activity, self._since = activity, now

  def _compiled(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
    """Move the seconds of a part of a compilation, which ends now, away from the activity that it was needed for."""
    if not event.startswith(COMPILING) or threading.get_ident() != self._thread:
      return
    with self._lock:
      self._switch(self._activity)
      # of one within another, what is left of the outer one; and never more than the activity took
      seconds = min(duration_secs, self._since - self._compiled_until, self._seconds[self._activity])
      self._compiled_until = self._since
      self._seconds[self._activity] -= seconds
      self._seconds["compilation"] += seconds
    if event == BY_XLA:
      self.programs.append((str(kwargs.get("fun_name", "a program")), seconds))


def peak_memory() -> dict[str, float]:
  """Return the most GiB that this process has held so far, and the most of one of its devices, where JAX tells it."""
  peaks = {}
  if sys.platform != "win32":
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    peaks["host_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
  devices = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
  known = [peak for peak in devices if peak is not None]
  return peaks | ({"device_gib": max(known) / GIB} if known else {})


def describe(summary: Mapping[str, float]) -> str:
  """Return three lines of text about the summary of a phase's steps."""
  wall, steps = summary["wall_seconds"], [f"{summary['steps']} steps"]
  if "tokens_per_second" in summary:
    steps.append(f"{summary['tokens_per_second']:,.0f} tokens/s")
  if "mfu" in summary:
    steps.append(f"MFU {summary['mfu']:.1%}")
  steps += [f"p{n} {summary[f'step_p{n}']:.3g} s" for n in (50, 90, 99)]
  losses = "  ".join(f"{name.replace('_', ' ')} {summary[f'{name}_seconds'] / wall:.1%}" for name in LOSSES)
  peaks = {name: summary[f"{name}_gib"] for name in ("host", "device") if f"{name}_gib" in summary}
  return (
    f"  {'  '.join(steps)}\n"
    f"  goodput {summary['goodput']:.1%} of {datetime.timedelta(seconds=round(wall))}: {losses}\n"
    f"  peak memory: {'  '.join(f'{name} {gib:.2f} GiB' for name, gib in peaks.items())}"
  )

"""A trace of some steps of a phase, for TensorBoard's profile plugin and for Perfetto."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging
from etils import epath

from selfrag_jax.train.goodput import Clock


class Profile:
  """A context that traces the steps from the first to the last of `steps`; no steps, no trace.

  A phase that is stopped before the last of them writes what it has. Traces go to `<workdir>/profile/<phase>`, one of
  each process. The time to begin and to write them counts as `saving` on the clock.
  """

  def __init__(
    self, workdir: epath.PathLike, phase: str, steps: Sequence[int], start_step: int, total_steps: int, clock: Clock
  ):
    self._to, self._phase, self._steps = epath.Path(workdir) / "profile" / phase, phase, steps
    self._clock = clock
    self._folder: tempfile.TemporaryDirectory[str] | None = None  # while it traces
    if steps and not (start_step < steps[-1] and steps[0] <= total_steps):
      logging.warning(
        "phase %s takes the steps %d to %d, none of which is among config.profile_steps = %s: it gets no profile",
        phase,
        start_step + 1,
        total_steps,
        ",".join(map(str, steps)),
      )

  def take(self, step: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that takes a step, and return its results; those of the last traced step are waited for."""
    if self._folder is None and self._steps and self._steps[0] <= step <= self._steps[-1]:
      folder = tempfile.TemporaryDirectory()
      with self._clock.during("saving"):
        jax.profiler.start_trace(folder.name)
      self._folder = folder
    with jax.profiler.StepTraceAnnotation(self._phase, step_num=step):
      results = function(*args)
    if self._folder is not None and step == self._steps[-1]:
      jax.block_until_ready(results)
      self._write()
    return results

  def __enter__(self) -> "Profile":
    return self

  def __exit__(self, *_) -> None:
    if self._folder is not None:
      self._write()

  def _write(self) -> None:
    """End the trace, and copy it: JAX itself writes to local folders alone, and the workdir may be elsewhere."""
    assert self._folder is not None
    with self._clock.during("saving"), self._folder as folder:
      self._folder = None
      jax.profiler.stop_trace()
      for file in Path(folder).rglob("*"):
        if file.is_file():
          host = f"process{jax.process_index()}_" if jax.process_count() > 1 else ""  # several may run on one host
          target = self._to / file.relative_to(folder).with_name(host + file.name)
          target.parent.mkdir(parents=True, exist_ok=True)
          target.write_bytes(file.read_bytes())

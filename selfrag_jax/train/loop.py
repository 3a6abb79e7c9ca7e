"""The training loop, the only one: restore, step, read the metrics of the previous step, do the periodic work."""

import dataclasses
import itertools
import json
import math
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Annotated, Any, Protocol

import jax
import jax.numpy as jnp
from etils import epath
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils

from selfrag_jax import hosts
from selfrag_jax.checked import Checked, Count, Natural, Range
from selfrag_jax.chips import peak_flops
from selfrag_jax.model.config import StepWork, identity
from selfrag_jax.train.checkpoint import Checkpointer, load, read_metadata
from selfrag_jax.train.goodput import Clock
from selfrag_jax.train.interrupt import interrupt
from selfrag_jax.train.profile import Profile
from selfrag_jax.train.recompilation import Recompilations
from selfrag_jax.train.state import TrainState
from selfrag_jax.train.telemetry import Telemetry, read_rows
from selfrag_jax.typing import Params


@dataclasses.dataclass(frozen=True)
class LoopConfig(Checked):
  """The loop's periodic work. Periods are in steps; 0 means only after the last step."""

  checkpoint_every: Natural = 50
  keep_checkpoints: Count = 2
  eval_every: Natural = 0
  log_every: Natural = 1
  preempted_exit_code: Annotated[int, Range(0, 255)] = 143  # of a run that SIGTERM stopped, once its state is saved
  profile_steps: Sequence[int] = ()  # the first and the last step of each phase of which a trace is written

  def __post_init__(self):
    super().__post_init__()
    steps = self.profile_steps
    are_steps = isinstance(steps, tuple | list) and all(type(step) is int and step > 0 for step in steps)
    if not are_steps or len(steps) not in (0, 2) or (steps and steps[0] > steps[1]):
      raise ValueError(f"profile_steps is {steps!r}; give the first and the last step, such as 10,13")


class Preempted(SystemExit):
  """SIGTERM arrived; the state is saved, and the process ends with the configured exit code."""


class TrainingError(RuntimeError):
  """A phase cannot go on, or has not learned what the next one needs; what was saved stays."""


class NonFiniteLossError(TrainingError):
  """The loss, its gradient or the updated state is NaN or infinite; the last good checkpoint stays."""


class Phase(Protocol):
  """One phase of training: its data, one pure step, and its evaluation."""

  @property
  def name(self) -> str: ...

  @property
  def total_steps(self) -> int: ...

  @property
  def best_metric(self) -> str | None:
    """The score of `evaluate` whose best checkpoint is kept beside the latest."""
    ...

  def abstract_state(self) -> TrainState: ...

  def initial_state(self) -> TrainState: ...

  def batches(self, start: int) -> Iterator[Any]:
    """Yield the batches of steps `start`, `start + 1`, …: each is a function of the seed and its step only."""
    ...

  def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Mapping[str, Any]]:
    """Take one step; the state may be donated. Metrics may be arrays that are still being computed."""
    ...

  def evaluate(self, state: TrainState) -> Mapping[str, float]: ...

  def model_params(self, params: Params) -> Params:
    """Return the parameters of the model, from those of a state."""
    ...

  def metadata(self) -> dict[str, Any]:
    """Return what a checkpoint must tell for the model to be loaded from it."""
    ...

  def model_work(self) -> StepWork | None:
    """Return the work of the model in a step; None if not known."""
    ...

  def watch(self, step: int, metrics: Mapping[str, float | None]) -> None:
    """Look at the metrics of each step, also of those before a resume. Raises TrainingError to end the training."""
    ...


# Hosts agree on a number to stop at, above those that they have asked with; steps begin again with each phase.
_ASKED = itertools.count(1)


class StopSignal:
  """A context that records SIGTERM and Ctrl-C, so that the loop can save before it ends.

  A second Ctrl-C raises KeyboardInterrupt at once.
  """

  def __init__(self):
    self.requested: int | None = None
    self._reached = False  # whether several hosts have agreed to stop
    # with several hosts JAX's own handler must stay: it makes the hosts agree on the step
    self._handles = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()

  def __enter__(self) -> "StopSignal":
    if self._handles:
      self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
    return self

  def __exit__(self, *_) -> None:
    if self._handles:
      for number, handler in self._before.items():
        signal.signal(number, handler)

  def _note(self, number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
      if self.requested == signal.SIGINT:
        return interrupt(number, frame, "stopped at once; the newest checkpoint is kept")
      print("stopping after this step, to save it; Ctrl-C again stops at once", file=sys.stderr, flush=True)
    self.requested = number

  def asked(self) -> bool:
    """Tell whether to stop after this step; all hosts ask after each, and get the same answer."""
    if jax.process_count() > 1:
      self._reached = multihost_utils.reached_preemption_sync_point(next(_ASKED))
    return self.noted

  @property
  def noted(self) -> bool:
    return self._reached or self.requested is not None


def checkpoints(workdir: epath.PathLike, phase: str) -> epath.Path:
  """Return the folder of a phase's checkpoints."""
  return epath.Path(workdir) / "checkpoints" / phase


def train(phase: Phase, workdir: epath.PathLike, config: LoopConfig, metadata: Mapping[str, Any]) -> TrainState:
  """Train a phase to its last step, from its newest intact checkpoint if there is one; returns the final state.

  Raises Preempted after SIGTERM and KeyboardInterrupt after Ctrl-C, both with the state saved, NonFiniteLossError with
  the number of the step, and ValueError for checkpoints that this config cannot continue.
  """
  folder = checkpoints(workdir, phase.name)
  metadata = {**metadata, **phase.metadata()}
  with StopSignal() as stop, Clock() as clock:
    with clock.during("start"):  # a sum over devices would wait for a missing process without an end
      hosts.barrier(f"the start of {phase.name}")
    with Checkpointer(folder, keep_latest=config.keep_checkpoints, best_metric=phase.best_metric) as saver:
      with clock.during("start"):
        state = _start(phase, workdir, metadata, saver)
      state = _steps(phase, state, workdir, config, metadata, saver, stop, clock)
    # raised after the last save: the signal may also have come during the last evaluation, or before the first step
    if stop.requested == signal.SIGINT:
      said = f"stopped; step {int(state.step)} of phase {phase.name} is saved, run the same again to go on"
      raise KeyboardInterrupt(said)
    if stop.noted:
      raise Preempted(config.preempted_exit_code)
  return state


def _start(phase: Phase, workdir: epath.PathLike, metadata: Mapping[str, Any], saver: Checkpointer) -> TrainState:
  """Return the state of the newest checkpoint, or that of step 0; show the phase the metrics of the steps before it."""
  restored = saver.restore(phase.abstract_state())
  if restored:
    _check_resumed(phase, restored.metadata, metadata, int(restored.state.step), checkpoints(workdir, phase.name))
  state: TrainState = restored.state if restored else phase.initial_state()
  if (start := int(state.step)) < phase.total_steps:
    _check_followers(phase, epath.Path(workdir) / "checkpoints")
    for row in read_rows(workdir):
      if row["phase"] == phase.name and row["step"] <= start:
        phase.watch(row["step"], row)
  return state


def _steps(
  phase: Phase,
  state: TrainState,
  workdir: epath.PathLike,
  config: LoopConfig,
  metadata: Mapping[str, Any],
  saver: Checkpointer,
  stop: StopSignal,
  clock: Clock,
) -> TrainState:
  """Take the remaining steps, or fewer if `stop` asks for it; the returned state has been handed to `saver`."""
  due = lambda step, period: step == phase.total_steps or (period > 0 and step % period == 0)
  start, total = int(state.step), phase.total_steps
  if start == total:
    return state
  with clock.during("start"):
    clock.peak_tokens_per_second = _peak_tokens_per_second(phase)
    telemetry = Telemetry(workdir, total_steps=total, start_step=start, phase=phase.name, log_every=config.log_every)
    profile = Profile(workdir, phase.name, config.profile_steps, start, total, clock)
  recompilations = Recompilations(phase.name, clock.programs)
  with telemetry, profile:
    pending: tuple[int, Mapping[str, Any]] | None = None
    for step, batch in enumerate(clock.batches(phase.batches(start)), start + 1):
      with recompilations.watching(step, state, batch):
        state, metrics = profile.take(step, phase.step, state, batch)
      clock.dispatched(metrics)
      _log(phase, telemetry, clock, pending)
      pending = (step, metrics)
      stopping = stop.asked()
      evaluating, ending = due(step, config.eval_every), stopping or step == total
      if ending or evaluating or due(step, config.checkpoint_every):
        _log(phase, telemetry, clock, pending)  # before saving: a NaN must not be checkpointed
        pending = None
        with clock.during("saving"):
          _require_finite(state, step)  # a NaN of this update would show only in the loss of the next step
        scores = {}
        if evaluating:  # also when stopping, since the resumed run starts after this step
          with clock.during("evaluation"):
            scores = phase.evaluate(state)
        if scores:
          telemetry.log(step, {f"eval/{name}": value for name, value in scores.items()})
        with clock.during("saving"):
          telemetry.flush()
          saver.save(step, state, metadata={**metadata, "phase": phase.name, "data_position": step}, metrics=scores)
          if ending:
            saver.wait()
      if ending:
        telemetry.summarize(step, clock.summary())
        return state
  raise RuntimeError(f"phase {phase.name} ran out of data before step {total}")


def _peak_tokens_per_second(phase: Phase) -> float | None:
  """Return at how many tokens per second the model's FLOPs would be the devices' peak; None if either is not known."""
  peak = peak_flops(jax.devices())
  work = phase.model_work() if peak else None
  return peak * work.tokens / work.flops if peak and work else None


def read_ended(phase: Phase, workdir: epath.PathLike, metadata: Mapping[str, Any]) -> Params:
  """Read the parameters of the model at the end of a phase, without changing anything on disk.

  Raises ValueError for a phase that has not reached its last step, and for a checkpoint of another model or tokenizer.
  """
  folder = checkpoints(workdir, phase.name)
  restored = load(folder, {"params": phase.abstract_state().params}) if folder.exists() else None
  step = restored.metadata["data_position"] if restored else 0
  if restored is None or step != phase.total_steps:
    raise ValueError(
      f"{folder} is at step {step}, config.{phase.name}.steps is {phase.total_steps}: train the phase to its end "
      "first, with launch/train.py, or evaluate it with the config that it was trained with"
    )
  _check_same(restored.metadata, {**metadata, **phase.metadata()}, folder)
  return phase.model_params(restored.state["params"])


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], folder: epath.Path) -> None:
  """Raise ValueError if the checkpoint has another tokenizer, model, LoRA or origin (the phase that it began from)."""
  if before.get("tokenizer") != now.get("tokenizer"):
    raise ValueError(
      f"{folder} was written with the tokenizer {before.get('tokenizer')}, this run has {now.get('tokenizer')}: "
      "use another workdir"
    )
  before, now = ({**run, "model": identity(run["model"])} if run.get("model") else run for run in (before, now))
  for name in ("model", "lora", "origin"):
    if before.get(name) != now.get(name):
      old, new = (
        {key: value for key, value in (a.get(name) or {}).items() if (b.get(name) or {}).get(key) != value}
        for a, b in ((before, now), (now, before))
      )
      raise ValueError(f"{folder} was written with another {name} ({old}, this run has {new}): use another workdir")


def _check_resumed(
  phase: Phase, before: Mapping[str, Any], now: Mapping[str, Any], step: int, folder: epath.Path
) -> None:
  """Print the step from which the phase continues and the changed settings; raise ValueError if it cannot continue."""
  _check_same(before, now, folder)
  if step > phase.total_steps:
    raise ValueError(
      f"{folder} is already at step {step}, config.{phase.name}.steps is {phase.total_steps}: "
      "use another workdir, or ask for more steps"
    )
  if jax.process_index() == 0:
    print(f"{phase.name}: continues after step {step} of {phase.total_steps}", file=sys.stderr, flush=True)
    old, new = (flatten_dict(json.loads(json.dumps(run.get("config", {}))), sep=".") for run in (before, now))
    for key in sorted(old.keys() | new.keys()):
      if old.get(key) != new.get(key):
        print(f"  config.{key} was {old.get(key)}, is now {new.get(key)}", file=sys.stderr, flush=True)


def _check_followers(phase: Phase, folder: epath.Path) -> None:
  """Raise ValueError if a later phase began from another last step of this one: its resume would be refused."""
  for other in folder.iterdir():
    origin = (read_metadata(other) or {}).get("origin") or {}
    if origin.get("phase") == phase.name and "workdir" not in origin and origin.get("steps") != phase.total_steps:
      raise ValueError(
        f"{other} began where {phase.name} was at step {origin.get('steps')}, config.{phase.name}.steps is "
        f"{phase.total_steps}: use another workdir, or as many steps as before"
      )


def _require_finite(state: TrainState, step: int) -> None:
  """Raise NonFiniteLossError, naming the first array of parameters and optimizer with a NaN or an infinity."""
  arrays = {"params": state.params, "opt_state": state.opt_state}
  named = [(path, x) for path, x in jax.tree_util.tree_leaves_with_path(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]
  finite = jax.device_get(_all_finite([x for _, x in named]))
  for (path, _), is_finite in zip(named, finite, strict=True):
    if not is_finite:
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      raise NonFiniteLossError(
        f"{name} is not finite after step {step}, which is not saved; the last good checkpoint is kept: lower the "
        "learning rate"
      )


@jax.jit
def _all_finite(arrays: list[jax.Array]) -> list[jax.Array]:
  return [jnp.isfinite(x).all() for x in arrays]


def _log(phase: Phase, telemetry: Telemetry, clock: Clock, pending: tuple[int, Mapping[str, Any]] | None) -> None:
  if pending is None:
    return
  step, metrics = pending
  values = {name: float(value) for name, value in metrics.items()}
  clock.has_read(values.get("tokens", 0.0))
  telemetry.log(step, values, clock.so_far())
  for name in ("loss", "grad_norm"):  # a finite loss can have a NaN gradient, which makes the parameters NaN
    if not math.isfinite(values.get(name, 0.0)):
      raise NonFiniteLossError(
        f"{name} is {values[name]} at step {step}; the last good checkpoint is kept: lower the learning rate"
      )
  phase.watch(step, values)

"""Verified checkpoints: orbax writes, a manifest commits, and nothing is restored before it has been hashed.

`<directory>/<step>/` holds orbax's files, `metadata.json` (the run's metadata, and the shape and dtype of every array)
and `manifest.json`: size and SHA-256 of every other file, written last. The manifest is the commit: a folder without a
manifest that verifies is not a checkpoint. (Orbax alone restores most flipped bytes silently.) Entries whose name is no
step number are left alone; a folder with a step's name that was not written here is moved aside, never deleted.
"""

import concurrent.futures
import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from selfrag_jax.storage.atomic import absolute, check_writable, is_local, os_errors, write_bytes_atomic
from selfrag_jax.storage.manifest import MANIFEST, Manifest, digests, first_damage, read_fields

METADATA = "metadata.json"
ORBAX = "_METADATA"  # orbax writes this file into every step, and nothing else writes one
_MANIFEST = Manifest({"files": dict})


class CheckpointError(RuntimeError):
  """A checkpoint could not be written, or the requested step cannot be read."""


@dataclasses.dataclass(frozen=True)
class Restored:
  """A checkpoint read back: the pytree as it was saved, and the metadata that was saved with it."""

  step: int
  state: Any
  metadata: dict[str, Any]


class Checkpointer:
  """Save a run's state in the background, keep the latest and the best steps, restore the newest intact step.

  All processes of a run create one and call it together; process 0 hashes, commits and deletes. One run per directory
  (`open_workdir`): the constructor deletes the half-written steps of an earlier run. To only read, use `load`.

  Args:
    directory: the folder of the steps; local or object storage.
    keep_latest: the number of newest steps to keep.
    best_metric: a key of `metrics`; the step with the best value is kept as well.
    best_mode: whether the largest or the smallest value is best.
  """

  def __init__(
    self,
    directory: epath.PathLike,
    *,
    keep_latest: int = 2,
    best_metric: str | None = None,
    best_mode: Literal["max", "min"] = "max",
  ):
    if keep_latest < 1 or best_mode not in ("max", "min"):
      raise ValueError(f"keep_latest is {keep_latest}, best_mode {best_mode!r}; need at least 1, and 'max' or 'min'")
    self._directory = absolute(directory)  # orbax refuses relative paths
    self._keep_latest, self._best_metric, self._best_mode = keep_latest, best_metric, best_mode
    try:
      with os_errors():
        if is_local(self._directory):
          check_writable(self._directory, f"the folder {self._directory}")
        self._directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise CheckpointError(f"no checkpoints can be saved: {error}") from error
    if jax.process_index() == 0:
      for leftover in self._directory.glob("*.orbax-checkpoint-tmp*"):
        if leftover.is_dir() and re.fullmatch(r"\d+\.orbax-checkpoint-tmp(-\d+)?", leftover.name):
          leftover.rmtree()
    self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    self._worker = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint_commit")
    self._pending: tuple[int, concurrent.futures.Future[None]] | None = None

  def save(
    self, step: int, state: Any, *, metadata: Mapping[str, Any], metrics: Mapping[str, float] | None = None
  ) -> None:
    """Copy `state` off the devices and return; writing, hashing, commit and deletion go on in the background.

    Waits for the previous save if it is still running. `state` may be donated as soon as this returns.

    Args:
      step: the folder's name; must not be a committed step.
      state: pytree of JAX arrays of any dtype, typed random keys included.
      metadata: JSON-serialisable; `restore` and `read_metadata` return it.
      metrics: scores by name; a step whose `best_metric` is missing or NaN is never the best.

    Raises:
      CheckpointError: this or the previous save failed (a full disk, say); committed steps are intact.
      ValueError: the step is committed already, or `metadata` has NaN.
    """
    self.wait()
    folder = self._directory / str(step)
    if (folder / MANIFEST).exists():
      raise ValueError(f"step {step} is already saved in {self._directory}; delete it or use another workdir")
    if jax.process_index() == 0 and folder.exists():  # left by a failed save, or by another program
      _set_aside(folder)
    document = {
      "step": step,
      "metadata": dict(metadata),
      "metrics": {name: float(value) if math.isfinite(value) else None for name, value in (metrics or {}).items()},
      "environment": environment(),
      "arrays": _describe(state),
    }
    # encoded now, since the caller may change its mappings later
    encoded = json.dumps(document, indent=2, allow_nan=False).encode()
    try:
      with os_errors():
        # force: an uncommitted folder of this step may be in the way
        self._orbax.save(folder, args=ocp.args.PyTreeSave(jax.tree.map(_raw, state)), force=True)
    except OSError as error:
      raise self._failure(step, error) from error
    self._pending = step, self._worker.submit(self._commit, folder, encoded)

  def wait(self) -> None:
    """Block until the running save is committed. Raises CheckpointError if it failed."""
    if self._pending is None:
      return
    (step, commit), self._pending = self._pending, None
    try:
      commit.result()
    except Exception as error:
      raise self._failure(step, error) from error

  def close(self) -> None:
    """Wait for the running save and end the background thread."""
    try:
      self.wait()
    finally:
      self._worker.shutdown()
      self._orbax.close()

  def __enter__(self) -> "Checkpointer":
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def restore(self, abstract_state: Any, step: int | None = None) -> Restored | None:
    """Read the newest intact step, or `step`, onto the shardings of `abstract_state`; None if there is no step at all.

    Newer damaged steps are named in a warning and moved to `damaged-<step>-<n>`; newer steps that a kill left
    uncommitted are deleted. So the resumed run can save these steps again. A jax version, core count or XLA flags that
    differ from those at the save cause only a warning.

    Args:
      abstract_state: pytree of `jax.ShapeDtypeStruct` (or arrays) with the saved names, shapes and dtypes; a leaf
        without sharding goes to the first local device.
      step: the step to read, if not the newest.

    Raises:
      CheckpointError: `step` is missing or damaged.
      ValueError: the saved tree differs; names the first array that does.
    """
    self.wait()
    found = -1
    if jax.process_index() == 0:
      found = _find(self._directory, step, on_damage=_set_aside)
    found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
    if found < 0:
      return None
    folder = self._directory / str(found)
    document = _read_document(folder)
    for name, now in environment().items():
      if (then := document["environment"].get(name)) != now:
        logging.warning("Resume may not be bit-identical: %s was %r when saved and is %r now", name, then, now)
    return _read(folder, document, abstract_state, whole=True)

  def _commit(self, folder: epath.Path, document: bytes) -> None:
    """Finish orbax's save, write the manifest, and only then delete the steps that are no longer wanted."""
    self._orbax.wait_until_finished()
    if jax.process_index() != 0:
      return
    write_bytes_atomic(folder / METADATA, document)
    _MANIFEST.write(folder, files=digests(folder))
    for step in set(_steps(self._directory)) - self._wanted():
      if _is_ours(self._directory / str(step)):
        _delete(self._directory / str(step))

  def _wanted(self) -> set[int]:
    committed = [step for step in _steps(self._directory) if (self._directory / str(step) / MANIFEST).is_file()]
    scores = {step: score for step in committed if (score := self._score(step)) is not None}
    best = sorted(scores, key=lambda step: (scores[step], step))[-1:]
    return {*committed[-self._keep_latest :], *best}

  def _score(self, step: int) -> float | None:
    """Return the step's best metric, negated if lower values are better; None if the step has none."""
    try:
      value = _read_document(self._directory / str(step))["metrics"].get(self._best_metric)
    except (OSError, ValueError):  # damaged since its commit; restore deals with it
      return None
    if type(value) not in (int, float):
      return None
    return value if self._best_mode == "max" else -value

  def _failure(self, step: int, error: Exception) -> CheckpointError:
    return CheckpointError(
      f"saving step {step} to {self._directory} failed: {error}. Earlier steps there are intact; if the disk is full "
      "or read-only, mend that, then start the run again"
    )


def read_metadata(directory: epath.PathLike, step: int | None = None) -> dict[str, Any] | None:
  """Return the metadata of the newest intact step, or of `step`, without reading arrays; None if there is none.

  Changes nothing on disk, so it may look at a run in progress. Raises CheckpointError if `step` is missing or damaged.
  """
  found = _find(epath.Path(directory), step)
  return None if found < 0 else _read_document(epath.Path(directory) / str(found))["metadata"]


def load(directory: epath.PathLike, abstract_state: Any, step: int | None = None) -> Restored | None:
  """Read the newest intact step, or `step`, for inference: like `Checkpointer.restore`, but changes nothing on disk.

  `abstract_state` may be a part of the saved tree (`{"params": ...}` without the optimizer); only that part is read.
  Raises as `Checkpointer.restore` does.
  """
  directory = absolute(directory)
  found = _find(directory, step)
  if found < 0:
    return None
  folder = directory / str(found)
  return _read(folder, _read_document(folder), abstract_state, whole=False)


def environment() -> dict[str, Any]:
  """Return the facts, besides the state, on which bit-identical resume depends: versions, usable cores, XLA flags."""
  # XLA splits CPU reductions by the cores that it may use, which changes the order of summation
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
  return {
    "jax": importlib.metadata.version("jax"),
    "jaxlib": importlib.metadata.version("jaxlib"),
    "cores": cores,
    "xla_flags": os.environ.get("XLA_FLAGS", ""),
  }


def _find(directory: epath.Path, step: int | None, on_damage: Callable[[epath.Path], None] | None = None) -> int:
  """Return the newest intact step, or `step` if it is intact; -1 if there is none.

  Warns about damaged steps and passes them to `on_damage`. Raises CheckpointError if `step` is missing or damaged.
  """
  steps = _steps(directory)
  if step is not None:
    damage = _damage(directory / str(step)) if step in steps else "there is no such step"
    if damage:
      raise CheckpointError(f"cannot read step {step} in {directory}: {damage}; the steps there are {steps}")
    return step
  for candidate in reversed(steps):
    folder = directory / str(candidate)
    damage = _damage(folder)
    if damage is None:
      return candidate
    logging.warning("Skipping checkpoint step %d in %s: %s", candidate, directory, damage)
    if on_damage:
      on_damage(folder)
  return -1


def _steps(directory: epath.Path) -> list[int]:
  """List the step numbers among the folder's names, in the form that this module writes: `007` is not one."""
  names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
  return sorted(int(name) for name in names if name.isascii() and name.isdecimal() and str(int(name)) == name)


def _damage(folder: epath.Path) -> str | None:
  """Describe the damage of a step's folder; None if every file matches the manifest."""
  if not folder.is_dir():
    return "it is a file, not a folder"
  if not (folder / MANIFEST).exists():
    return f"no {MANIFEST}, the save was cut short" if _is_ours(folder) else f"no {MANIFEST}, no checkpoint"
  try:
    listed = _MANIFEST.read(folder)["files"]
  except ValueError as error:
    return f"{MANIFEST} is damaged, {error}"
  if damage := first_damage(folder, listed):
    name, exists = damage[0].relative_to(folder).as_posix(), damage[1]
    return f"{name} is damaged, it differs from {MANIFEST}" if exists else f"{name} is missing, but {MANIFEST} lists it"
  if missing := {METADATA, ORBAX} - listed.keys():
    return f"{MANIFEST} is damaged, it lists no {min(missing)}"
  try:
    document = _read_document(folder)
  except ValueError as error:
    return f"{METADATA} is damaged, {error}"
  if document.get("step", int(folder.name)) != int(folder.name):  # earlier versions did not save the number
    return f"{METADATA} is that of step {document['step']}, the folder was renamed or copied"
  return None


def _is_ours(folder: epath.Path) -> bool:
  """Tell whether a folder is a step, complete or not; another folder with a number as its name must not be deleted."""
  return folder.is_dir() and ((folder / ORBAX).exists() or not any(folder.iterdir()))


def _set_aside(folder: epath.Path) -> None:
  if _is_ours(folder) and not (folder / MANIFEST).exists():  # not a checkpoint yet: a kill while saving leaves it
    _delete(folder)
    return
  for n in itertools.count():
    if not (aside := folder.with_name(f"damaged-{folder.name}-{n}")).exists():
      folder.rename(aside)
      logging.warning("Moved %s to %s", folder, aside)
      return


def _delete(folder: epath.Path) -> None:
  """Delete a step: the manifest first, so that no kill leaves half a checkpoint, and last the file that marks a step.

  Of a symbolic link only the link is deleted: the folder behind it is where somebody has moved the step.
  """
  if is_local(folder) and os.path.islink(folder):
    os.unlink(folder)
    return
  (folder / MANIFEST).unlink(missing_ok=True)
  for path in folder.iterdir():
    if path.is_dir():
      path.rmtree()
    elif path.name != ORBAX:
      path.unlink()
  folder.rmtree()


def _read_document(folder: epath.Path) -> dict[str, Any]:
  return read_fields(folder / METADATA, dict.fromkeys(("metadata", "metrics", "environment", "arrays"), dict))


def _describe(tree: Any) -> dict[str, Any]:
  """Map each array's path in the tree (`params/embed/embedding`) to its shape and dtype, in types that JSON keeps."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def _require_same(saved: dict[str, Any], wanted: dict[str, Any], *, whole: bool) -> None:
  """Raise ValueError at the first array that differs; with `whole`, every saved array must be wanted."""
  for name in [*wanted, *saved] if whole else wanted:
    old, new = saved.get(name), wanted.get(name)
    if old == new:
      continue
    if old and new and old["dtype"] == new["dtype"]:
      old, new = tuple(old["shape"]), tuple(new["shape"])
    else:
      old, new = (f"{a['dtype']}{a['shape']}" if a else "has none" for a in (old, new))
    raise ValueError(
      f"{name}: checkpoint {old}, model {new}; use another workdir, or the model config that {METADATA} there holds"
    )


def _read(folder: epath.Path, document: dict[str, Any], abstract_state: Any, *, whole: bool) -> Restored:
  """Read an intact step, whose metadata is `document`. Raises ValueError like `_require_same`."""
  _require_same(document["arrays"], _describe(abstract_state), whole=whole)
  target = jax.tree.map(_abstract_raw, abstract_state)
  args = ocp.args.PyTreeRestore(
    item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
  )
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    state = jax.tree.map(_typed, abstract_state, reader.restore(folder, args=args))
  return Restored(int(folder.name), state, document["metadata"])


# Orbax stores plain arrays: a typed random key is stored as its uint32 data and gets its type from the expected state.


def _is_key(x: Any) -> bool:
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _raw(x: Any) -> Any:
  return jax.random.key_data(x) if _is_key(x) else x


def _abstract_raw(x: Any) -> jax.ShapeDtypeStruct:
  raw = jax.eval_shape(_raw, jax.ShapeDtypeStruct(x.shape, x.dtype))
  sharding = getattr(x, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(raw.shape, raw.dtype, sharding=sharding)


def _typed(like: Any, x: jax.Array) -> jax.Array:
  return jax.random.wrap_key_data(x, impl=jax.random.key_impl(jnp.empty((), like.dtype))) if _is_key(like) else x

"""The folder of a run, which belongs to one experiment and serves one run at a time."""

import contextlib
import json
import os
from collections.abc import Iterator

import jax
from etils import epath

from selfrag_jax.storage.atomic import absolute, check_writable, is_local, write_json
from selfrag_jax.storage.lock import lock_folder

RUN = "run.json"  # names the experiment of a folder
SHARED = {"position_recall": "self_rag"}  # the first continues from the phases of the second, in the same folder


def check_workdir(path: epath.PathLike, experiment: str = "") -> None:
  """Check before any work that a run can write into a folder, which need not exist yet. Changes nothing.

  Raises like `check_writable`, and ValueError for a folder of another experiment and for storage other than gs://.
  """
  if not os.fspath(path):
    raise ValueError("the workdir is an empty name; give the folder that checkpoints, metrics and reports go to")
  workdir = absolute(path)
  if is_local(path):
    check_writable(workdir, f"the workdir {path}")
  elif not os.fspath(path).startswith("gs://"):
    raise ValueError(
      f"the workdir {path} is neither a folder nor in Google Cloud Storage: give a name like gs://BUCKET/RUN"
    )
  other = _experiment_of(workdir) if experiment else None
  if other and SHARED.get(other, other) != SHARED.get(experiment, experiment):
    raise ValueError(f"the workdir {path} is of experiment {other!r}, this one is {experiment!r}: use another workdir")


@contextlib.contextmanager
def open_workdir(path: epath.PathLike, experiment: str = "") -> Iterator[epath.Path]:
  """Create the folder and let process 0 hold its lock, so that two runs never write into one workdir.

  Call it after `jax.distributed` has started. Raises FolderInUseError when another run holds the lock, and like
  `check_workdir` and `lock_folder`.
  """
  check_workdir(path, experiment)
  workdir = epath.Path(path)
  if is_local(path):  # in object storage, folders are the beginnings of names
    workdir.mkdir(parents=True, exist_ok=True)
  if jax.process_index() != 0:
    yield workdir
    return
  with lock_folder(workdir, "stop that run, or give this one another workdir"):
    check_workdir(path, experiment)  # another run may have begun meanwhile
    if experiment and _experiment_of(workdir) is None:
      write_json(workdir / RUN, {"experiment": experiment})
    yield workdir


def _experiment_of(workdir: epath.Path) -> str | None:
  """Return the experiment that the `run.json` of a folder names, or else its checkpoints; None if neither does."""
  for path in (workdir / RUN, *workdir.glob("checkpoints/*/*/metadata.json")):
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):  # damaged, or not ours
      found = json.loads(path.read_bytes())
      name = found["experiment"] if path.name == RUN else found["metadata"]["config"]["experiment"]
      if isinstance(name, str):
        return name
  return None

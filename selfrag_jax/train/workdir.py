"""A run's folder: one run at a time."""

import contextlib
from collections.abc import Iterator

import jax
from etils import epath

from selfrag_jax.files import lock_folder


@contextlib.contextmanager
def open_workdir(path: epath.PathLike) -> Iterator[epath.Path]:
  """Create the folder and let process 0 hold its lock, so that two runs never write into one workdir.

  Call it after `jax.distributed` has started. Raises FolderInUseError when another run holds the lock.
  """
  workdir = epath.Path(path)
  workdir.mkdir(parents=True, exist_ok=True)
  if jax.process_index() != 0:
    yield workdir
    return
  with lock_folder(workdir, "stop that run, or give this one another workdir"):
    yield workdir

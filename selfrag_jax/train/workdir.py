"""A run's folder: one run at a time, and files that are whole or absent."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath

try:
  import fcntl
except ImportError:  # Windows: no advisory locks, so runs are not kept apart there
  fcntl = None


class WorkdirInUseError(RuntimeError):
  """Another run holds the lock of this folder."""


def is_local(path: epath.PathLike) -> bool:
  """Tell whether `path` lies on a file system (atomic rename, locks) and not in object storage such as `gs://`."""
  return "://" not in os.fspath(path)


@contextlib.contextmanager
def open_workdir(path: epath.PathLike) -> Iterator[epath.Path]:
  """Create the folder and hold its lock, so that two runs never write into one workdir.

  Process 0 holds an exclusive `flock` on `<path>/.lock`; the operating system releases it however the process ends,
  `kill -9` included. Object storage has no locks: there, two runs in one workdir are the user's to avoid.
  Call it after `jax.distributed` has started.

  Raises:
    WorkdirInUseError: another run holds the lock; names its process and host.
  """
  workdir = epath.Path(path)
  workdir.mkdir(parents=True, exist_ok=True)
  if fcntl is None or not is_local(workdir) or jax.process_index() != 0:
    yield workdir
    return
  with open(workdir / ".lock", "a+") as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      lock.seek(0)
      raise WorkdirInUseError(
        f"{workdir} is in use by {lock.read().strip()}; stop that run, or give this one another workdir"
      ) from None
    lock.truncate(0)
    lock.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    yield workdir


def write_bytes_atomic(path: epath.PathLike, data: bytes) -> None:
  """Write a file that is either whole or absent (or as it was), through power loss too.

  Locally: temporary file, fsync, rename, fsync of the folder. In object storage one object's write is atomic already.
  """
  target = epath.Path(path)
  if not is_local(target):
    target.write_bytes(data)
    return
  temporary = target.with_name(f".{target.name}.tmp")
  with open(temporary, "wb") as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, target)
  if os.name == "posix":  # the rename is durable once its folder is; Windows has no such call
    folder = os.open(target.parent, os.O_RDONLY)
    try:
      os.fsync(folder)
    finally:
      os.close(folder)


def write_json(path: epath.PathLike, obj: Any) -> None:
  """Write `obj` as strict JSON, atomically. Raises ValueError for NaN and infinity, which JSON cannot hold."""
  write_bytes_atomic(path, (json.dumps(obj, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())

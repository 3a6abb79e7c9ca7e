"""Files that are whole or absent, and folders that one process writes to at a time. Imports no JAX."""

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from typing import Any

from etils import epath

try:
  import fcntl
except ImportError:  # Windows: no advisory locks, so writers are not kept apart there
  fcntl = None


class FolderInUseError(RuntimeError):
  """Another process holds the lock of this folder."""


def is_local(path: epath.PathLike) -> bool:
  """Tell whether `path` lies on a file system (atomic rename, locks) and not in object storage such as `gs://`."""
  return "://" not in os.fspath(path)


def absolute(path: epath.PathLike) -> epath.Path:
  """Return `path` as one that a later change of the working directory does not move; object storage's already are."""
  path = epath.Path(path)
  return path if path.is_absolute() else path.absolute()


@contextlib.contextmanager
def lock_folder(path: epath.PathLike, advice: str) -> Iterator[None]:
  """Hold the lock of an existing folder, so that no other process writes into it.

  It is an exclusive `flock` on `<path>/.lock`; the operating system releases it however the process ends, `kill -9`
  included. Object storage has no locks: two writers of one folder there are the user's to avoid.

  Raises:
    FolderInUseError: another process holds the lock; names that process and its host, and gives the `advice`.
  """
  if fcntl is None or not is_local(path):
    yield
    return
  with open(epath.Path(path) / ".lock", "a+") as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      lock.seek(0)
      raise FolderInUseError(f"{path} is in use by {lock.read().strip()}; {advice}") from None
    lock.truncate(0)
    lock.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    yield


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


def digest(path: epath.PathLike) -> dict[str, Any]:
  """Return what a manifest says of a file: its `sha256` in hexadecimal and its `size` in bytes."""
  sha256, size = hashlib.sha256(), 0
  with epath.Path(path).open("rb") as file:
    while chunk := file.read(1 << 24):
      sha256.update(chunk)
      size += len(chunk)
  return {"sha256": sha256.hexdigest(), "size": size}

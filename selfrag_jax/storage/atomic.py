"""Atomic writes: a file is either whole or absent."""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from etils import epath


def is_local(path: epath.PathLike) -> bool:
  """Tell whether `path` lies on a file system (atomic rename, locks) and not in object storage such as `gs://`."""
  return "://" not in os.fspath(path)


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
  """Raise OSError in place of the errors of TensorFlow, by which epath reads and writes object storage."""
  try:
    yield
  except Exception as error:
    if not type(error).__module__.startswith("tensorflow."):  # which is imported only where there is such storage
      raise
    raise OSError(" ".join(str(error).split())) from error


def absolute(path: epath.PathLike) -> epath.Path:
  """Return `path` as an absolute path; a path in object storage already is one."""
  path = epath.Path(path)
  return path if path.is_absolute() else path.absolute()


def check_writable(path: epath.PathLike, called: str) -> None:
  """Check that files can be written to a local folder, which need not exist yet; `called` is its name in errors.

  Raises NotADirectoryError or PermissionError where no folder can be made or written.
  """
  path = absolute(path)
  there = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
  if not there.is_dir():
    raise NotADirectoryError(f"{called} cannot be made: {there} is a file or a broken link; give another one")
  if not os.access(there, os.W_OK | os.X_OK):
    raise PermissionError(f"{called} cannot be written: no permission to write into {there}; give another one")


def temporary_name(name: str) -> str:
  """Return the name under which a file is written before it is renamed; a process that is killed may leave one."""
  return f".{name}.tmp"


@contextlib.contextmanager
def replace_atomic(path: epath.PathLike) -> Iterator[epath.Path]:
  """Yield the path of a temporary file to write; when the block ends, the file takes the place of `path`.

  The temporary file lies in the same folder on a local disk and is brought to the disk first (fsync, rename, fsync of
  the folder). If anything fails before the rename, it is deleted and `path` stays as it was.
  """
  target = epath.Path(path)
  temporary = target.with_name(temporary_name(target.name))
  temporary.unlink(missing_ok=True)  # a killed process may have left a file, or it is a link to some other file
  try:
    yield temporary
    with open(temporary, "r+b") as file:
      os.fsync(file.fileno())
    os.replace(temporary, target)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise
  fsync_paths(target.parent)  # the rename is durable once its folder is


def write_bytes_atomic(path: epath.PathLike, data: bytes) -> None:
  """Write a file so that it is either whole or as it was before (or absent), even after a power cut.

  In object storage the write of one object is atomic already.
  """
  if not is_local(path):
    epath.Path(path).write_bytes(data)
    return
  with replace_atomic(path) as temporary, open(temporary, "xb") as file:
    file.write(data)


def write_json(path: epath.PathLike, obj: Any) -> None:
  """Write `obj` as `json_bytes`, atomically."""
  write_bytes_atomic(path, json_bytes(obj))


def json_bytes(obj: Any) -> bytes:
  """Return `obj` as strict JSON. Raises ValueError for NaN and infinity, which JSON cannot hold."""
  return (json.dumps(obj, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def fsync_paths(*paths: epath.PathLike) -> None:
  """Bring local files and folders to the disk, so that a power cut does not lose them; on Windows do nothing."""
  if os.name != "posix":
    return
  for path in paths:
    descriptor = os.open(path, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)

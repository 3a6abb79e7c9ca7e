"""Atomic writes: a file that is either whole or absent."""

import json
import os
from typing import Any

from etils import epath


def is_local(path: epath.PathLike) -> bool:
  """Tell whether `path` lies on a file system (atomic rename, locks) and not in object storage such as `gs://`."""
  return "://" not in os.fspath(path)


def absolute(path: epath.PathLike) -> epath.Path:
  """Return `path` as one that a later change of the working directory does not move; object storage's already are."""
  path = epath.Path(path)
  return path if path.is_absolute() else path.absolute()


def write_bytes_atomic(path: epath.PathLike, data: bytes) -> None:
  """Write a file that is either whole or absent (or as it was), through power loss too.

  Locally: temporary file, fsync, rename, fsync of the folder. In object storage one object's write is atomic already.
  """
  target = epath.Path(path)
  if not is_local(target):
    target.write_bytes(data)
    return
  temporary = target.with_name(f".{target.name}.tmp")
  temporary.unlink(missing_ok=True)  # of a process that was killed, or a link to some other file
  with open(temporary, "xb") as file:
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

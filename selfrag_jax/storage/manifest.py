"""Manifests: the hash and the size of every file of a folder, written last."""

import hashlib
from typing import Any

from etils import epath


def file_digest(path: epath.PathLike) -> dict[str, Any]:
  """Return what a manifest says of a file: its `sha256` in hexadecimal and its `size` in bytes."""
  sha256, size = hashlib.sha256(), 0
  with epath.Path(path).open("rb") as file:
    while chunk := file.read(1 << 24):
      sha256.update(chunk)
      size += len(chunk)
  return {"sha256": sha256.hexdigest(), "size": size}

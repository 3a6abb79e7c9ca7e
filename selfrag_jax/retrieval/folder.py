"""A folder of files that is published as a whole: a process that is killed leaves the old files or the new ones.

  manifest.json   format, generation G, and the digest of each file
  data-G/         the files

The manifest is written last. What has been damaged since is an error that names the file. A folder that holds anything
else is left alone.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selfrag_jax import files

FORMAT = 1
MANIFEST = "manifest.json"
OURS = re.compile(r"manifest\.json|\.manifest\.json\.tmp|\.lock|\.build|data-[0-9]+")
PICKLES = (".pkl", ".pickle", ".pt", ".joblib")


class FolderError(RuntimeError):
  """A folder cannot be used; the message names the file and the way out."""


def check_ours(folder: str | os.PathLike) -> None:
  """Raise FolderError for a folder that holds files of somebody else: publishing takes away what it takes for old."""
  root = Path(folder)
  if not root.is_dir() or (root / MANIFEST).exists():
    return
  if others := sorted(path.name for path in root.iterdir() if not OURS.fullmatch(path.name)):
    raise FolderError(f"{folder} is no knowledge base and holds other files, such as {others[0]}; give an empty one")


@contextlib.contextmanager
def publish(folder: str | os.PathLike, expected: int | None = None) -> Iterator[tuple[Path, int]]:
  """Yield an empty folder to write files into, and its generation; it takes the old one's place when the block ends.

  One process publishes to a folder at a time: raises FolderInUseError in the others. `expected` is the generation that
  was read, if what is written is made from it. Raises FolderError if another process has published since, and for a
  folder of other files.
  """
  root = Path(folder).absolute()
  check_ours(root)
  root.mkdir(parents=True, exist_ok=True)
  with files.lock_folder(root, "wait for it to end, or give another folder"):
    if expected is not None and generation(root) != expected:
      raise FolderError(f"{folder} was changed by another process since it was opened; run the same again")
    # not from the manifest, which may be damaged: what was built anew must not need it
    number = 1 + max((int(path.name[5:]) for path in _generations(root)), default=0)
    target = root / f"data-{number}"
    target.mkdir()
    try:
      yield target, number
      digests = {str(file.relative_to(target)): files.digest(file) for file in sorted(_files(target))}
      _make_durable(target)
    except BaseException:
      shutil.rmtree(target, ignore_errors=True)
      raise
    # Ctrl-C may come when the manifest is there already: from here on nothing new is taken away
    files.write_json(root / MANIFEST, {"format": FORMAT, "generation": number, "files": digests})
    for old in _generations(root):
      if old != target:
        shutil.rmtree(old, ignore_errors=True)


def verified(folder: str | os.PathLike) -> Path:
  """Return the folder of the files that were published last, after their digests were checked.

  Raises FileNotFoundError where nothing was published, FolderError for what is damaged, missing, newer than this
  version, or a pickle: those can run code when they are read.
  """
  root = Path(folder).absolute()
  if not (root / MANIFEST).exists():
    raise FileNotFoundError(f"{folder} has no {MANIFEST}: it is no knowledge base, or building it has not ended")
  manifest = _read(root)
  data = root / f"data-{manifest['generation']}"
  if pickles := [file for file in (*root.iterdir(), *data.rglob("*")) if file.suffix in PICKLES]:
    raise FolderError(f"{pickles[0]} is a pickle, which can run code when it is read; delete it")
  for name, digest in manifest["files"].items():
    if not (data / name).resolve().is_relative_to(data.resolve()):
      raise FolderError(f"{root / MANIFEST} names {name}, which lies outside of {data}; build {folder} again")
    if not (data / name).exists():
      raise FolderError(f"{data / name} is missing; build {folder} again")
    if files.digest(data / name) != digest:
      raise FolderError(f"{data / name} is not what was written: its hash differs; build {folder} again")
  return data


def sizes(folder: str | os.PathLike) -> dict[str, int]:
  """Return the bytes of each file that was published last. Raises FolderError."""
  return {name: digest["size"] for name, digest in _read(Path(folder))["files"].items()}


def generation(folder: str | os.PathLike) -> int:
  """Return the number of what was published last, 0 before anything was. Raises FolderError."""
  root = Path(folder)
  return _read(root)["generation"] if (root / MANIFEST).exists() else 0


def _read(root: Path) -> dict[str, Any]:
  try:
    manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
    version = manifest["format"]
    if version == FORMAT:
      int(manifest["generation"]), dict(manifest["files"])
  except (ValueError, KeyError, TypeError) as error:
    raise FolderError(f"{root / MANIFEST} is damaged ({error!r}); build {root} again") from None
  if version != FORMAT:
    raise FolderError(f"{root} has format {version}, this version reads {FORMAT}; build it again or update selfrag_jax")
  return manifest


def _generations(root: Path) -> list[Path]:
  return [path for path in root.glob("data-*") if path.name[5:].isdecimal()]


def _make_durable(root: Path) -> None:
  """Bring files and folders to the disk before the manifest that names them, so that a power cut loses neither."""
  if os.name != "posix":
    return
  for path in (*root.rglob("*"), root, root.parent):
    descriptor = os.open(path, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)


def _files(root: Path) -> Iterator[Path]:
  return (file for file in root.rglob("*") if file.is_file())

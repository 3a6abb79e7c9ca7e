"""A folder of files that is published as a whole: a process that is killed leaves the old files or the new ones.

  manifest.json   format, generation G, and the digest of each file
  data-G/         the files

The manifest is written last. What has been damaged since is an error that names the file.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selfrag_jax import files

FORMAT = 1
MANIFEST = "manifest.json"
PICKLES = (".pkl", ".pickle", ".pt", ".joblib")


class FolderError(RuntimeError):
  """A folder cannot be used; the message names the file and the way out."""


@contextlib.contextmanager
def publish(folder: str | os.PathLike) -> Iterator[Path]:
  """Yield an empty folder to write files into; they take the place of the old ones when the block ends without error.

  One process publishes to a folder at a time: raises FolderInUseError in the others.
  """
  root = Path(folder).absolute()
  root.mkdir(parents=True, exist_ok=True)
  with files.lock_folder(root, "wait for it to end, or give another folder"):
    # not from the manifest, which may be damaged: what was built anew must not need it
    generation = 1 + max((int(name) for path in root.glob("data-*") if (name := path.name[5:]).isdigit()), default=0)
    target = root / f"data-{generation}"
    shutil.rmtree(target, ignore_errors=True)  # of a process that was killed
    target.mkdir()
    try:
      yield target
      digests = {str(file.relative_to(target)): files.digest(file) for file in sorted(_files(target))}
    except BaseException:
      shutil.rmtree(target, ignore_errors=True)
      raise
    # Ctrl-C may come when the manifest is there already: from here on nothing new is taken away
    files.write_json(root / MANIFEST, {"format": FORMAT, "generation": generation, "files": digests})
    for old in root.glob("data-*"):
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


def _files(root: Path) -> Iterator[Path]:
  return (file for file in root.rglob("*") if file.is_file())

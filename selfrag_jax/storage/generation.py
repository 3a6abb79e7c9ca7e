"""A folder of files that is published as a whole: a process that is killed leaves the old files or the new ones.

  manifest.json   format, generation G, and the digest of each file
  data-G/         the files

The manifest is written last. What has been damaged since is an error that names the file. A folder that holds anything
else is left alone.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selfrag_jax.storage.atomic import fsync_paths, temporary_name
from selfrag_jax.storage.lock import lock_folder
from selfrag_jax.storage.manifest import MANIFEST, FormatError, Manifest, ManifestError, digests, first_damage

PICKLES = (".pkl", ".pickle", ".pt", ".joblib")
_MANIFEST = Manifest({"generation": int, "files": dict}, format=1)


class FolderError(RuntimeError):
  """A folder cannot be used; the message names the file and the way out."""


class DamagedError(FolderError):
  """What is in a folder is not what was written: building it again is all that can be done."""


@dataclasses.dataclass(frozen=True)
class PublishedFolder:
  """A kind of folder that is published as a whole.

  called: the words for it in errors. contents: matches the names of files of which every generation has one, by which
  it is told from the files of somebody else. beside: names that are ours as well, beside the generations.
  """

  called: str
  contents: re.Pattern[str]
  beside: tuple[str, ...] = ()

  def check_output(self, folder: str | os.PathLike) -> None:
    """Raise what publishing to a folder would raise, before there is anything to publish.

    FolderError for a folder of somebody else, be there a manifest.json or not: publishing replaces that, and takes
    away what it takes for old.
    NotADirectoryError, PermissionError where no folder can be made or written.
    """
    root = Path(folder)
    nearest = next(path for path in (root, *root.absolute().parents) if path.exists() or path.is_symlink())
    if not nearest.is_dir():
      raise NotADirectoryError(f"{folder} cannot be a folder: {nearest} is a file or a broken link; give another one")
    if not os.access(nearest, os.W_OK | os.X_OK):
      raise PermissionError(f"{folder} cannot be written: {nearest} is read-only for this user; give another one")
    if not root.is_dir() or any(map(self._is_ours, _generations(root))):
      return
    # a build that was killed may leave an empty folder, which alone claims nothing; nor does a manifest
    ours = {".lock", temporary_name(MANIFEST), *self.beside} | {p.name for p in _generations(root) if _is_empty(p)}
    if others := sorted({path.name for path in root.iterdir()} - ours):
      raise FolderError(f"{folder} is no {self.called} and holds other files, such as {others[0]}; give an empty one")

  @contextlib.contextmanager
  def publish(self, folder: str | os.PathLike, known: dict[Path, str], *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder to write files into; it takes the place of the old one when the block ends.

    `known` maps folders to the `version` that what is written was made from; it is told the new one. One process
    publishes to a folder at a time: raises FolderInUseError in the others. Unless `overwrite` is set, raises
    FileExistsError for a folder that holds what is not known, FolderError if another process has published since it
    was. Raises what `check_output` does.
    """
    root = Path(folder).resolve()
    self.check_output(root)
    is_new = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    with lock_folder(root, "wait for it to end, or give another folder"):
      try:
        if not overwrite:
          self._check_known(root, known, folder)
        # not from the manifest, which may be damaged: what was built anew must not need it
        number = 1 + max((int(path.name[5:]) for path in _generations(root)), default=0)
        target = root / f"data-{number}"
        target.mkdir()
        try:
          yield target
          files = digests(target)
          # before the manifest that names them, so that a power cut loses neither
          fsync_paths(*target.rglob("*"), target, root)
        except BaseException:
          shutil.rmtree(target, ignore_errors=True)
          raise
        # Ctrl-C may come when the manifest is there already: from here on nothing new is taken away
        _MANIFEST.write(root, generation=number, files=files)
      except BaseException:
        discard_lock(root, is_new)
        raise
      known[root] = version(root)
      for old in _generations(root):
        if old != target and (self._is_ours(old) or _is_empty(old)):
          shutil.rmtree(old, ignore_errors=True)

  def verified(self, folder: str | os.PathLike) -> Path:
    """Return the folder of the files that were published last, after their digests were checked.

    Raises FileNotFoundError where nothing was published, DamagedError for what is damaged or missing, FolderError for
    what is newer than this version, and for a pickle: those can run code when they are read.
    """
    root = Path(folder).resolve()
    if not (root / MANIFEST).exists():
      raise FileNotFoundError(f"{folder} has no {MANIFEST}: it is no {self.called}, or building it has not ended")
    manifest = _read(root)
    data = root / f"data-{manifest['generation']}"
    if pickles := [file for file in (*root.iterdir(), *data.rglob("*")) if file.suffix in PICKLES]:
      raise FolderError(f"{pickles[0]} is a pickle, which can run code when it is read; delete it")
    for name in manifest["files"]:
      if not (data / name).resolve().is_relative_to(data.resolve()):
        raise DamagedError(f"{data / name} is a link to a file outside of {data}; build {folder} again")
    if damage := first_damage(data, manifest["files"]):
      path, exists = damage
      problem = "is not what was written: its hash differs" if exists else "is missing"
      raise DamagedError(f"{path} {problem}; build {folder} again")
    return data

  def _check_known(self, root: Path, known: dict[Path, str], folder: str | os.PathLike) -> None:
    if version(root) in ("", known.get(root, "")):  # nothing is there, or what is known
      return
    if root not in known:
      raise FileExistsError(
        f"{folder} holds another {self.called}; give another folder, open that one and add to it, "
        "or replace it with overwrite=True"
      )
    with contextlib.suppress(DamagedError):  # which its own retriever may replace
      self.verified(root)
      raise FolderError(f"{folder} was changed by another process since it was opened; run the same again")

  def _is_ours(self, data: Path) -> bool:
    """Tell whether a folder has the name and the files of what is published, be it whole or cut short."""
    return data.is_dir() and any(self.contents.fullmatch(path.name) for path in data.iterdir())


def discard_lock(root: Path, is_new: bool) -> None:
  """Leave nothing behind where a work has failed before anything was kept: no lock, nor the folder if it `is_new`."""
  if [path.name for path in root.iterdir()] == [".lock"]:
    (root / ".lock").unlink()
    if is_new:
      root.rmdir()


def sizes(folder: str | os.PathLike) -> dict[str, int]:
  """Return the bytes of each file that was published last. Raises FolderError."""
  return {name: digest["size"] for name, digest in _read(Path(folder))["files"].items()}


def version(folder: str | os.PathLike) -> str:
  """Return a digest of the manifest, which tells what was published last, damaged or not; "" before anything was."""
  try:
    return hashlib.sha256((Path(folder).resolve() / MANIFEST).read_bytes()).hexdigest()
  except (FileNotFoundError, NotADirectoryError):
    return ""


def _read(root: Path) -> dict[str, Any]:
  try:
    return _MANIFEST.read(root)
  except FormatError as error:
    raise FolderError(
      f"{root} has format {error.found}, this version reads {_MANIFEST.format}; build it again elsewhere, or update "
      "selfrag_jax"
    ) from None
  except ManifestError as error:
    raise DamagedError(f"{root / MANIFEST} is damaged ({error}); build {root} again") from None


def _generations(root: Path) -> list[Path]:
  return [path for path in root.glob("data-*") if path.name[5:].isdecimal()]


def _is_empty(data: Path) -> bool:
  return data.is_dir() and not any(data.iterdir())

"""A folder whose files are published as a whole: a killed process leaves either the old files or the new files.

  manifest.json   format, generation G, and the digest of each file
  data-G/         the files

The manifest is written last. A file that was damaged later is an error that names the file. A folder that holds other
files is left alone.
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

from selfrag_jax.storage.atomic import check_writable, fsync_paths, temporary_name
from selfrag_jax.storage.lock import lock_folder
from selfrag_jax.storage.manifest import MANIFEST, FormatError, Manifest, ManifestError, digests, first_damage

PICKLES = (".pkl", ".pickle", ".pt", ".joblib")
_MANIFEST = Manifest({"generation": int, "files": dict}, format=1)


class FolderError(RuntimeError):
  """A folder cannot be used; the message names the file and the way out."""


class DamagedError(FolderError):
  """The files of a folder are not as they were written; the folder must be built again."""


@dataclasses.dataclass(frozen=True)
class PublishedFolder:
  """A kind of folder that is published as a whole.

  called: the name of this kind in errors. contents: a pattern of file names; every generation has a file that matches,
  which tells it apart from the files of somebody else. beside: other names in the folder, beside the generations, that
  belong to this package too.
  """

  called: str
  contents: re.Pattern[str]
  beside: tuple[str, ...] = ()

  def check_output(self, folder: str | os.PathLike) -> None:
    """Check, before there is anything to publish, that `publish` can write to a folder.

    Raises FolderError for a folder with files of somebody else, with or without a manifest.json: publishing would
    replace the manifest and delete what looks like an old generation. Raises like `check_writable`.
    """
    root = Path(folder)
    check_writable(root, str(folder))
    if not root.is_dir() or any(map(self._is_ours, _generations(root))):
      return
    # a killed build may leave an empty folder; neither that nor a manifest shows that the folder is ours
    ours = {".lock", temporary_name(MANIFEST), *self.beside} | {p.name for p in _generations(root) if _is_empty(p)}
    if others := sorted({path.name for path in root.iterdir()} - ours):
      raise FolderError(f"{folder} is no {self.called} and holds other files, such as {others[0]}; give an empty one")

  @contextlib.contextmanager
  def publish(self, folder: str | os.PathLike, known: dict[Path, str], *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder to write files into; it takes the place of the old generation when the block ends.

    `known` maps folders to the `version` from which the new files were made; the new version is entered there. Only one
    process at a time publishes to a folder: the others raise FolderInUseError. Unless `overwrite` is set, raises
    FileExistsError for a folder whose contents are not in `known`, and FolderError if another process has published
    since that version. Raises like `check_output`.
    """
    self.check_output(folder)  # before `resolve`, which hides a broken link
    root = Path(folder).resolve()
    is_new = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    with lock_folder(root, "wait for it to end, or give another folder"):
      try:
        if not overwrite:
          self._check_known(root, known, folder)
        # the number does not come from the manifest: that may be damaged, and a new build must not need it
        number = 1 + max((int(path.name[5:]) for path in _generations(root)), default=0)
        target = root / f"data-{number}"
        target.mkdir()
        try:
          yield target
          files = digests(target)
          # the files reach the disk before the manifest that names them, so that a power cut loses neither
          fsync_paths(*target.rglob("*"), target, root)
        except BaseException:
          self._delete(target)
          raise
        # Ctrl-C may come when the manifest is there already: from here on no new file is deleted
        _MANIFEST.write(root, generation=number, files=files)
      except BaseException:
        discard_lock(root, is_new)
        raise
      known[root] = version(root)
      for old in _generations(root):
        if old != target and (self._is_ours(old) or _is_empty(old)):
          self._delete(old)

  def verified(self, folder: str | os.PathLike) -> Path:
    """Return the folder of the files that were published last, after checking their digests.

    Raises FileNotFoundError if nothing was published, DamagedError for a damaged or missing file, FolderError for a
    format newer than this version, and for a pickle, which can run code when it is read.
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
    if version(root) in ("", known.get(root, "")):  # the folder is empty, or has the known version
      return
    if root not in known:
      raise FileExistsError(
        f"{folder} holds another {self.called}; give another folder, open that one and add to it, "
        "or replace it with overwrite=True"
      )
    with contextlib.suppress(DamagedError):  # whoever opened a folder may replace it when it is damaged
      self.verified(root)
      raise FolderError(f"{folder} was changed by another process since it was opened; run the same again")

  def _delete(self, data: Path) -> None:
    """Delete a generation, last the files that show that it is ours: if it is cut short, the next one deletes it."""
    with contextlib.suppress(OSError):
      for path in sorted(data.iterdir(), key=lambda path: bool(self.contents.fullmatch(path.name))):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
      data.rmdir()

  def _is_ours(self, data: Path) -> bool:
    """Tell whether a folder is a generation of this kind, whole or cut short, by the names of its files."""
    return data.is_dir() and any(self.contents.fullmatch(path.name) for path in data.iterdir())


def discard_lock(root: Path, is_new: bool) -> None:
  """Delete the lock, and the folder if it `is_new`, after a failure that has left nothing else in the folder."""
  if [path.name for path in root.iterdir()] == [".lock"]:
    (root / ".lock").unlink()
    if is_new:
      root.rmdir()


def sizes(folder: str | os.PathLike) -> dict[str, int]:
  """Return the size in bytes of each file that was published last. Raises FolderError."""
  return {name: digest["size"] for name, digest in _read(Path(folder))["files"].items()}


def version(folder: str | os.PathLike) -> str:
  """Return a digest of the manifest, which identifies the last publication, damaged or not; "" before the first."""
  try:
    return hashlib.sha256((Path(folder).resolve() / MANIFEST).read_bytes()).hexdigest()
  except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
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

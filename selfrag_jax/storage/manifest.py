"""Manifests: JSON files, each written last in its folder, that list its contents so that they can be checked."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import PureWindowsPath
from typing import Any

from etils import epath

from selfrag_jax.storage.atomic import write_json
from selfrag_jax.storage.json_lines import parse_json

MANIFEST = "manifest.json"
DIGEST = {"sha256": str, "size": int}  # the fields of a file's digest, and their types


class ManifestError(ValueError):
  """A manifest is not as it was written; the message says what is wrong, but names neither the file nor a remedy."""


class FormatError(ValueError):
  """A manifest has a format number, `found`, that this version does not read."""

  def __init__(self, found: int):
    super().__init__(f"it has format {found}")
    self.found = found


@dataclasses.dataclass(frozen=True)
class Manifest:
  """The manifest of one kind of folder. A folder with a manifest is whole: write the manifest after everything else.

  fields: the manifest's fields and their types; `files` maps names to digests, as `digests` returns them.
  name: the manifest's file name. format: the format number, None for a manifest without one. with_check: the field
  `check` holds a hash of all other fields.
  """

  fields: Mapping[str, type]
  _: dataclasses.KW_ONLY
  name: str = MANIFEST
  format: int | None = None
  with_check: bool = False

  def write(self, folder: epath.PathLike, **fields: Any) -> None:
    """Write the manifest atomically."""
    contents = fields if self.format is None else {"format": self.format, **fields}
    if self.with_check:
      contents["check"] = contents_hash(contents)
    write_json(epath.Path(folder) / self.name, contents)

  def read(self, folder: epath.PathLike) -> dict[str, Any]:
    """Return the fields of the manifest.

    Raises ManifestError for contents that `write` does not write and for a file outside of the folder, FormatError for
    another format; FileNotFoundError, NotADirectoryError and other OSErrors if there is no manifest.
    """
    found = read_fields(epath.Path(folder) / self.name, {} if self.format is None else {"format": int})
    if self.with_check and contents_hash(found) != found.get("check"):
      raise ManifestError("its check does not fit")
    if self.format not in (None, found.get("format")):
      raise FormatError(found["format"])
    _check_types(found, self.fields)
    for name, digest in found["files"].items() if "files" in self.fields else ():
      if (path := PureWindowsPath(name)).anchor or ".." in path.parts:  # a Windows path also splits at a slash
        raise ManifestError(f"it names {name}, which lies outside of the folder")
      if type(digest) is not dict or {key: type(value) for key, value in digest.items()} != DIGEST:
        raise ManifestError(f"it has no size and hash of {name}")
    return found


def read_fields(path: epath.PathLike, fields: Mapping[str, type]) -> dict[str, Any]:
  """Return the JSON object of a file. Raises ManifestError unless it is one, with these fields of these types."""
  try:
    found = parse_json(epath.Path(path).read_bytes())
  except IsADirectoryError:
    raise ManifestError("it is a folder") from None
  except ValueError as error:
    raise ManifestError(str(error)) from None
  if type(found) is not dict:
    raise ManifestError("it is no JSON object")
  _check_types(found, fields)
  return found


def contents_hash(contents: Mapping[str, Any]) -> str:
  """Return a hash of all fields of a manifest but `check`. Raises ManifestError for fields nested too deeply."""
  try:
    rest = json.dumps({name: value for name, value in contents.items() if name != "check"}, sort_keys=True)
  except RecursionError:
    raise ManifestError("nested too deeply") from None
  return hashlib.sha256(rest.encode()).hexdigest()


def file_digest(path: epath.PathLike) -> dict[str, Any]:
  """Return the digest of a file: its `sha256` in hexadecimal and its `size` in bytes."""
  sha256, size = hashlib.sha256(), 0
  with epath.Path(path).open("rb") as file:
    while chunk := file.read(1 << 24):
      sha256.update(chunk)
      size += len(chunk)
  return {"sha256": sha256.hexdigest(), "size": size}


def digests(folder: epath.PathLike, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
  """Return the digests of the named files of a folder, or of all files below it, by name relative to the folder."""
  folder = epath.Path(folder)
  if names is None:
    names = [(root / name).relative_to(folder).as_posix() for root, _, inside in folder.walk() for name in inside]
  return {name: file_digest(folder / name) for name in names}


def first_damage(folder: epath.PathLike, files: Mapping[str, Any]) -> tuple[epath.Path, bool] | None:
  """Return the path of the first file that differs from its digest in `files`, and whether it exists; None if none."""
  for name, digest in sorted(files.items()):
    path = epath.Path(folder) / name
    if not (exists := path.is_file()) or file_digest(path) != digest:
      return path, exists
  return None


def _check_types(found: Mapping[str, Any], fields: Mapping[str, type]) -> None:
  for name, kind in fields.items():
    if type(found.get(name)) is not kind:  # isinstance would take true for a whole number
      raise ManifestError(f"its {name} is missing, or of another type than {kind.__name__}")

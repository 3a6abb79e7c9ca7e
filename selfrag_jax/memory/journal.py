"""The folder of a persistent store: a snapshot whose manifest is written last, and a log of every change after it.

  manifest.json     format, generation G, settings, and the digest of each file of the snapshot
  arrays-G.npz      arrays of the snapshot
  records-G.jsonl   one JSON object a line
  log-G.bin         the changes since the snapshot, appended

A change is logged before it is made, so every acknowledged change survives `kill -9` (with `fsync` a power cut too). A
frame that was being written when the process died is dropped; any other damage is an error that names the file.
"""

import contextlib
import errno
import io
import json
import os
import re
import struct
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from selfrag_jax.memory.table import Change
from selfrag_jax.storage.arrays import npz_bytes, read_npz
from selfrag_jax.storage.atomic import absolute, is_local, temporary_name, write_bytes_atomic
from selfrag_jax.storage.lock import lock_folder
from selfrag_jax.storage.manifest import MANIFEST, FormatError, Manifest, ManifestError, digests, first_damage

FILES = {"arrays": "npz", "records": "jsonl", "log": "bin"}
_OURS = re.compile(r"\.?(arrays|records|log)-(\d+)\.(npz|jsonl|bin)(\.tmp)?")
# A frame begins with the length of its header (JSON), the length of its arrays, a CRC-32 of both parts, and a CRC-32 of
# these sixteen bytes. A frame that was cut short still has whole lengths, so lengths that do not verify are damage.
_LENGTHS = struct.Struct("<IQI")
_FRAME = struct.Struct("<IQII")
_MANIFEST = Manifest({"generation": int, "settings": dict, "files": dict}, format=1, with_check=True)
# errors that reading raises for a file that no store has written
_MALFORMED = (AttributeError, LookupError, RecursionError, TypeError, ValueError)


class StoreError(RuntimeError):
  """A folder cannot be used as a store; the message names the file and the way out."""


class Snapshot(NamedTuple):
  """The state of a store at one moment."""

  settings: dict[str, Any]
  records: list[dict[str, Any]]
  arrays: dict[str, np.ndarray]


def is_free(folder: epath.PathLike) -> bool:
  """Tell whether a new store can be made in a folder: it is absent, or holds only what a failed attempt has left."""
  folder = epath.Path(folder)
  if not folder.is_dir():
    return not folder.exists()
  names = [path.name for path in folder.iterdir()]
  return all(name in (".lock", temporary_name(MANIFEST)) or _OURS.fullmatch(name) for name in names)


class Journal:
  """The folder of one store, opened by its only writer, or read-only beside the writer."""

  def __init__(self, folder: epath.PathLike, *, read_only: bool = False, fsync: bool = False, create: bool = True):
    """Open the folder; a writer holds its lock until `close`, and with `create` makes the folder if it is missing.

    Raises FolderInUseError if another process writes to the folder, ValueError for a writer in object storage,
    StoreError for a path that is a file, for a manifest that no store has written and, without `create`, for a folder
    without a store; the folder stays as it was.
    """
    if not os.fspath(folder):
      raise ValueError("the path of the store is empty; give its folder")
    self.folder = absolute(folder)
    self._read_only, self._fsync = read_only, fsync
    self._log: io.FileIO | None = None
    self._writable = False
    self._cleanup = contextlib.ExitStack()
    if read_only:
      return
    if not is_local(folder):
      raise ValueError(f"{folder} is object storage, where nothing can be appended; keep the store on a local disk")
    if create:
      try:
        self.folder.mkdir(parents=True, exist_ok=True)
      except (FileExistsError, NotADirectoryError):
        raise StoreError(f"{self.folder} is a file or lies below one; give a folder") from None
      if self.exists():
        self._manifest()  # a folder of somebody else gets no lock
    else:
      self._manifest()
    advice = "close the store there, or open it here with read_only=True"
    self._cleanup.enter_context(lock_folder(self.folder, advice))
    self._writable = True

  def exists(self) -> bool:
    """Tell whether the folder holds a store."""
    return (self.folder / MANIFEST).exists()

  def stamp(self) -> tuple[int, str, int]:
    """Return a value that every snapshot and every logged change of the folder alters. Raises StoreError."""
    manifest = self._manifest()
    log = self.folder / _name("log", manifest["generation"])
    return manifest["generation"], manifest["check"], log.stat().length

  def read(self) -> tuple[Snapshot, list[Change]]:
    """Return the snapshot and the changes after it; a writer appends after the last whole change from now on.

    Raises StoreError if a file is damaged, missing, or of a newer version.
    """
    manifest = self._manifest()
    generation = manifest["generation"]
    try:
      snapshot = self._snapshot(manifest)
      log = self.folder / _name("log", generation)
      if os.path.islink(log) or log.is_dir():
        raise StoreError(f"{log} is a link or a folder, and would be written to; put the file itself there")
      changes, end = _parse(log.read_bytes(), str(log))
    except FileNotFoundError as error:
      if self._read_only and self._manifest() != manifest:
        return self.read()  # the writer has published a new snapshot since, and removed the files of the old one
      raise StoreError(f"{error.filename} is missing; restore the folder from a copy") from None
    except _MALFORMED as error:  # the hashes match, so another program has written the files
      raise StoreError(f"{self.folder} holds what no store writes ({error!r}); restore it from a copy") from None
    if not self._read_only:
      self._open_log(generation).truncate(end)
    return snapshot, changes

  def append(self, change: Change) -> None:
    """Log a change. If that fails (a full disk), the log stays as it was and OSError is raised."""
    self._check_writable()
    assert self._log is not None
    start = self._log.seek(0, os.SEEK_END)
    try:
      rest = memoryview(_frame(change))
      while rest:  # a nearly full disk writes a part and refuses the rest
        rest = rest[self._log.write(rest) :]
      if self._fsync:
        os.fsync(self._log.fileno())
    except BaseException:
      self._log.truncate(start)
      raise

  def publish(self, snapshot: Snapshot) -> None:
    """Write a snapshot and begin an empty log. If the process is killed, the folder holds the old store or the new."""
    self._check_writable()
    if not self.exists():
      self._check_unclaimed()
    generation = self._manifest()["generation"] + 1 if self.exists() else 1
    contents = {
      "arrays": npz_bytes(snapshot.arrays),
      "records": b"".join(_line(record) for record in snapshot.records),
      "log": b"",
    }
    paths = {kind: self.folder / _name(kind, generation) for kind in contents}
    for kind, data in contents.items():
      write_bytes_atomic(paths[kind], data)
    files = digests(self.folder, _snapshot_files(generation))
    try:
      _MANIFEST.write(self.folder, generation=generation, settings=snapshot.settings, files=files)
    except BaseException:
      # if the write failed after its rename, further changes belong to the new generation
      if self.exists() and self._manifest()["generation"] == generation:
        self._open_log(generation)
      raise
    self._open_log(generation)

  def close(self) -> None:
    """Close the log and release the lock."""
    self._writable = False
    if self._log is not None:
      self._log.close()
      self._log = None
    self._cleanup.close()

  def _check_writable(self) -> None:
    if not self._writable:
      raise StoreError(f"{self.folder} is closed or open for reading only; nothing was changed")

  def _check_unclaimed(self) -> None:
    """Raise StoreError for files of an earlier store; the files of a first snapshot that was cut short hold no rows."""
    for path in self.folder.iterdir():
      match = _OURS.fullmatch(path.name)
      if match and not match[4] and (match[2] != "1" or _holds_rows(path)):
        raise StoreError(f"{path} belongs to a store whose {MANIFEST} is missing; restore it, or use another folder")

  def _open_log(self, generation: int) -> io.FileIO:
    """Open this generation's log for further changes, and remove the files of all other generations."""
    if self._log is not None:
      self._log.close()
    # unbuffered: when `append` returns, the operating system has the change
    self._log = io.FileIO(self.folder / _name("log", generation), "r+")
    for path in self.folder.iterdir():
      match = _OURS.fullmatch(path.name)
      if match and (match[2] != str(generation) or match[4]):
        path.unlink()
    return self._log

  def _manifest(self) -> dict[str, Any]:
    path = self.folder / MANIFEST
    try:
      return _MANIFEST.read(self.folder)
    except FileNotFoundError:
      raise StoreError(f"{path} is missing: the folder holds no store") from None
    except NotADirectoryError:
      raise StoreError(f"{self.folder} is a file or lies below one; a store is a folder") from None
    except ManifestError:
      raise StoreError(
        f"{path} is damaged, or not of a store; restore the folder from a copy, or give another folder"
      ) from None
    except FormatError as error:
      raise StoreError(
        f"{path} has format {error.found}, this version reads up to {_MANIFEST.format}; update selfrag_jax"
      ) from None

  def _snapshot(self, manifest: dict[str, Any]) -> Snapshot:
    names = _snapshot_files(manifest["generation"])
    arrays_file, records_file = (self.folder / name for name in names)
    if damage := first_damage(self.folder, {name: manifest["files"].get(name) for name in names}):
      path, exists = damage
      if not exists:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
      raise StoreError(f"{path} is damaged, it differs from {MANIFEST}; restore the folder from a copy")
    records = [json.loads(line) for line in records_file.read_text(encoding="utf-8").splitlines()]
    return Snapshot(manifest["settings"], records, read_npz(arrays_file))


def _holds_rows(path: epath.Path) -> bool:
  """Tell whether a file of a snapshot holds any rows or any foreign data; arrays without rows are a file too."""
  if not path.stat().length:
    return False
  if path.suffix != ".npz":
    return True
  try:
    return any(array.size for array in read_npz(path).values())
  except ValueError:
    return True


def _name(kind: str, generation: int) -> str:
  return f"{kind}-{generation}.{FILES[kind]}"


def _snapshot_files(generation: int) -> tuple[str, str]:
  """Return the names of the files that a manifest lists; the log is not listed, because it changes later."""
  return _name("arrays", generation), _name("records", generation)


def _line(record: Mapping[str, Any]) -> bytes:
  return (json.dumps(record, allow_nan=False) + "\n").encode()


def _frame(change: Change) -> bytes:
  head, body = _line(change.header), npz_bytes(change.arrays) if change.arrays else b""
  lengths = len(head), len(body), zlib.crc32(body, zlib.crc32(head))
  return _FRAME.pack(*lengths, zlib.crc32(_LENGTHS.pack(*lengths))) + head + body


def _parse(log: bytes, name: str) -> tuple[list[Change], int]:
  """Return the changes of a log and the byte where the last whole frame ends. Raises StoreError for damage."""
  changes, start = [], 0
  while len(log) - start >= _FRAME.size:
    head_size, body_size, check, lengths_check = _FRAME.unpack_from(log, start)
    body_start = start + _FRAME.size + head_size
    end = body_start + body_size
    sound = zlib.crc32(log[start : start + _LENGTHS.size]) == lengths_check
    if sound and end > len(log):
      break  # the process died while it wrote this frame
    if not sound or zlib.crc32(log[start + _FRAME.size : end]) != check:
      raise StoreError(
        f"{name} is damaged at byte {start} after {len(changes)} changes; restore the folder from a copy, or cut the "
        f"file to {start} bytes and lose what came later"
      )
    header = json.loads(log[start + _FRAME.size : body_start])
    changes.append(Change(header, read_npz(log[body_start:end]) if body_size else {}))
    start = end
  return changes, start

"""The listing of files that documents are read from, in folders however deep, and the tally of files left out."""

import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from selfrag_jax.retrieval.document import is_utf8
from selfrag_jax.retrieval.sources import READERS, Found, NotTextError, read_source
from selfrag_jax.text.printable import printable

NAMED = 20  # most problems, and most kinds of files left out, that are reported


class Source(NamedTuple):
  """A file, and whether the user has named it: a bad file that was named is an error, in a folder it is not."""

  path: Path
  is_named: bool


class LeftOut:
  """The tally of a build's omissions: the number of `bad` lines and files, and the number of files by other `kinds`.

  `problems` describes the first bad lines and files; `unread` has the names of files and folders that were not read.
  """

  def __init__(self, skip_bad: bool = False):
    """skip_bad: leave out bad lines and files instead of raising their errors."""
    self.bad, self.problems, self._skip_bad = 0, [], skip_bad
    self.kinds: Counter[str] = Counter()  # keys are suffixes and other kinds, such as "hidden"
    self.unread: set[str] = set()

  def add(self, error: ValueError | OSError) -> None:
    """Count a bad line or file. Raises its error unless `skip_bad` is set."""
    if not self._skip_bad:
      raise error
    self.tolerate(error)

  def tolerate(self, error: ValueError | OSError) -> None:
    """Count a bad file in a folder, which is no error there."""
    self.bad += 1
    if self.bad <= NAMED:
      self.problems.append(str(error))

  def add_unread(self, name: str, path: str | os.PathLike, error: OSError) -> None:
    """Count a file or folder that the system does not let us read. Raises OSError unless `skip_bad` is set."""
    reason = error.strerror or error
    self.add(OSError(f"{path} cannot be read: {reason}; mend that, or leave it out with skip_bad (--skip_bad)"))
    self.unread.add(name)

  def hides(self, name: str) -> bool:
    """Tell whether a file, or a folder above it, could not be read."""
    return any(above in self.unread for above in (name, *map(str, Path(name).parents)))

  def told(self) -> str:
    """Return a text with the number of bad lines and files, and the first problem."""
    return f"{self.bad:,} could not be read" + (f", such as {self.problems[0]}" if self.problems else "")

  def report(self) -> dict[str, object]:
    """Return the entries of a build's report."""
    return {"bad": self.bad, "left_out": dict(self.kinds.most_common()), "problems": self.problems}


def list_sources(paths: Sequence[str | os.PathLike], left_out: LeftOut) -> dict[str, Source]:
  """Map names to readable files, in order: the files among `paths`, and all files in its folders however deep.

  The name of a file in a folder is its path within that folder. Hidden files and folders and files of other kinds are
  left out, and so are links to folders, whose files are listed under their own names. Raises FileNotFoundError if there
  is no file; ValueError for two files with one name, for a file of another kind among `paths`, and for a link that
  leads out of its folder; OSError for a file or folder that the system does not let us read.
  """
  found: dict[str, Source] = {}
  for path in paths:
    for name, source in _sources_of(Path(path), left_out):
      if name in found:
        raise ValueError(f"{found[name].path} and {source.path} have the same name; give the folder that holds both")
      found[name] = source
  return found


def read_file(name: str, source: Source, left_out: LeftOut) -> Iterator[Found]:
  """Yield the documents of a file; none if the whole file is left out."""
  is_tolerated = not source.is_named and source.path.suffix.lower() != ".jsonl"

  def failed(error: ValueError) -> None:
    (left_out.tolerate if is_tolerated else left_out.add)(error)
    if isinstance(error, NotTextError):
      left_out.unread.add(name)

  try:
    source.path.open("rb").close()
  except OSError as error:
    left_out.add_unread(name, source.path, error)
  else:  # an error of the disk in the middle of a file always raises: some of its documents were yielded already
    yield from read_source(name, source.path, failed)


def _sources_of(root: Path, left_out: LeftOut) -> Iterator[tuple[str, Source]]:
  if not root.exists():
    raise FileNotFoundError(f"{root} does not exist; give a file or a folder of {', '.join(READERS)}")
  if root.is_dir():
    yield from _walk(root, left_out)
    return
  if root.suffix.lower() not in READERS or not root.is_file():
    kind = f"ends in {root.suffix!r}" if root.is_file() else "is no regular file"
    raise ValueError(f"{root} {kind}; documents end in {', '.join(READERS)}")
  _check_name(root.name)
  yield root.name, Source(root, is_named=True)


def _walk(root: Path, left_out: LeftOut) -> Iterator[tuple[str, Source]]:
  found, folders, inside = [], [root], root.resolve()
  while folders:
    folder = folders.pop()
    for entry in _entries(folder, root, left_out):
      path = Path(entry.path)
      name = path.relative_to(root)
      try:
        kind = None if entry.name.startswith(".") else _kind(entry, path, inside)
        if kind == "folder":
          folders.append(path)
        elif kind == "document":
          _check_name(name.as_posix())
          found.append(path)
        else:
          left_out.kinds[kind or "hidden"] += 1
      except OSError as error:  # a broken link, or a link to itself
        left_out.add_unread(name.as_posix(), path, error)
      except NotTextError as error:
        left_out.tolerate(error)
      except ValueError as error:
        left_out.add(error)
        left_out.unread.add(name.as_posix())
  if not found:
    others = f", but {told_kinds(left_out.kinds)}" if left_out.kinds else ""
    raise FileNotFoundError(f"{root} holds no documents{others}; give a file or a folder of {', '.join(READERS)}")
  for path in sorted(found):
    yield path.relative_to(root).as_posix(), Source(path, is_named=False)


def _entries(folder: Path, root: Path, left_out: LeftOut) -> list[os.DirEntry[str]]:
  try:
    with os.scandir(folder) as entries:
      return list(entries)
  except OSError as error:
    if folder == root:  # the user has named it
      raise OSError(f"{folder} cannot be read: {error.strerror or error}") from None
    left_out.add_unread(folder.relative_to(root).as_posix(), folder, error)
    return []


def _kind(entry: os.DirEntry[str], path: Path, inside: Path) -> str:
  """Return "document", "folder", or the name of another kind, under which the entry is left out.

  Raises OSError for a document that is a broken link, ValueError for a link that leads out of the folder `inside`.
  """
  is_link, is_document = entry.is_symlink(), path.suffix.lower() in READERS
  if is_link and not is_document and not path.exists():
    return "broken link"  # it has no suffix of a document
  mode = entry.stat().st_mode
  if is_link and (is_document or stat.S_ISDIR(mode)) and not path.resolve().is_relative_to(inside):
    raise ValueError(f"{path} is a link that leads out of its folder; copy what it leads to, or name that itself")
  if stat.S_ISDIR(mode):
    return "link to a folder" if is_link else "folder"
  if not stat.S_ISREG(mode):
    return "pipe, socket or device"
  return "document" if is_document else path.suffix.lower() or "no suffix"


def _check_name(name: str) -> None:
  if not is_utf8(name):
    raise NotTextError(f"the name of {name!r} is not UTF-8; rename the file")


def told_kinds(kinds: Counter[str] | dict[str, int]) -> str:
  """Return a text that lists kinds of files with their numbers, most frequent first."""
  most = Counter(kinds).most_common()
  told = [f"{printable(kind)[:40]} {n:,}" for kind, n in most[:NAMED]]
  return ", ".join([*told, *([f"{len(most) - NAMED:,} other kinds"] if len(most) > NAMED else [])])

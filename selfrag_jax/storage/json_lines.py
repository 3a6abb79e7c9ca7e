"""JSON files and files of lines, read with errors that name the file and the line."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

LONGEST_LINE = 1 << 25  # bytes; a file of records has none of this length, a file of something else may
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def read_lines(path: epath.PathLike, failed: Callable[[ValueError], None] | None = None) -> Iterator[tuple[int, str]]:
  """Yield the lines that are not empty with their numbers, which start at 1.

  Raises ValueError, with file and line number, for a line that is not UTF-8, or of 32 MiB and more; `failed` hears of
  it instead, if given, and the next line is read.
  """
  # bytes are split at newlines alone, text also at characters that may stand inside a title
  with epath.Path(path).open("rb") as file:
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
      error = None
      if len(line) == LONGEST_LINE:
        error = ValueError(f"{path}, line {number}: longer than {LONGEST_LINE >> 20} MiB; put one record on each line")
        while failed is not None and line and not line.endswith(b"\n"):
          line = file.readline(LONGEST_LINE)
      else:
        try:
          text = line.decode("utf-8").strip("\r\n")
        except UnicodeDecodeError as reason:
          error = ValueError(f"{path}, line {number}: {reason}; save the file as UTF-8")
      if error is None:
        if text.strip():
          yield number, text
      elif failed is None:
        raise error from None
      else:
        failed(error)


def refuse_pointer(path: epath.PathLike) -> None:
  """Raise ValueError for what git-lfs leaves in the place of a large file that it has not fetched."""
  with epath.Path(path).open("rb") as file:
    if file.read(len(LFS_POINTER)) == LFS_POINTER:
      raise ValueError(f"{path} is a pointer of git-lfs, not the file itself: run git lfs pull, or download the file")


def parse_json(text: str | bytes) -> Any:
  """Return the value of a JSON text. Raises ValueError for anything else, and for what is nested too deeply."""
  try:
    return json.loads(text)
  except RecursionError:
    raise ValueError("nested too deeply") from None


def read_json(path: epath.PathLike, expected: str) -> Any:
  """Return the value of a JSON file in UTF-8.

  Raises ValueError, with the file and what was `expected`, for another file and for half a surrogate pair in it, which
  UTF-8 cannot hold; FileNotFoundError where there is none.
  """
  refuse_pointer(path)
  try:
    text = epath.Path(path).read_bytes().decode("utf-8-sig")
    return _whole_characters(parse_json(text), text)
  except ValueError as error:
    raise ValueError(f"{path}: {error}; expected {expected}") from None


def read_json_object(path: epath.PathLike, expected: str) -> dict[str, Any]:
  """Return the object of a JSON file. Raises like `read_json`, and for another value."""
  value = read_json(path, expected)
  if not isinstance(value, dict):
    raise ValueError(f"{path}: a JSON object was expected, not {type(value).__name__}: {expected}")
  return value


def parse_object(line: str) -> dict[str, Any]:
  """Return the JSON object of a line. Raises ValueError for anything else."""
  try:
    record = parse_json(line)
  except ValueError as error:
    raise ValueError(f"{error}; each line must be one JSON object") from None
  if not isinstance(record, dict):
    raise ValueError(f"a JSON object was expected, not {type(record).__name__}")
  return record


def read_jsonl(path: epath.PathLike) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yield the object of every line with its number; empty lines are skipped.

  Raises ValueError, with file and line number, for a line that is not UTF-8, not JSON or not an object, and for half a
  surrogate pair, which no tokenizer can read and UTF-8 cannot hold.
  """
  for number, line in read_lines(path):
    try:
      yield number, _whole_characters(parse_object(line), line)
    except ValueError as error:
      raise ValueError(f"{path}, line {number}: {error}") from None


def _whole_characters(value: Any, text: str) -> Any:
  """Return `value`, which was read from `text`. Raises ValueError if it has half a surrogate pair."""
  if "\\ud" in text.lower():  # only an escape can bring one: the file itself is UTF-8
    try:
      json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
      half = error.object[error.start].encode("ascii", "backslashreplace").decode()
      raise ValueError(f"{half} is half a surrogate pair and no character") from None
  return value

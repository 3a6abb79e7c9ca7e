"""Readers of JSON files and of files of lines, with errors that name the file and the line."""

import json
import reprlib
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from selfrag_jax.storage.binary import open_binary

LONGEST_LINE = 1 << 25  # bytes; no record is that long, but a file of another kind may have such a line
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def read_lines(path: epath.PathLike, failed: Callable[[ValueError], None] | None = None) -> Iterator[tuple[int, str]]:
  """Yield the number, from 1 on, and the text of each line that is not empty.

  Raises ValueError, with file and line number, for a line that is not UTF-8 or has 32 MiB or more. If `failed` is
  given, it is called with the error instead, and reading goes on with the next line.
  """
  failed = failed or raise_error
  # bytes are split only at newlines; text is also split at characters that may stand inside a title
  with open_binary(path) as file:
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
      where = f"{path}, line {number}"
      if len(line) == LONGEST_LINE:
        failed(ValueError(f"{where}: longer than {LONGEST_LINE >> 20} MiB; put one record on each line"))
        while line and not line.endswith(b"\n"):
          line = file.readline(LONGEST_LINE)
        continue
      try:
        text = line.decode("utf-8").strip("\r\n")
      except UnicodeDecodeError as error:
        failed(ValueError(f"{where}: {error}; save the file as UTF-8"))
        continue
      if text.strip():
        yield number, text


def raise_error(error: ValueError) -> None:
  """Raise an error without the one that it was made of."""
  raise error from None


def refuse_pointer(path: epath.PathLike) -> None:
  """Raise ValueError for the pointer that git-lfs leaves in the place of a large file that it has not fetched."""
  with open_binary(path) as file:
    if file.read(len(LFS_POINTER)) == LFS_POINTER:
      raise ValueError(f"{path} is a pointer of git-lfs, not the file itself: run git lfs pull, or download the file")


def parse_json(text: str | bytes) -> Any:
  """Return the value of a JSON text. Raises ValueError for any other text, and for JSON that is nested too deeply."""
  try:
    return json.loads(text)
  except RecursionError:
    raise ValueError("nested too deeply") from None


def read_json(path: epath.PathLike, expected: str) -> Any:
  """Return the value of a JSON file in UTF-8.

  Raises ValueError, with the file and what was `expected`, for a file that is not such JSON and for half a surrogate
  pair, which UTF-8 cannot hold; FileNotFoundError if the file is missing.
  """
  refuse_pointer(path)
  try:
    text = epath.Path(path).read_bytes().decode("utf-8-sig")
    return _whole_characters(parse_json(text), text)
  except ValueError as error:
    raise ValueError(f"{path}: {error}; expected {expected}") from None


def read_json_object(path: epath.PathLike, expected: str) -> dict[str, Any]:
  """Return the object of a JSON file. Raises like `read_json`, and ValueError for a value of another type."""
  value = read_json(path, expected)
  if not isinstance(value, dict):
    raise ValueError(f"{path}: a JSON object was expected, not {type(value).__name__}: {expected}")
  return value


def parse_object(line: str) -> dict[str, Any]:
  """Return the JSON object that a line holds. Raises ValueError for any other line."""
  try:
    record = parse_json(line)
  except ValueError as error:
    raise ValueError(f"{error}; each line must be one JSON object") from None
  if not isinstance(record, dict):
    raise ValueError(f"a JSON object was expected, not {type(record).__name__}")
  return record


def read_jsonl(path: epath.PathLike) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yield the number and the object of each line; empty lines are skipped.

  Raises ValueError, with file and line number, for a line that is not UTF-8, not JSON or not an object, and for half a
  surrogate pair, which no tokenizer can read and UTF-8 cannot hold.
  """
  for number, line in read_lines(path):
    try:
      yield number, _whole_characters(parse_object(line), line)
    except ValueError as error:
      raise ValueError(f"{path}, line {number}: {error}") from None


def get_field(source: Any, key: str, kind: type) -> Any:
  """Return a field of an object. Raises ValueError, with the field, if it is missing or of another type."""
  value = source.get(key) if isinstance(source, dict) else None
  if not isinstance(value, kind):
    names = {str: "a text", list: "a list", dict: "an object", bool: "true or false", int: "a whole number"}
    raise ValueError(f"{key} is {reprlib.repr(value)}, it must be {names[kind]}")
  return value


def _whole_characters(value: Any, text: str) -> Any:
  """Return `value`, which was read from `text`. Raises ValueError if it has half a surrogate pair."""
  if "\\ud" in text.lower():  # only an escape can make half a pair: the file itself is UTF-8
    try:
      json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
      half = error.object[error.start].encode("ascii", "backslashreplace").decode()
      raise ValueError(f"{half} is half a surrogate pair and no character") from None
  return value

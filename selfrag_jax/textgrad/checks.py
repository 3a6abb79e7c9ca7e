"""Checks of arguments: texts, lists, tags, counts and names."""

import difflib
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

LARGEST = 2**31 - 1


def check_text(value: Any, name: str) -> str:
  """Return a text. Raises TypeError for another value, ValueError for a text that UTF-8 cannot hold."""
  if not isinstance(value, str):
    raise TypeError(f"{name} must be text (str), not {kind_of(value)}")
  if not value.isascii():
    try:
      value.encode()
    except UnicodeEncodeError as error:
      raise ValueError(
        f"{name} has half of a surrogate pair, U+{ord(value[error.start]):04X}, at character {error.start}: "
        "no UTF-8 text holds it and no endpoint takes it; text.encode('utf-8', 'replace').decode() puts a ? there"
      ) from None
  return value


def check_texts(values: Any, name: str) -> list[str]:
  """Return a list of texts; None is an empty one. Raises TypeError for another value, such as a single text."""
  return [check_text(value, f"{name}[{i}]") for i, value in enumerate(check_list(values, name, "texts"))]


def check_list(values: Any, name: str, what: str) -> list[Any]:
  """Return values as a list; None is an empty one. Raises TypeError for a text or a value that is no list of `what`."""
  if values is None:
    return []
  if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
    raise TypeError(f"{name} must be a list of {what}, not {kind_of(values)}; write [...] around it")
  return list(values)


def check_tags(values: Any, name: str, default: Sequence[str]) -> list[str]:
  """Return an opening and a closing tag; None is the default. Raises TypeError or ValueError."""
  tags = check_texts(default if values is None else values, name)
  if len(tags) != 2 or not all(tags):
    raise ValueError(f"{name} are an opening and a closing tag, such as {list(default)}, not {tags}")
  return tags


def check_count(value: Any, name: str) -> int:
  """Return an integer of at least 0. Raises TypeError or ValueError."""
  if isinstance(value, bool) or not isinstance(value, numbers.Integral):
    raise TypeError(f"{name} must be an integer, not {kind_of(value)}")
  count = int(value)
  if count < 0:
    raise ValueError(f"{name} = {count} must be at least 0")
  if count > LARGEST:
    raise ValueError(f"{name} must be at most {LARGEST}, it has {count.bit_length()} bits")
  return count


def closest(name: str, known: Sequence[str]) -> str:
  """Return the known name that is closest to `name`, or an empty text."""
  return next(iter(difflib.get_close_matches(name, known, 1, 0.7)), "")


def did_you_mean(meant: str) -> str:
  """Return the end of an error that suggests a name, or an empty text without a name."""
  return f" (did you mean {meant!r}?)" if meant else ""


def kind_of(value: Any) -> str:
  """Return the name of a value's type, or of the class that a value is."""
  return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def clip(text: str, length: int = 300) -> str:
  """Return the beginning of a long text, and a short text as it is."""
  return text if len(text) <= length else text[:length] + " …"

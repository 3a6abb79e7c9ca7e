"""Checked settings: dataclasses whose field types say which values are allowed.

  steps: Annotated[int, Range(1)] = 100

`check_fields` walks over the fields and refuses every other value; the error names the key and the allowed values.
All numbers must be finite.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np

LARGEST_INT = 2**63 - 1
LARGEST_FLOAT = 3.4e38  # about the largest float32
MENTIONED = 20  # most names that an error lists where none is close


@dataclasses.dataclass(frozen=True)
class Range:
  """Bounds of a number: at least `least`, at most `most`, more than `above`, less than `below`."""

  least: float | None = None
  most: float | None = None
  above: float | None = None
  below: float | None = None

  def __str__(self) -> str:
    words = {"at least": self.least, "more than": self.above, "at most": self.most, "less than": self.below}
    return " and ".join(f"{word} {_shown(bound)}" for word, bound in words.items() if bound is not None)

  def holds(self, value: float) -> bool:
    """Tell whether a number lies within all bounds."""
    return (
      (self.least is None or value >= self.least)
      and (self.most is None or value <= self.most)
      and (self.above is None or value > self.above)
      and (self.below is None or value < self.below)
    )


LARGEST_SIZE = 2**31 - 1  # sizes, steps and positions are int32 on devices
Count = Annotated[int, Range(1, LARGEST_SIZE)]  # a number of things, or a size: at least one
Natural = Annotated[int, Range(0, LARGEST_SIZE)]
Seed = Annotated[int, Range(0, LARGEST_INT)]
Share = Annotated[float, Range(0, 1)]
Decay = Annotated[float, Range(0, below=1)]  # the decay of a moving average: 1 would never forget
Weight = Annotated[float, Range(0)]
Positive = Annotated[float, Range(above=0)]


class Checked:
  """A base class for dataclasses: the fields are checked when an object is made; NumPy scalars become Python values."""

  def __post_init__(self):
    for name, value in vars(self).items():
      if isinstance(value, np.generic):
        object.__setattr__(self, name, value.item())  # the dataclass may be frozen
    check_fields(type(self), vars(self), "")


def check_fields(cls: type, values: Mapping[str, Any], prefix: str) -> None:
  """Check values against the field types of a dataclass.

  Raises ValueError with `prefix`, the key, the value and the allowed values.
  """
  hints = typing.get_type_hints(cls, include_extras=True)
  for name, value in values.items():
    check_value(hints[name], value, prefix + name)


def check_value(hint: Any, value: Any, name: str) -> None:
  """Check a value against a type: a number with or without a `Range`, a text, a `Literal`, or a sequence of these.

  Values of other types are not checked. Raises ValueError with the name, the value and the allowed values.
  """
  allowed, options = _allowed(hint), typing.get_args(hint)
  if allowed is None:
    return
  if typing.get_origin(hint) is tuple and _is_sequence(value):
    for place, item in enumerate(value):
      check_value(options[0] if options[-1] is Ellipsis else options[min(place, len(options) - 1)], item, name)
    fits = bool(value) and (options[-1] is Ellipsis or len(value) == len(options))
  else:
    fits = _fits(hint, value)
  if not fits:
    must = "" if allowed.startswith("one of") else "it must be "
    raise ValueError(f"{name} is {_shown(value)}; {must}{allowed}")


def check_encoder(encoder: Any, otherwise: str = "None") -> None:
  """Raise ValueError, with what may be given `otherwise`, for an encoder that is neither a function nor None."""
  if encoder is not None and not callable(encoder):
    raise ValueError(f"encoder is {encoder!r}; give a function of texts to vectors, or {otherwise}")


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
  """Return the end of an error about an unknown name: the closest known name, after `prefix`, or else some."""
  close = difflib.get_close_matches(name, known := list(known), n=1)
  some = [*known[:MENTIONED], f"and {len(known) - MENTIONED} more"] if len(known) > MENTIONED else known
  return f"did you mean {prefix}{close[0]}?" if close else f"it has {', '.join(some)}"


def _fits(hint: Any, value: Any) -> bool:
  origin, options = typing.get_origin(hint), typing.get_args(hint)
  if origin is Annotated:
    return _fits(options[0], value) and (value is None or all(bound.holds(value) for bound in options[1:]))
  if origin in (typing.Union, types.UnionType):
    return any(_fits(option, value) for option in options)
  if origin is Literal:
    return any(type(value) is type(option) and value == option for option in options)
  if hint is int:
    return type(value) is int and abs(value) <= LARGEST_INT
  if hint is float:
    return type(value) in (int, float) and abs(value) <= LARGEST_FLOAT  # the comparison is False for NaN
  if hint in (str, bool, types.NoneType):
    return type(value) is hint
  return _allowed(hint) is None


def _allowed(hint: Any) -> str | None:
  """Say in words which values a type allows; return None for a type that is not checked."""
  origin, options = typing.get_origin(hint), typing.get_args(hint)
  if origin is Annotated:
    return f"{_allowed(options[0])}, {' and '.join(map(str, options[1:]))}"
  if origin in (typing.Union, types.UnionType):
    words = [_allowed(option) for option in options]
    return None if None in words else " or ".join(word for word in words if word)
  if origin is Literal:
    return f"one of {', '.join(map(str, options))}"
  if origin is tuple:
    of = {_allowed(option) for option in options if option is not Ellipsis}
    many = "at least one" if options[-1] is Ellipsis else str(len(options))
    return f"a list of {many}, each {of.pop()}" if len(of) == 1 and None not in of else None
  if hint is types.NoneType:
    return "None"
  return {int: "a whole number", float: "a finite number", str: "a text", bool: "True or False"}.get(hint)


def _is_sequence(value: Any) -> bool:
  return isinstance(value, Sequence) and not isinstance(value, str)


def _shown(value: Any) -> str:
  """Return a value as text of at most 80 characters."""
  if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**25:
    return f"{'-' * (value < 0)}{float(min(abs(value), 10**300)):.3g}"
  shown = repr(value)
  return shown if len(shown) <= 80 else f"{shown[:77]}..."

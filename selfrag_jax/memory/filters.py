"""Filters over metadata, which choose the records for a search or a deletion.

  {"source": "atlas.md"}              the value is equal, or is a list with an equal member
  {"source": ["atlas.md", "b.md"]}    the value equals any of these; {"$in": [...]} means the same
  {"year": {"$gte": 2000, "$lt": 2010}}
  {"title": {"$contains": "harbor"}}  the value is a text with this part, or a list with this member; a list of
                                      several operands matches if any operand does

A record matches if all conditions hold; a condition on a name that the record lacks does not hold. Numbers are compared
with numbers, and texts with texts by code point, which also orders ISO dates; a comparison with a value of another kind
does not hold, and true is not a number. A function of the metadata is a filter too. `parse_where` reads a filter from
command-line conditions.
"""

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from selfrag_jax.checked import suggestion

Where = Mapping[str, Any] | Callable[[Mapping[str, Any]], bool]

ORDERS = {"$gt": operator.gt, "$gte": operator.ge, "$lt": operator.lt, "$lte": operator.le}
OPERATORS = (*ORDERS, "$in", "$contains")
WRITTEN = {">=": "$gte", "<=": "$lte", ">": "$gt", "<": "$lt", "~": "$contains", "=": "$in"}
CONDITION = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[^=<>~!"][^=<>~!]*?)\s*(>=|<=|>|<|~|=)(?![=<>~])(.*)', re.S)


def predicate(where: Where) -> Callable[[Mapping[str, Any]], bool]:
  """Return a filter as a function of one record's metadata. Raises ValueError for an invalid filter."""
  if callable(where):
    return lambda metadata: bool(where(MappingProxyType(metadata)))  # a function cannot change what it looks at
  if not isinstance(where, Mapping):
    raise ValueError(f"the filter is {where!r}; give a mapping of names to values, or a function of the metadata")
  tests = [(name, *condition) for name, wanted in where.items() for condition in _conditions(name, wanted)]
  return lambda metadata: all(name in metadata and _holds(metadata[name], *condition) for name, *condition in tests)


def check_where(where: Where, records: Iterable[Mapping[str, Any]]) -> None:
  """Raise ValueError for an invalid filter, and for a condition that no record could meet.

  Such a condition is on a name that no record has (the error gives the closest name), or orders numbers against texts.
  Without any records only an invalid filter raises.
  """
  predicate(where)
  if callable(where):
    return
  unmet, clashes = {name: _conditions(name, wanted) for name, wanted in where.items()}, {}
  names: dict[str, None] = {}
  for record in records:
    if not unmet:
      return
    names.update(dict.fromkeys(record))
    for name in [name for name in unmet if name in record]:
      if clash := next((c for c in unmet[name] if c[0] in ORDERS and _clash(record[name], c[1])), None):
        clashes.setdefault(name, (record[name], *clash))
      else:
        del unmet[name]
  if not names:
    return
  for name in unmet:
    if name in clashes:
      value, sign, operand = clashes[name]
      raise ValueError(
        f"no {name!r} can be compared with {operand!r} by {sign}: they are like {value!r}; "
        f"compare {_kind(value)}s with a {_kind(value)}"
      )
    raise ValueError(f"the filter asks for {name!r}, which the metadata lacks; {suggestion(str(name), sorted(names))}")


def parse_where(conditions: Sequence[str]) -> dict[str, Any]:
  """Return a filter from NAME=VALUE, NAME>=VALUE, NAME>VALUE, NAME<=VALUE, NAME<VALUE and NAME~VALUE (contains).

  A value that is valid JSON is read as JSON: a number, true, null, or a list of which one member must be equal. For
  `=`, 2020 matches the number and the text; in double quotes, "2020" matches the text alone. Double quotes also keep
  spaces at the ends, and allow a name to contain one of the signs. Raises ValueError for anything else.
  """
  where: dict[str, Any] = {}
  for condition in conditions:
    found = CONDITION.fullmatch(condition)
    if found is None:
      raise ValueError(
        f"--where {condition}: write NAME=VALUE, or >= > <= < and ~ (contains) in its place, in quotes for the shell; "
        "a value that begins with one of these stands in double quotes"
      )
    name, sign, text = found[1], WRITTEN[found[2]], found[3].strip()
    if name.startswith('"'):
      name = str(_from_json(name))
    if sign in where.setdefault(name, {}):
      raise ValueError(f"--where {condition}: {name} is given twice with {found[2]}; one value each")
    value = _from_json(text)
    if sign in ("$in", "$contains"):
      value = value if isinstance(value, list) else [value]
      if text not in value and not text.startswith('"'):
        value = [*value, text]  # 2020 also matches the text "2020"
    _check_operand(name, sign, value)
    where[name][sign] = value
  return where


def _conditions(name: str, wanted: Any) -> list[tuple[str, Any]]:
  """Return the (operator, operand) pairs for a name. Raises ValueError for an unknown operator or a bad operand."""
  signs = [key for key in wanted if str(key).startswith("$")] if isinstance(wanted, Mapping) else []
  if str(name).startswith("$"):
    raise ValueError(f"{name!r} is not the name of a value; to combine conditions, give a function of the metadata")
  if isinstance(wanted, Mapping) and (bare := [key for key in wanted if f"${key}" in OPERATORS]):
    raise ValueError(f"the filter on {name!r} has {bare[0]!r}; did you mean '${bare[0]}'?")
  if not signs:
    options = _plain(wanted)
    return [("$in", [_plain(o) for o in options] if isinstance(options, (list, tuple, set, frozenset)) else [options])]
  for sign in wanted:
    if sign not in OPERATORS:
      known = ", ".join(OPERATORS)
      raise ValueError(f"the filter on {name!r} has the unknown operator {sign!r}; there are {known}, and functions")
    _check_operand(name, sign, _plain(wanted[sign]))
  operands = {sign: _plain(operand) for sign, operand in wanted.items()}
  return [(sign, [*map(_plain, operand)] if sign == "$in" else operand) for sign, operand in operands.items()]


def _check_operand(name: str, sign: str, operand: Any) -> None:
  if sign in ORDERS and (_kind(operand) is None or operand != operand):
    raise ValueError(f"the filter on {name!r} has {sign} {operand!r}; it compares with a number or a text")
  if sign == "$in" and not isinstance(operand, (list, tuple, set, frozenset)):
    raise ValueError(f"the filter on {name!r} has $in {operand!r}; give a list")


def _holds(value: Any, sign: str, operand: Any) -> bool:
  value = _plain(value)
  members = value if isinstance(value, (list, tuple)) else ()
  if sign in ORDERS:
    return _kind(value) is not None and _kind(value) == _kind(operand) and ORDERS[sign](value, operand)
  if sign == "$contains":
    options = operand if isinstance(operand, (list, tuple, set, frozenset)) else (operand,)
    inside = isinstance(value, str) and any(isinstance(option, str) and option in value for option in options)
    return inside or any(_equal(member, option) for member in members for option in options)
  return any(_equal(each, option) for each in (value, *members) for option in operand)


def _equal(a: Any, b: Any) -> bool:
  return isinstance(a, bool) == isinstance(b, bool) and a == b


def _kind(value: Any) -> str | None:
  """Return the kind of values, "text" or "number", with which a value can be ordered; None if it has no order."""
  if isinstance(value, str):
    return "text"
  return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _clash(value: Any, operand: Any) -> bool:
  """Tell whether one value is a number and the other a text; a value without any order, such as None, never clashes."""
  return None not in (_kind(value), _kind(operand)) and _kind(value) != _kind(operand)


def _plain(value: Any) -> Any:
  """Return NumPy scalars and arrays as Python numbers and lists, and any other value unchanged."""
  return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


def _from_json(text: str) -> Any:
  """Return the value of a JSON text, and any other text unchanged."""

  def refused(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity are read as texts

  try:
    return json.loads(text, parse_constant=refused)
  except (ValueError, RecursionError):
    return text

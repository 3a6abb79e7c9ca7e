"""The reader of configs: each section becomes a frozen dataclass whose types say which values are allowed.

Another value, and an unknown key, is an error that names the key and what is allowed there.
"""

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from selfrag_jax.checked import check_fields, check_value

T = TypeVar("T")


def settings(cls: type[T], section: Mapping[str, Any], name: str) -> T:
  """Build a dataclass from a config section, sections within it included.

  Raises ValueError for a key that the dataclass does not have, with the closest one it has, and for a value that the
  type of its field does not allow.
  """
  if not isinstance(section, Mapping):
    raise ValueError(f"config.{name} is {section!r}; it must be a section")
  fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
  hints = typing.get_type_hints(cls)
  values, own = {}, {}
  for key, value in section.items():
    if key not in fields:
      close = difflib.get_close_matches(key, fields, n=1)
      hint = f"did you mean {name}.{close[0]}?" if close else f"it has {', '.join(fields)}"
      raise ValueError(f"config.{name} has no {key!r}; {hint}")
    if dataclasses.is_dataclass(hints[key]):
      values[key] = settings(hints[key], value, f"{name}.{key}")
    else:
      values[key] = own[key] = value
  check_fields(cls, own, f"config.{name}.")
  for key, field in fields.items():
    missing = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    if missing and key not in values:
      raise ValueError(f"config.{name}.{key} is missing")
  try:
    return cls(**values)
  except ValueError as error:  # of values that do not go together
    raise ValueError(f"config.{name}: {error}") from error


def read_config(config: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
  """Check a config and return it without its workdir, of which no result depends.

  `sections` gives for each top-level key its dataclass; the dataclasses of a section of several kinds by its `name`;
  or the type of a plain value. Of the others only the numbers are checked. Raises ValueError.
  """
  for name, kind in sections.items():
    if name not in config:
      raise ValueError(f"the config has no {name!r}; it needs {', '.join(sections)}")
    section = config[name]
    if isinstance(kind, Mapping):
      chosen = section.get("name") if isinstance(section, Mapping) else None
      if not isinstance(chosen, str) or chosen not in kind:
        raise ValueError(f"config.{name}.name is {chosen!r}; one of {', '.join(kind)}")
      kind = kind[chosen]
    if dataclasses.is_dataclass(kind):
      settings(kind, section, name)  # type: ignore[arg-type]
    elif kind is Mapping and not isinstance(section, Mapping):
      raise ValueError(f"config.{name} is {section!r}; it must be a section")
    else:
      check_value(kind, section, f"config.{name}")
  _check_numbers(config, "config")
  return {name: value for name, value in config.items() if name != "workdir"}


def _check_numbers(value: Any, name: str) -> None:
  """Raise ValueError for a number anywhere that no setting can have, of whatever section."""
  if isinstance(value, Mapping):
    for key, item in value.items():
      _check_numbers(item, f"{name}.{key}")
  elif isinstance(value, tuple | list):
    for item in value:
      _check_numbers(item, name)
  elif type(value) in (int, float):
    check_value(type(value), value, name)

"""Functions that make and check configs: each section is a frozen dataclass whose types say which values are allowed.

`full_config` makes a config with every key from the values that differ from the defaults; `read_config` and `settings`
check a config. An unknown key and a value that is not allowed are errors that name the key and what is allowed.
"""

import dataclasses
import typing
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import ml_collections

from selfrag_jax.checked import check_fields, check_value, suggestion

T = TypeVar("T")


def settings(cls: type[T], section: Mapping[str, Any], name: str) -> T:
  """Build a dataclass from a config section and the sections within it.

  A field of the type `tuple[SomeDataclass, ...]` takes a list of sections. Raises ValueError for a key that the
  dataclass does not have, with the closest key that it has, and for a value that the field's type does not allow.
  """
  if not isinstance(section, Mapping):
    raise ValueError(f"config.{name} is {section!r}; it must be a section")
  fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
  hints = typing.get_type_hints(cls)
  values, own = {}, {}
  for key, value in section.items():
    if key not in fields:
      raise ValueError(f"config.{name} has no {key!r}; {suggestion(key, fields, f'{name}.')}")
    item: Any = next(iter(typing.get_args(hints[key])), None)
    if dataclasses.is_dataclass(hints[key]):
      values[key] = settings(hints[key], value, f"{name}.{key}")
    elif isinstance(item, type) and dataclasses.is_dataclass(item):
      if not value or not isinstance(value, tuple | list):
        raise ValueError(f"config.{name}.{key} is {value!r}; it must be a list of at least one section")
      values[key] = tuple(settings(item, section, f"{name}.{key}[{place}]") for place, section in enumerate(value))
    else:
      values[key] = own[key] = value
  check_fields(cls, own, f"config.{name}.")
  for key, field in fields.items():
    missing = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    if missing and key not in values:
      raise ValueError(f"config.{name}.{key} is missing")
  try:
    return cls(**values)
  except ValueError as error:  # the values do not go together
    raise ValueError(f"config.{name}: {error}") from error


def full_config(
  sections: Mapping[str, Any], differences: Mapping[str, Any], left_out: Collection[str] = ()
) -> ml_collections.ConfigDict:
  """Return a config with every key: the values of `differences`, and the dataclasses' defaults for all other keys.

  `sections` is the same argument as in `read_config`. A plain value, and a section without a dataclass, come from
  `differences` alone. `left_out` names the keys (`section.key`) that an experiment does not use. Raises ValueError for
  an unknown key, and for a missing key that has no default.

  `loop.profile_steps` has the short name `profile_steps`, too: it belongs to one run, not to what is trained.
  """
  config: dict[str, Any] = {}
  for name in differences:
    if name not in (known := ["experiment", "workdir", *sections]):
      raise ValueError(f"the config has no {name!r}; {suggestion(name, known)}")
  for name, kind in {"experiment": str, "workdir": str, **sections}.items():
    kind = _chosen(kind, differences.get(name), name)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
      made = dataclasses.asdict(settings(kind, differences.get(name, {}), name))
      config[name] = {key: x for key, x in made.items() if f"{name}.{key}" not in left_out}
    elif name in differences:
      config[name] = differences[name]
    else:
      raise ValueError(f"the config has no {name!r}, which has no default")
  if "profile_steps" in (loop := config.get("loop", {})):  # one value under two names
    config["profile_steps"] = loop["profile_steps"] = ml_collections.FieldReference(loop["profile_steps"])
  return ml_collections.ConfigDict(config)


def read_config(config: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
  """Check a config and return it without its workdir, on which no result depends, and without the short name.

  `sections` maps each top-level key to a dataclass, to a mapping of names to dataclasses (the section's `name` chooses
  one), or to the type of a plain value. In keys outside `sections` only the numbers are checked. Raises ValueError.
  """
  for name, kind in sections.items():
    if name not in config:
      raise ValueError(f"the config has no {name!r}; it needs {', '.join(sections)}")
    section = config[name]
    kind = _chosen(kind, section, name)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
      settings(kind, section, name)
    elif kind is Mapping and not isinstance(section, Mapping):
      raise ValueError(f"config.{name} is {section!r}; it must be a section")
    else:
      check_value(kind, section, f"config.{name}")
  _check_numbers(config, "config")
  return {name: value for name, value in config.items() if name not in ("workdir", "profile_steps")}


def _chosen(kind: Any, section: Any, name: str) -> Any:
  """Return the dataclass that the section's `name` chooses if `kind` maps names to dataclasses, else `kind` itself."""
  if not isinstance(kind, Mapping):
    return kind
  chosen = section.get("name") if isinstance(section, Mapping) else None
  if not isinstance(chosen, str) or chosen not in kind:
    raise ValueError(f"config.{name}.name is {chosen!r}; one of {', '.join(kind)}")
  return kind[chosen]


def _check_numbers(value: Any, name: str) -> None:
  """Raise ValueError if any number in any section is too large or not finite, so that no setting can have it."""
  if isinstance(value, Mapping):
    for key, item in value.items():
      _check_numbers(item, f"{name}.{key}")
  elif isinstance(value, tuple | list):
    for item in value:
      _check_numbers(item, name)
  elif type(value) in (int, float):
    check_value(type(value), value, name)

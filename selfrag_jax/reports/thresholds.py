"""Gates of scripted evaluations: the bounds that values of a report must keep."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from selfrag_jax.checked import suggestion

Flag = Literal["min", "max"]


class Gate(NamedTuple):
  """A value of a report by its name, and its bound: the least (`min`) or the most (`max`) that it may be."""

  flag: Flag
  name: str
  bound: float

  def holds(self, value: float) -> bool:
    """Tell whether a value keeps the bound; NaN keeps none."""
    return value >= self.bound if self.flag == "min" else value <= self.bound


def parse_gate(flag: Flag, text: str) -> Gate:
  """Parse the `NAME=VALUE` of a flag. Raises ValueError for any other text."""
  name, _, value = text.rpartition("=")
  try:
    gate = Gate(flag, name.strip(), float(value))
  except ValueError:
    gate = Gate(flag, "", math.nan)
  if not gate.name or "=" in gate.name or not math.isfinite(gate.bound):
    raise ValueError(f"--{flag}={text}: write NAME=VALUE with a number, such as bm25.ndcg@10=0.78")
  return gate


def check_names(gates: Iterable[Gate], names: Iterable[str]) -> None:
  """Raise ValueError, with the closest name, for a gate of a value that no report will have."""
  names = sorted(names)
  for gate in gates:
    if gate.name not in names:
      raise ValueError(f"--{gate.flag}: the report has no {gate.name}; {_suggestion(gate.name, names)}")


def numbers(report: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
  """Return the numbers of a report by their names, the keys joined by dots."""
  found: dict[str, float] = {}
  for key, value in report.items():
    if isinstance(value, Mapping):
      found |= numbers(value, f"{prefix}{key}.")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
      found[f"{prefix}{key}"] = float(value)
  return found


def value_of(report: Mapping[str, Any], gate: Gate) -> float:
  """Return the number that a gate names by its key, or by keys joined by dots.

  Raises ValueError, with a close name or the known ones, if there is no such number.
  """
  name = gate.name
  if name in (known := numbers(report)):
    return known[name]
  found: Any = report
  for key in [name] if name in report else name.split("."):
    if not isinstance(found, Mapping) or key not in found:
      names = sorted(map(str, found)) if isinstance(found, Mapping) else []
      raise ValueError(f"--{gate.flag}: the report has no {name}; at {key!r} {_suggestion(key, names)}")
    found = found[key]
  raise ValueError(f"--{gate.flag}: {name} is no number in the report")


def _suggestion(name: str, known: list[str]) -> str:
  return suggestion(name, known) if known else "it has a value"


def missed(report: Mapping[str, Any], gates: Iterable[Gate]) -> list[str]:
  """Return a sentence for each gate whose bound the report does not keep."""
  values = [(gate, value_of(report, gate)) for gate in gates]
  side = {"min": "more", "max": "less"}
  return [f"{g.name} is {value:.6g}, not {g.bound:g} or {side[g.flag]}" for g, value in values if not g.holds(value)]

"""Gates of scripted evaluations: what a report must reach."""

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

MENTIONED = 20  # names, where none is close


class Gate(NamedTuple):
  """A value of a report, by its name, and the least that it may be."""

  name: str
  least: float


def parse_gate(text: str) -> Gate:
  """Read `NAME=VALUE`. Raises ValueError."""
  name, _, value = text.rpartition("=")
  try:
    gate = Gate(name.strip(), float(value))
  except ValueError:
    gate = Gate("", math.nan)
  if not gate.name or "=" in gate.name or not math.isfinite(gate.least):
    raise ValueError(f"--min={text}: write NAME=VALUE with a number, such as bm25.ndcg@10=0.78")
  return gate


def check_names(gates: Iterable[Gate], names: Iterable[str]) -> None:
  """Raise ValueError, with the closest name, for a gate of a value that no report will have."""
  names = sorted(names)
  for gate in gates:
    if gate.name not in names:
      raise ValueError(f"--min: the report has no {gate.name}; {_suggestion(gate.name, names)}")


def numbers(report: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
  """Return the numbers of a report by their names: keys with dots between."""
  found: dict[str, float] = {}
  for key, value in report.items():
    if isinstance(value, Mapping):
      found |= numbers(value, f"{prefix}{key}.")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
      found[f"{prefix}{key}"] = float(value)
  return found


def value_of(report: Mapping[str, Any], name: str) -> float:
  """Return a number of a report by its key, or by keys with dots between. Raises ValueError, with what there is."""
  if name in (known := numbers(report)):
    return known[name]
  found: Any = report
  for key in [name] if name in report else name.split("."):
    if not isinstance(found, Mapping) or key not in found:
      names = sorted(map(str, found)) if isinstance(found, Mapping) else []
      raise ValueError(f"--min: the report has no {name}; at {key!r} {_suggestion(key, names)}")
    found = found[key]
  raise ValueError(f"--min: {name} is no number in the report")


def _suggestion(name: str, known: list[str]) -> str:
  close = difflib.get_close_matches(name, known, n=1)
  some = [*known[:MENTIONED], f"and {len(known) - MENTIONED} more"] if len(known) > MENTIONED else known
  return f"did you mean {close[0]}?" if close else f"it has {', '.join(some) or 'a value'}"


def missed(report: Mapping[str, Any], gates: list[Gate]) -> list[str]:
  """Say of each gate that the report does not reach what it is."""
  values = [(gate, value_of(report, gate.name)) for gate in gates]
  return [f"{name} is {value:.6g}, not {least:g} or more" for (name, least), value in values if not value >= least]

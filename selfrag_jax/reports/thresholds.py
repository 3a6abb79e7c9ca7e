"""Gates of scripted evaluations: the bounds that values of a report must keep."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
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


def parse_gates(least: Iterable[str], most: Iterable[str]) -> list[Gate]:
  """Parse the values of `--min` and `--max`. Raises ValueError for bad text and for bounds that exclude each other."""
  low, high = [parse_gate("min", text) for text in least], [parse_gate("max", text) for text in most]
  for a, b in itertools.product(low, high):
    if a.name == b.name and a.bound > b.bound:
      raise ValueError(f"--min={a.name}={a.bound:g} and --max={b.name}={b.bound:g} exclude each other")
  return low + high


def check_names(gates: Iterable[Gate], names: Iterable[str]) -> None:
  """Raise ValueError, with the closest name, for a gate of a value that no report will have."""
  names = sorted(names)
  for gate in gates:
    if gate.name not in names:
      raise ValueError(f"--{gate.flag}: the report has no {gate.name}; {suggestion(gate.name, names)}")


def numbers(report: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
  """Return the numbers of a report by their names, the keys joined by dots."""
  found: dict[str, float] = {}
  for key, value in report.items():
    if isinstance(value, Mapping):
      found |= numbers(value, f"{prefix}{key}.")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
      found[f"{prefix}{key}"] = float(value)
  return found


def missed(report: Mapping[str, Any], gates: Sequence[Gate]) -> list[str]:
  """Return a sentence for each gate whose bound the report does not keep. Raises ValueError like `check_names`."""
  check_names(gates, known := numbers(report))
  side, values = {"min": "more", "max": "less"}, [(gate, known[gate.name]) for gate in gates]
  return [f"{g.name} is {value:.6g}, not {g.bound:g} or {side[g.flag]}" for g, value in values if not g.holds(value)]

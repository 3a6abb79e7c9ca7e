"""The report of position recall: whether its claims hold, its rows, and its table."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from selfrag_jax.metrics.position import shape

FLAT = 1e-3  # variance of the loss over depths, in nats squared, below which a curve is flat
HELD_OUT = 1024  # contexts on which the losses of phase 2 are compared, and facts among which recall@1 is measured


def checks(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Check the claims of the experiment on its report: return each check's value, its bounds and whether it holds."""
  conditions, chance, first = report["conditions"], report["chance"], report["n_facts"][0]
  memory = conditions["memory"]
  found: dict[str, dict[str, Any]] = {}

  def check(name: str, value: float, at_least: float | None = None, at_most: float | None = None) -> None:
    holds = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    found[name] = {"value": value, "at_least": at_least, "at_most": at_most, "holds": bool(holds)}

  check(f"memory, {first} facts: worst depth", memory["worst"], at_least=0.85)
  check(f"memory, {first} facts: |U|", abs(memory["u"]), at_most=0.05)
  check(f"memory, {first} facts: upper bound of the range", memory["range_upper"], at_most=0.10)
  for n in report["n_facts"][1:]:
    check(f"memory, {n} facts: accuracy", conditions[f"memory_{n}"]["accuracy"], at_least=0.90)
  ends = conditions["head_tail"]["accuracy_by_depth"]
  quarter = len(ends) // 4
  check("first and last facts: U", conditions["head_tail"]["u"], at_least=0.6)
  check("first and last facts: middle", float(np.mean(ends[quarter : len(ends) - quarter])), at_most=chance + 0.05)
  check("needed chunk deleted", conditions["deleted"]["accuracy"], at_most=chance + 0.05)
  check("random chunks", conditions["random"]["accuracy"], at_most=chance + 0.05)
  check("value changed: the answer follows", conditions["changed"]["accuracy"], at_least=0.95)
  for n, middle in report["middle"].items():
    if int(n) != first:
      check(f"middle of {n} facts: memory - the best full context", middle["interval"][0], at_least=1e-9)
      check(f"middle of {n} facts: McNemar p", middle["mcnemar_p"], at_most=1e-3)
  if "phase_3_variance" in report:
    change = report["phase_3_variance"]
    most = max(change["before"], change["after"])
    value, at_most = (most, FLAT) if most < FLAT else (change["interval"][1], -1e-12)
    check("phase 3: the variance over depths falls, or was next to nothing", value, at_most=at_most)
  if "phase_2_loss" in report:
    check("phase 2: loss with the needed chunk - another", report["phase_2_loss"]["gold_minus_random"][1], at_most=0.0)
    check("phase 2: loss with the needed chunk - none", report["phase_2_loss"]["gold_minus_none"][1], at_most=0.0)
  if "recall_at_1" in report:
    last = list(report["recall_at_1"].values())[-1]
    check(f"recall@1 among {HELD_OUT} facts by the model's own embedding", last, at_least=0.98)
  return found


def as_rows(report: Mapping[str, Any]) -> Iterator[list[Any]]:
  """Yield the header and one row per condition and depth."""
  yield ["condition", "position", "accuracy", "low", "high", "recall", "recall_at_1", "n", "budget"]
  for name, curve in report["conditions"].items():
    _, _, length = name.rpartition("_")
    positions = report["depths"][length if length in report["depths"] else str(report["n_facts"][0])]
    for i, position in enumerate(positions):
      numbers = (curve["accuracy_by_depth"][i], *curve["interval_by_depth"][i], curve["recall_by_depth"][i])
      numbers = (*numbers, curve["recall_at_1_by_depth"][i])
      yield [name, position, *(f"{x:.4f}" for x in numbers), curve["n"], curve["budget"]]


def table(report: Mapping[str, Any]) -> str:
  """Format the report for a terminal."""
  lines = [f"{'':22} {'facts':>6} {'accuracy':>9} {'worst':>6} {'U':>7} {'range <':>8} {'chi2 p':>8} {'recall@1':>9}"]
  for name, c in report["conditions"].items():
    lines.append(
      f"{name:22} {c['budget']:6} {c['accuracy']:9.3f} {c['worst']:6.3f} {c['u']:+7.3f} {c['range_upper']:8.3f} "
      f"{c['chi2_p']:8.2g} {np.mean(c['recall_at_1_by_depth']):9.3f}"
    )
  for n, c in report["middle"].items():
    (low, high), p = c["interval"], c["mcnemar_p"]
    difference = f"{c['difference']:+.3f} [{low:+.3f}, {high:+.3f}], McNemar p {p:.2g}"
    lines.append(f"middle of {n} facts: memory - {c['against']} = {difference}")
  for name, curve in report["conditions"].items():
    if name.startswith("full_"):
      low, high = curve["u_interval"]
      named = shape(curve["accuracy_by_depth"], (low, high))
      lines.append(f"{name}: {named}, edges - middle = {curve['u']:+.3f} [{low:+.3f}, {high:+.3f}]")
  for name, c in report["checks"].items():
    bound = f">= {c['at_least']:.3g}" if c["at_least"] is not None else f"<= {c['at_most']:.3g}"
    lines.append(f"{'holds' if c['holds'] else 'FAILS':6} {name}: {c['value']:.3g} {bound}")
  lines.append(f"tokens {report['tokens']}, chance {report['chance']:.3f}, {report['wall_seconds']:.0f} s")
  return "\n".join(lines)

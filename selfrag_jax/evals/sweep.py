"""The position-recall experiment over variants and seeds: every run by itself, then a summary of all."""

import csv
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from selfrag_jax.evals import position_recall
from selfrag_jax.evals.gates import numbers
from selfrag_jax.files import read_json_object, write_bytes_atomic, write_json
from selfrag_jax.train.workdir import open_workdir

Runs = dict[str, position_recall.Experiment]


def build(config: Mapping[str, Any]) -> Runs:
  """Check the configs of all runs and build what they describe."""
  runs = {}
  for name, run in config["runs"].items():
    try:
      runs[name] = position_recall.build(run)
    except ValueError as error:
      raise ValueError(f"config.runs.{name}: {error}") from error
  return runs


def value_names(experiment: Runs) -> set[str]:
  """Return the names of the numbers that the report will have."""
  return set(numbers(summarize({name: position_recall.outline(one) for name, one in experiment.items()})))


def run(experiment: Runs, workdir: epath.PathLike) -> dict[str, Any]:
  """Run what has not been run, and write `position_recall.json` and `.csv` over all seeds of each variant."""
  reports = {}
  for number, (name, one) in enumerate(experiment.items(), 1):
    folder = epath.Path(workdir) / name
    done = folder / "position_recall.json"
    if not done.exists():
      print(f"run {number} of {len(experiment)}: {name}", flush=True)
      with open_workdir(folder) as held:
        position_recall.run(one, held)
    reports[name] = _read(done)
  summary = summarize(reports)
  write_json(epath.Path(workdir) / "position_recall.json", summary)
  write_bytes_atomic(epath.Path(workdir) / "position_recall.csv", as_csv(summary).encode())
  print(table(summary))
  return summary


def _read(path: epath.Path) -> dict[str, Any]:
  """Read the report of a run. Raises ValueError, naming the file, for anything else."""
  report = read_json_object(path, "the report of a run")
  try:
    summarize({path.parent.name: report})
  except (AttributeError, KeyError, TypeError) as error:
    raise ValueError(f"{path} is no report of a run ({error!r}); delete it to make the run again") from None
  return report


def summarize(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
  """Take the mean and the extremes over the seeds of each variant, and count the checks that hold."""
  summary: dict[str, Any] = {}
  for variant in dict.fromkeys(report["variant"] for report in reports.values()):
    seeds = [report for report in reports.values() if report["variant"] == variant]
    conditions = {}
    for name in seeds[0]["conditions"]:
      curves = [report["conditions"][name] for report in seeds]
      conditions[name] = {
        key: {"mean": float(np.mean(values)), "low": float(min(values)), "high": float(max(values))}
        for key in ("accuracy", "worst", "u", "range_upper")
        for values in [[curve[key] for curve in curves]]
      }
    made = [(name, check["holds"]) for report in seeds for name, check in report["checks"].items()]
    held = {name: sum(holds for other, holds in made if other == name) for name, _ in made}
    summary[variant] = {"seeds": len(seeds), "conditions": conditions, "checks_held": held}
  return summary


def as_csv(summary: Mapping[str, Any]) -> str:
  """One line a variant and condition."""
  out = io.StringIO()
  writer = csv.writer(out, lineterminator="\n")
  writer.writerow(["variant", "condition", "seeds", "accuracy", "worst", "worst_low", "u", "range_upper"])
  for variant, found in summary.items():
    for name, c in found["conditions"].items():
      numbers = (c["accuracy"]["mean"], c["worst"]["mean"], c["worst"]["low"], c["u"]["mean"], c["range_upper"]["mean"])
      writer.writerow([variant, name, found["seeds"], *(f"{x:.4f}" for x in numbers)])
  return out.getvalue()


def table(summary: Mapping[str, Any]) -> str:
  """Format the summary for a terminal: mean accuracy and worst depth over the seeds."""
  lines = [f"{'':20}{'seeds':>6}{'memory':>9}{'worst':>7}{'ends':>7}{'best full':>11}{'checks that hold':>20}"]
  for variant, found in summary.items():
    c = found["conditions"]
    full = max((c[name]["accuracy"]["mean"] for name in c if name.startswith("full_")), default=float("nan"))
    held, all_checks = sum(found["checks_held"].values()), found["seeds"] * len(found["checks_held"])
    lines.append(
      f"{variant:20}{found['seeds']:6}{c['memory']['accuracy']['mean']:9.3f}{c['memory']['worst']['low']:7.3f}"
      f"{c['head_tail']['accuracy']['mean']:7.3f}{full:11.3f}{f'{held} of {all_checks}':>20}"
    )
  return "\n".join(lines)

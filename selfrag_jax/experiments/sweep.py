"""A sweep: independent runs of several experiments, and medians and ranges over the seeds of each group of runs."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from selfrag_jax.experiments.base import READING, find, write_report
from selfrag_jax.experiments.documents import FilesPath
from selfrag_jax.metrics.statistics import crossed_interval
from selfrag_jax.reports import figures
from selfrag_jax.reports.thresholds import numbers
from selfrag_jax.storage.arrays import read_npz
from selfrag_jax.storage.atomic import write_json
from selfrag_jax.storage.json_lines import read_json_object
from selfrag_jax.text.printable import printable
from selfrag_jax.train.loop import TrainingError
from selfrag_jax.train.workdir import open_workdir


class Kind(NamedTuple):
  """An experiment whose runs are summarised: its name, the file of its report, and a pattern of its numbers' names.

  `shown`: the numbers in the terminal and the figure. `same`: keys whose values all reports of a group share. `paired`:
  pairs of arrays in the .npz file beside the report, with a value for each question, whose difference gets an interval
  over runs and questions together. `figure` draws the reports of a group into a file.
  """

  name: str
  report: str
  numbers: re.Pattern[str]
  shown: tuple[str, ...]
  same: tuple[str, ...] = ()
  paired: tuple[tuple[str, str], ...] = ()
  figure: Callable[[epath.PathLike, Sequence[Mapping[str, Any]]], None] | None = None


KINDS = {
  "position_recall": Kind(
    "position_recall",
    "position_recall.json",
    re.compile(
      r"conditions\.\w+\.(accuracy|worst|u|range_upper)|middle\.\d+\.difference|recall_at_1\.\w+"
      r"|phase_2_loss\.(gold|random|none)|wall_seconds"
    ),
    ("conditions.memory.accuracy", "conditions.memory.worst", "conditions.memory_1024.accuracy",
     "conditions.memory_1024.worst", "conditions.head_tail.accuracy", "conditions.full_hybrid.accuracy",
     "conditions.full_mamba.accuracy", "conditions.full_transformer.accuracy"),
    same=("variant", "n_facts"),
    figure=figures.accuracy_over_depth_of_runs,
  ),
  "refrag": Kind(
    "refrag",
    "report.json",
    re.compile(r"em\.\w+|wall_seconds"),
    ("em.refrag", "em.sft", "em.sft_gold", "em.oracle"),
    same=("task", "block_pattern", "n"),
  ),
  "rag": Kind(
    "rag",
    "rag.json",
    re.compile(r"(em|f1|no_answer)\.\w+\.\w+|wall_seconds"),
    ("em.rag.retrieved", "em.rag.edited", "em.rag.missing", "em.rag.none", "em.rag.shuffled"),
    same=("task", "documents", "block_pattern", "n"),
  ),
  "rerank": Kind(
    "rerank",
    "rerank.json",
    re.compile(r"\w+\.(ndcg@10(_difference)?|recall@10)|weight"),
    ("bm25.ndcg@10", "reranked.ndcg@10", "blended.ndcg@10"),
    paired=(("blended.ndcg@10", "bm25.ndcg@10"), ("reranked.ndcg@10", "bm25.ndcg@10")),
  ),
}  # fmt: skip


class Run(NamedTuple):
  """One run: its kind, the experiment built from its config, and the config."""

  kind: Kind
  experiment: Any
  config: Mapping[str, Any]


Groups = dict[str, dict[str, Run]]
SECTIONS = {"data": FilesPath, "runs": Mapping}
ENDED = "ended.json"  # in the folder of a run without a report: its experiment, and why it ended


def build(config: Mapping[str, Any]) -> Groups:
  """Check the configs of all runs and build their experiments. Raises ValueError, naming the run."""
  groups: Groups = {}
  for group, runs in config["runs"].items():
    for name, run in runs.items():
      if (kind := KINDS.get(run.get("experiment"))) is None:
        known = ", ".join(KINDS)
        raise ValueError(f"config.runs.{group}.{name}.experiment is {run.get('experiment')!r}; one of {known}")
      if not run["data"].get("path", "-"):
        run = {**run, "data": {**run["data"], "path": config["data"]["path"]}}
      try:
        groups.setdefault(group, {})[name] = Run(kind, find(kind.name).build(run), run)
      except ValueError as error:
        raise ValueError(f"config.runs.{group}.{name}: {error}") from error
  return groups


def value_names(experiment: Groups) -> set[str]:
  """Return the names of the numbers that the summary will have if every run succeeds."""
  found = set()
  for group, runs in experiment.items():
    of_all = [
      {name for name in find(kind.name).value_names(run) if kind.numbers.fullmatch(name)}
      for kind, run, _ in runs.values()
    ]
    found |= {
      f"{group}.values.{name}.{key}" for name in set.union(*of_all) for key in ("runs", "median", "low", "high")
    }
    kind = next(iter(runs.values())).kind
    found |= {f"{group}.paired.{a} - {b}.{key}" for a, b in kind.paired for key in ("runs", "questions", "difference")}
    found |= {f"{group}.runs", f"{group}.not_learned", f"{group}.checks.held", f"{group}.checks.of"}
  return found


def dry_run(experiment: Groups) -> None:
  """Print the runs of each group; the dry run of a run's own config prints the memory that it needs."""
  for group, runs in experiment.items():
    print(f"{group}: {', '.join(runs)}")


def evaluate(experiment: Groups, workdir: epath.PathLike) -> dict[str, Any]:
  """Make the missing runs; write `sweep.json`, `.csv` and `.png` with the medians and ranges of each group.

  A group whose kind has a figure gets it as `GROUP.png`. A run that raises TrainingError is
  counted and does not stop the others. Reports that are there are read before the first run. Raises ValueError, naming
  the file, for a report that is damaged or of another config.
  """
  workdir = epath.Path(workdir)
  reports: dict[str, dict[str, Any]] = {
    group: {name: _finished(run, workdir / group / name) for name, run in runs.items()}
    for group, runs in experiment.items()
  }
  number, total = 0, sum(map(len, experiment.values()))
  for group, runs in experiment.items():
    for name, run in runs.items():
      number += 1
      if reports[group][name] is None:
        print(f"run {number} of {total}: {group}/{name}", flush=True)
        reports[group][name] = _make(run, workdir / group / name)
  return publish(workdir, reports, {group: next(iter(runs.values())).kind for group, runs in experiment.items()})


run = evaluate  # a sweep has no phases beside those of its runs


def _finished(run: Run, folder: epath.Path) -> dict[str, Any] | None:
  """Return the report of a finished run, None if there is none. Raises ValueError for the report of another config."""
  path, written = folder / run.kind.report, folder / "config.json"
  if not path.exists():
    return None
  config = {key: value for key, value in run.config.items() if key != "workdir"}
  if written.exists() and read_json_object(written, "the config of a run") != json.loads(json.dumps(config)):
    raise ValueError(f"{path} is of another config: take another workdir, or delete it to make the run again")
  return _read(path, run.kind)


def _make(run: Run, folder: epath.Path) -> dict[str, Any] | str:
  """Train and measure; return the report, or the reason why there is none, which is written into the folder."""
  module = find(run.kind.name)
  with open_workdir(folder) as held:
    try:
      (module.run if run.kind.name in READING else module.evaluate)(run.experiment, held)
    except TrainingError as error:
      print(f"{folder.parent.name}/{folder.name} ended: {error}", flush=True)
      write_json(folder / ENDED, {"experiment": run.kind.name, "ended": str(error)})
      return str(error)
  return _read(folder / run.kind.report, run.kind)


def read_done(workdir: epath.PathLike) -> tuple[dict[str, dict[str, Any]], dict[str, Kind]]:
  """Read the reports in a folder, and why runs without one ended, by group and run; and the kind of each group.

  Raises ValueError if there is no report, and for two runs of a group with one seed.
  """
  reports: dict[str, dict[str, Any]] = {}
  kinds: dict[str, Kind] = {}
  folder = epath.Path(workdir)
  for kind in KINDS.values():
    for path in sorted(folder.glob(f"*/*/{kind.report}")):
      group = path.parent.parent.name
      reports.setdefault(group, {})[path.parent.name] = _read(path, kind)
      kinds[group] = kind
  if not reports:
    raise ValueError(f"{workdir} has no report of a run; give the workdir of a sweep")
  for group, runs in reports.items():
    seeds = [report["seed"] for report in runs.values() if "seed" in report]
    if twice := {seed for seed in seeds if seeds.count(seed) > 1}:
      raise ValueError(f"{folder / group} has two runs of the seed {min(twice)}: each is a copy or in the wrong folder")
  for path in sorted(folder.glob(f"*/*/{ENDED}")):
    ended = read_json_object(path, "why a run ended")
    group, name = path.parent.parent.name, path.parent.name
    if ended.get("experiment") not in KINDS or not isinstance(ended.get("ended"), str):
      raise ValueError(f"{path} does not say why a run of an experiment ended; delete it")
    kinds.setdefault(group, KINDS[ended["experiment"]])
    reports.setdefault(group, {}).setdefault(name, ended["ended"])
  return reports, kinds


def publish(
  workdir: epath.PathLike, reports: Mapping[str, Mapping[str, Any]], kinds: Mapping[str, Kind]
) -> dict[str, Any]:
  """Write and print the summary of each group's reports; a text in place of a report says why its run ended."""
  workdir = epath.Path(workdir)
  for group, of in reports.items():
    for key in kinds[group].same:
      said = {name: report.get(key) for name, report in of.items() if not isinstance(report, str)}
      if any(value != next(iter(said.values())) for value in said.values()):
        raise ValueError(f"{workdir / group}: the runs differ in {key}: {said}; each group is one setting")
  summary = {group: summarize(of, kinds[group]) for group, of in reports.items()}
  for group, of in reports.items():
    done = [report for report in of.values() if not isinstance(report, str)]
    if done and (draw := kinds[group].figure):
      try:
        draw(workdir / f"{group}.png", done)
      except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{workdir / group}: these reports cannot be drawn together ({error!r})") from None
  figures.runs_of_groups(workdir, summary)
  write_report(workdir, "sweep", summary, as_rows(summary))
  print(printable(table(summary), "\n"))
  return summary


def _read(path: epath.Path, kind: Kind) -> dict[str, Any]:
  """Read the report of a run. Raises ValueError, naming the file, for any other content."""
  try:
    report = read_json_object(path, "the report of a run")
    if kind.paired:
      arrays = read_npz(path.parent / f"{path.stem}.npz")
      report["paired"] = {f"{a} - {b}": (arrays[a] - arrays[b]).tolist() for a, b in kind.paired}
      if not np.isfinite(list(report["paired"].values())).all():
        raise ValueError("a score is not finite")
    if unusable := [name for name, value in numbers(report).items() if not math.isfinite(value)]:
      raise ValueError(f"{unusable[0]} is not finite")
    if not summarize({"": report}, kind)["values"]:
      raise KeyError(kind.shown[0])
  except (AttributeError, IndexError, KeyError, OSError, OverflowError, TypeError, ValueError) as error:
    raise ValueError(f"{path} is no report of a run ({error!r}); delete it to make the run again") from None
  return report


def summarize(reports: Mapping[str, Mapping[str, Any] | str], kind: Kind) -> dict[str, Any]:
  """Take medians and ranges over a group's runs, and count checks that hold; a text says why its run has no report."""
  ended = {name: report for name, report in reports.items() if isinstance(report, str)}
  done = {name: report for name, report in reports.items() if not isinstance(report, str)}
  of_runs = {name: {k: v for k, v in numbers(r).items() if kind.numbers.fullmatch(k)} for name, r in done.items()}
  values = {}
  for name in dict.fromkeys(name for found in of_runs.values() for name in found):
    of_name = {run: found[name] for run, found in of_runs.items() if name in found}
    each = list(of_name.values())
    middle = {"median": float(np.median(each)), "low": min(each), "high": max(each)}
    values[name] = {"runs": len(each), **middle, "of_runs": [[run, value] for run, value in of_name.items()]}
  checks = [
    [run, name, check["holds"] is True] for run, r in done.items() for name, check in r.get("checks", {}).items()
  ]
  return {
    "runs": len(done),
    "not_learned": len(ended),
    "ended": ended,
    "values": values,
    "shown": [name for name in kind.shown if name in values],
    "paired": _over_runs_and_questions(done, kind),
    "checks": {
      "held": sum(holds for *_, holds in checks),
      "of": len(checks),
      "failed": [[run, name] for run, name, holds in checks if not holds],
    },
  }


def _over_runs_and_questions(reports: Mapping[str, Mapping[str, Any]], kind: Kind) -> dict[str, Any]:
  """Compare the paired arrays. Raises ValueError if the runs were asked different questions."""
  paired = {}
  for name in [f"{a} - {b}" for a, b in kind.paired] if reports else ():
    rows = [report["paired"][name] for report in reports.values()]
    if len({len(row) for row in rows}) > 1:
      runs = ", ".join(reports)
      raise ValueError(f"{runs} were asked different questions: give them one data.seed and path")
    each = np.array(rows)
    facts = {"runs": len(rows), "questions": each.shape[1], "difference": float(each.mean())}
    paired[name] = facts | {"interval": list(crossed_interval(each))}
  return paired


def as_rows(summary: Mapping[str, Any]) -> Iterator[list[Any]]:
  """Yield the header and one row per group and number."""
  yield ["group", "number", "runs", "median", "low", "high"]
  for group, found in summary.items():
    for name, value in found["values"].items():
      yield [group, name, value["runs"], *(f"{value[key]:.4f}" for key in ("median", "low", "high"))]


def table(summary: Mapping[str, Any]) -> str:
  """Format the summary for a terminal: the median and the range of each number that is shown."""
  lines = []
  for group, found in summary.items():
    ended = f", {found['not_learned']} ended without what their next phase needs" if found["not_learned"] else ""
    held = f", {found['checks']['held']} of {found['checks']['of']} checks hold" if found["checks"]["of"] else ""
    lines.append(f"{group}: {found['runs']} runs{ended}{held}")
    for name in found["shown"]:
      value = found["values"][name]
      over = f"[{value['low']:.3f}, {value['high']:.3f}]  {_runs(value['runs'])}"
      lines.append(f"  {figures.short(name):24}{value['median']:7.3f}  {over}")
    for name, pair in found["paired"].items():
      low, high = pair["interval"]
      over = f"over {_runs(pair['runs'])} and {pair['questions']} questions together"
      lines.append(f"  {name} = {pair['difference']:+.4f}  [{low:+.4f}, {high:+.4f}] {over}")
    lines += [f"  {run}: {name} does not hold" for run, name in found["checks"]["failed"]]
    lines += [f"  {run}: {why}" for run, why in found["ended"].items()]
  return "\n".join(lines)


def _runs(n: int) -> str:
  return f"{n} run" if n == 1 else f"{n} runs"

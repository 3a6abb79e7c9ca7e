"""The position-recall experiment: one small model with a memory against itself without, and against full context.

Every condition answers the same paired questions, in which only the needed fact moves. Models that read the whole
context are trained on reciting it (free recall and running span, arXiv 2510.10276), with as many parameters.
"""

import csv
import dataclasses
import io
import json
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from selfrag_jax.evals import figures, self_rag
from selfrag_jax.evals.recall import Curve, measure, variance_change
from selfrag_jax.files import write_bytes_atomic, write_json
from selfrag_jax.metrics.position import compare
from selfrag_jax.model.config import ModelConfig, count_params
from selfrag_jax.tasks.facts import Facts
from selfrag_jax.tasks.sequences import recitals
from selfrag_jax.train.loop import train
from selfrag_jax.train.phases.memory import MemoryPhase
from selfrag_jax.train.reading import Reader
from selfrag_jax.train.settings import MemoryPhaseConfig, RecallConfig, settings
from selfrag_jax.train.telemetry import seconds_spent
from selfrag_jax.typing import Params

# of the model with memory: name -> (what it sees, whether the needed fact states another value)
CONDITIONS = {
  "memory": ("memory", False),
  "tail": ("tail", False),
  "head_tail": ("head_tail", False),
  "oracle": ("oracle", False),
  "random": ("random", False),
  "deleted": ("deleted", False),
  "changed": ("memory", True),
}


@dataclasses.dataclass
class Experiment:
  """The phases of the model with memory, and the readers of the whole context that it is compared with."""

  base: self_rag.Experiment
  evaluation: RecallConfig
  full_context: MemoryPhaseConfig
  baselines: dict[str, Reader]
  task: Facts  # what they recite
  span: int


def build(config: Mapping[str, Any]) -> Experiment:
  """Check a config and build what it describes. Raises ValueError with the fix where it does not fit."""
  base = self_rag.build(config)
  section = dict(config["full_context"])
  n_facts, span, models = section.pop("n_facts"), section.pop("span"), section.pop("models")
  if not 1 <= span <= n_facts:
    raise ValueError(f"full_context.span = {span} must lie in [1, {n_facts}], the facts of a context")
  baselines = {}
  for name, changes in models.items():
    model = settings(ModelConfig, {**base.model.to_dict(), **changes}, f"full_context.models.{name}")
    baselines[name] = base.reader._replace(model=model)
  phase = settings(MemoryPhaseConfig, {**section, "sight": "full"}, "full_context")
  task = Facts(config["data"]["variant"], n_facts, config["data"]["seed"])
  evaluation = settings(RecallConfig, config["evaluation"], "evaluation")
  return Experiment(base, evaluation, phase, baselines, task, span)


def train_baseline(experiment: Experiment, name: str, workdir: epath.PathLike) -> Params:
  """Train a reader of the whole context from scratch."""
  base, config, reader = experiment.base, experiment.full_context, experiment.baselines[name]
  size = config.batch_size
  recite = lambda step: recitals(experiment.task, "train", range(step * size, (step + 1) * size), experiment.span)
  phase = MemoryPhase(
    f"full_{name}",
    recite,
    reader,
    config,
    mesh=base.mesh,
    seed=base.config["seed"],
    params=None,
    evaluate_reader=lambda _: {},
  )
  return train(phase, workdir, base.loop, {**base.metadata, "model": reader.model.to_dict()}).params


def run(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Train what is missing, measure every condition, and write `position_recall.json`, `.csv` and `.png`."""
  workdir = epath.Path(workdir)
  started = time.monotonic() - seconds_spent(workdir)
  base = experiment.base
  print(f"{count_params(base.model)['total']:,} parameters, workdir {workdir}", flush=True)
  with jax.set_mesh(base.mesh):
    policies = self_rag.train_phases(base, workdir)
    full = {name: train_baseline(experiment, name, workdir) for name in experiment.baselines}
    curves = measure_all(experiment, policies, full)
    report = summarize(experiment, curves, policies)
  report["tokens"] = tokens_of(workdir)
  report["wall_seconds"] = round(time.monotonic() - started, 1)
  write_json(workdir / "position_recall.json", report)
  write_bytes_atomic(workdir / "position_recall.csv", as_csv(report).encode())
  figures.accuracy_over_depth(workdir, report)
  print(table(report))
  return report


def measure_all(experiment: Experiment, policies: Mapping[str, Params], full: Mapping[str, Params]) -> dict[str, Curve]:
  """Measure every condition at every number of facts; names end in that number but for the first."""
  base, curves = experiment.base, {}
  params = list(policies.values())[-1]
  for n in experiment.evaluation.n_facts:
    task = Facts(base.config["data"]["variant"], n, base.config["data"]["seed"])
    suffix = "" if n == experiment.evaluation.n_facts[0] else f"_{n}"
    conditions: dict[str, Any] = {
      name: (base.reader, params, sight, changed) for name, (sight, changed) in CONDITIONS.items()
    }
    conditions |= {f"full_{name}": (experiment.baselines[name], full[name], "full", False) for name in full}
    for name, (reader, weights, sight, changed) in conditions.items():
      curve = curves[name + suffix] = measure(reader, weights, task, sight, experiment.evaluation, changed=changed)
      print(f"measured {name + suffix}: accuracy {curve.right.mean():.3f}", flush=True)
  return curves


def summarize(experiment: Experiment, curves: Mapping[str, Curve], policies: Mapping[str, Params]) -> dict[str, Any]:
  """Turn curves into the report: conditions, comparisons on the same questions, and what the phases changed."""
  base = experiment.base
  first, lengths = experiment.evaluation.n_facts[0], experiment.evaluation.n_facts
  report: dict[str, Any] = {
    "variant": base.data.task.variant,
    "seed": base.config["seed"],
    "chance": base.data.task.chance,
    "n_facts": list(lengths),
    "depths": {str(n): Facts(base.data.task.variant, n).depths(experiment.evaluation.depths).tolist() for n in lengths},
    "parameters": {"memory": count_params(base.model)["total"]},
    "conditions": {name: curve.report() for name, curve in curves.items()},
    "comparisons": {},
  }
  middle = slice(experiment.evaluation.depths // 4, experiment.evaluation.depths - experiment.evaluation.depths // 4)
  for name, reader in experiment.baselines.items():
    report["parameters"][f"full_{name}"] = count_params(reader.model)["total"]
  for n in lengths if experiment.baselines else ():
    suffix = "" if n == first else f"_{n}"
    best = max(
      (f"full_{name}" for name in experiment.baselines), key=lambda x: curves[x + suffix].right[:, middle].mean()
    )
    report["comparisons"][f"middle{suffix}"] = {
      "against": best,
      **compare(curves["memory" + suffix].right[:, middle], curves[best + suffix].right[:, middle]),
    }
  if {"memory", "position_recall"} <= policies.keys():
    before = measure(
      base.reader,
      policies["memory"],
      Facts(report["variant"], first, base.config["data"]["seed"]),
      "memory",
      experiment.evaluation,
    )
    report["phase_3_variance"] = variance_change(before, curves["memory"])
  return report


def tokens_of(workdir: epath.Path) -> dict[str, int]:
  """Add up the tokens that each phase was trained on."""
  tokens: dict[str, float] = {}
  for line in (workdir / "metrics.jsonl").read_text().splitlines():
    row = json.loads(line)
    tokens[row["phase"]] = tokens.get(row["phase"], 0) + row.get("tokens", 0)
  return {phase: int(n) for phase, n in tokens.items()}


def as_csv(report: Mapping[str, Any]) -> str:
  """One line a condition and depth."""
  out = io.StringIO()
  writer = csv.writer(out, lineterminator="\n")
  writer.writerow(["condition", "position", "accuracy", "low", "high", "recall", "recall_at_1", "n", "budget"])
  for name, curve in report["conditions"].items():
    _, _, length = name.rpartition("_")
    positions = report["depths"][length if length in report["depths"] else str(report["n_facts"][0])]
    for i, position in enumerate(positions):
      numbers = (curve["accuracy_by_depth"][i], *curve["interval_by_depth"][i], curve["recall_by_depth"][i])
      writer.writerow(
        [
          name,
          position,
          *(f"{x:.4f}" for x in (*numbers, curve["recall_at_1_by_depth"][i])),
          curve["n"],
          curve["budget"],
        ]
      )
  return out.getvalue()


def table(report: Mapping[str, Any]) -> str:
  """Format the report for a terminal."""
  lines = [f"{'':22} {'facts':>6} {'accuracy':>9} {'worst':>6} {'U':>7} {'range <':>8} {'chi2 p':>8} {'recall@1':>9}"]
  for name, c in report["conditions"].items():
    lines.append(
      f"{name:22} {c['budget']:6} {c['accuracy']:9.3f} {c['worst']:6.3f} {c['u']:+7.3f} {c['range_upper']:8.3f} "
      f"{c['chi2_p']:8.2g} {np.mean(c['recall_at_1_by_depth']):9.3f}"
    )
  for name, c in report["comparisons"].items():
    (low, high), p = c["interval"], c["mcnemar_p"]
    lines.append(
      f"{name}: memory - {c['against']} = {c['difference']:+.3f} [{low:+.3f}, {high:+.3f}], McNemar p {p:.2g}"
    )
  lines.append(f"chance {report['chance']:.3f}, {report['wall_seconds']:.0f} s")
  return "\n".join(lines)

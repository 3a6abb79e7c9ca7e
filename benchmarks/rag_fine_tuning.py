"""What RAG fine-tuning changes, and whether the documents did it: paired differences between runs of configs/rag.py.

  python benchmarks/rag_fine_tuning.py --run=FOLDER [--control=FOLDER ...]

Prints F1 and exact match of questions with an answer before and after the training of `--run`, and the share of the
questions without an answer that were not answered. Every `--control` is a run that was trained otherwise, such as
without documents, or not at all (`config.rag.steps=0`). All are asked beside the retrieved documents; the model before,
unless the run has left it out (`config.evaluation.before`), by the better of two prompts, chosen on these questions,
which is in its favour. Intervals are paired over questions, 95 %.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from selfrag_jax.experiments.rag import PHASES
from selfrag_jax.metrics.statistics import bootstrap_difference, bootstrap_interval
from selfrag_jax.storage.arrays import read_npz

RUN = flags.DEFINE_string("run", None, "the workdir of a run", required=True)
CONTROLS = flags.DEFINE_multi_string("control", [], "workdirs of runs that were trained otherwise")
TUNED, SHOWN = "rag", "retrieved"  # the phase and the condition
PROMPTS = (SHOWN, "plain")  # of the model before, the better counts


def read_run(folder: str) -> tuple[dict, Mapping[str, np.ndarray]]:
  """Return the report and the scores of a run. Raises FileNotFoundError without them."""
  return json.loads((Path(folder) / "rag.json").read_text()), read_npz(Path(folder) / "rag.npz")


def best_prompt(scores: Mapping[str, np.ndarray], policy: str) -> str:
  """Return the condition with documents under which a policy has the highest F1."""
  names = [name for name in PROMPTS if f"{policy}.{name}.soft" in scores]
  return max(names, key=lambda name: of_answers(scores, policy, name, "soft").mean())


def of_answers(scores: Mapping[str, np.ndarray], policy: str, condition: str, field: str) -> np.ndarray:
  """Return a score of each question with an answer."""
  return scores[f"{policy}.{condition}.{field}"][scores[f"{policy}.{condition}.has_answer"]]


def print_row(name: str, scores: Mapping[str, np.ndarray], policy: str, condition: str) -> None:
  f1, em = (of_answers(scores, policy, condition, field) for field in ("soft", "exact"))
  low, high = bootstrap_interval(f1)
  silent = scores[f"{policy}.{condition}.exact"][~scores[f"{policy}.{condition}.has_answer"]]
  not_answered = f"{silent.mean():.3f}" if len(silent) else ""
  print(f"{name:<56}{f1.mean():.3f}  [{low:.3f}, {high:.3f}]   {em.mean():.3f}   {not_answered}")


def print_difference(name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
  low, high = bootstrap_difference(ours, theirs)
  print(f"{name:<56}{(ours - theirs).mean():+.3f} [{low:+.3f}, {high:+.3f}]")


def asked_of(folder: str) -> dict[str, Any]:
  """Return the settings that choose the questions and their passages."""
  config = json.loads((Path(folder) / "config.json").read_text())
  chosen = ("name", "data_set", "split", "retriever", "knowledge_base", "top_k", "parts", "seed")
  data = {"knowledge_base": "", **config["data"]}
  if data["name"] == "articles" and not data["knowledge_base"]:
    data["retriever"] = data["retriever"] or "bm25"
  path = data["path"] if data["name"] == "conversations" else None  # whoever keeps a report may leave out the others
  return {name: data.get(name) for name in chosen} | {"path": path, "final": config["evaluation"]["final"]}


def main(argv: list[str]) -> None:
  """Print both tables. Raises ValueError for runs with other questions, and if there is nothing to compare."""
  if argv[1:]:
    raise app.UsageError(f"unknown arguments {argv[1:]}")
  report, scores = read_run(RUN.value)
  first = next(name for name in ("base", *PHASES) if name in report["em"])
  if first == TUNED and not CONTROLS.value:
    raise ValueError(f"{RUN.value} has no scores of the model before: set config.evaluation.before, or give a control")
  before = best_prompt(scores, first)
  print(f"{report['n']} questions, {report['with_answer']} of them with an answer\n")
  print(f"{'':<56}F1     95 % interval     EM      not answered, of those without an answer")
  if first != TUNED:
    print_row(f"before, {before}", scores, first, before)
  print_row("after", scores, TUNED, SHOWN)
  controls = {}
  for folder in CONTROLS.value:
    other, found = read_run(folder)
    if asked_of(folder) != asked_of(RUN.value):
      raise ValueError(f"{folder} was asked other questions than {RUN.value}")
    if TUNED in other["em"]:
      name, policy, condition = f"{Path(folder).name}, trained on documents: {other['documents']}", TUNED, SHOWN
    else:
      policy = next(iter(other["em"]))
      condition = best_prompt(found, policy)
      name = f"{Path(folder).name}, not trained, {condition}"
    print_row(name, found, policy, condition)
    controls[name] = of_answers(found, policy, condition, "soft")
  print("\npaired differences of F1")
  tuned = of_answers(scores, TUNED, SHOWN, "soft")
  if first != TUNED:
    print_difference("after - before", tuned, of_answers(scores, first, before, "soft"))
  for name, theirs in controls.items():
    print_difference(f"after - {name}", tuned, theirs)


if __name__ == "__main__":
  app.run(main)

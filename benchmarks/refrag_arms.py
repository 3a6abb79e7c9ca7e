"""REFRAG on real questions: every arm of a reinforcement beside single searches with as many documents.

  python benchmarks/refrag_arms.py --run=NAME:FOLDER [--run=NAME:FOLDER,FOLDER ...]

Every `--run` is a finished run of `configs/refrag.py:smollm2_135m`, or the runs of its folds; all were asked the same
questions. The peers are asked those questions alone, and find as many documents as a policy may see: one search of the
rollouts' own memory, BM25, all-MiniLM-L6-v2, both fused, and a second search of BM25 and of both by a rule. A question
counts as found if all of its gold passages are. Prints recall, exact match and F1 of every arm, with 95 % intervals;
paired differences to the one search of the memory; and, of exact match and F1, the differences between after and before
the reinforcement with the smallest effect that these questions would show with a power of .8.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from selfrag_jax.experiments import refrag
from selfrag_jax.mesh import configure_xla
from selfrag_jax.metrics.statistics import bootstrap_difference, bootstrap_interval
from selfrag_jax.retrieval.bm25 import BM25Retriever
from selfrag_jax.retrieval.dense import DenseRetriever
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.hybrid import HybridRetriever
from selfrag_jax.retrieval.multi_hop import MultiHopRetriever
from selfrag_jax.storage.arrays import read_npz

RUNS = flags.DEFINE_multi_string("run", [], "NAME:FOLDER, or NAME:FOLDER,FOLDER of several folds", required=True)
BEFORE, AFTER = "sft", "refrag"  # the report's conditions
POWER = 1.96 + 0.84  # standard errors between no effect and one that is seen with a probability of .8
MEMORY = "one search of the memory"


class Arm(dict[str, np.ndarray]):
  """The scores of each question: `all_gold`, and `exact_match` and `f1` where there is an answer."""


def read_arms(name: str, folders: Iterable[str]) -> dict[str, Arm]:
  """Return a run's one search of its memory and its arms before and after reinforcement; the folds are joined."""
  reports = [read_npz(Path(folder) / "report.npz") for folder in folders]
  fields = ("all_gold", "exact_match", "f1")
  of = lambda condition: Arm({f: np.concatenate([r[f"{condition}.{f}"] for r in reports]) for f in fields})
  # every test question was searched for, but perhaps not every one was rolled out
  once = [report["memory_question.all_gold"][: len(report[f"{AFTER}.all_gold"])] for report in reports]
  return {
    MEMORY: Arm(all_gold=np.concatenate(once)),
    f"{name}: before": of(BEFORE),
    f"{name}: after": of(AFTER),
  }


def asked(config: Mapping[str, Any]) -> dict[str, Any]:
  """Return the settings that choose the questions, the documents and the memory."""
  bounds = {key: config["rollout"][key] for key in ("max_hops", "documents_per_hop")}
  data = {key: value for key, value in config["data"].items() if key not in ("cloze", "bridge", "fold")}
  return {"data": data, "bounds": bounds, "memory": config["memory"], "final": config["evaluation"]["final"]}


def peers(config: dict[str, Any]) -> dict[str, np.ndarray]:
  """Return whether each single search, and each by a rule, finds all gold passages of the test questions of a fold."""
  experiment = refrag.build(config)
  task, budget = experiment.task, experiment.document_budget
  indices = np.arange(min(task.size("test") or 0, experiment.evaluation.final))
  batch, questions = task.batch("test", indices), task.texts("test", indices)
  gold = [set(row[row >= 0].tolist()) for row in batch.gold]
  all_of = lambda found: np.array([g <= set(f) for g, f in zip(gold, found, strict=True)], float)
  documents = [Document(str(slot), **document) for slot, document in enumerate(task.documents)]
  bm25, dense = BM25Retriever(), DenseRetriever()
  for retriever in (bm25, dense):
    retriever.add_documents(documents)
  fused = HybridRetriever([bm25, dense])
  retrievers = {
    "BM25": bm25,
    "MiniLM": dense,
    "both fused": fused,
    "BM25, second query by rule": MultiHopRetriever(bm25),
    "both fused, second query by rule": MultiHopRetriever(fused),
  }
  slots = {
    name: [[int(d.id) for d in row] for row in r.retrieve_batch(questions, budget)] for name, r in retrievers.items()
  }
  return {name: all_of(found) for name, found in slots.items()}


def row(name: str, scores: Mapping[str, np.ndarray], first: np.ndarray) -> str:
  """Format the recall of an arm, its difference to the first one's, and the scores of its answers."""
  found = scores["all_gold"]
  line = "{:36}{:.3f} [{:.3f}, {:.3f}]".format(name, found.mean(), *bootstrap_interval(found))
  line += "  {:+.3f} [{:+.3f}, {:+.3f}]".format((found - first).mean(), *bootstrap_difference(found, first))
  for field in ("exact_match", "f1"):
    if field in scores:
      line += "  {:.3f} [{:.3f}, {:.3f}]".format(scores[field].mean(), *bootstrap_interval(scores[field]))
  return line


def gain(name: str, before: Arm, after: Arm) -> str:
  """Format the paired gains of the answers, each with the smallest effect that would have been seen."""
  parts = []
  for field in ("exact_match", "f1"):
    gained = after[field] - before[field]
    smallest = POWER * gained.std(ddof=1) / len(gained) ** 0.5
    interval = bootstrap_difference(after[field], before[field])
    parts.append("{} {:+.3f} [{:+.3f}, {:+.3f}], smallest {:.3f}".format(field, gained.mean(), *interval, smallest))
  return f"{name}: {'; '.join(parts)}"


def main(argv: list[str]) -> None:
  """Print the tables. Raises ValueError for runs that were asked other questions."""
  if argv[1:]:
    raise app.UsageError(f"unknown arguments {argv[1:]}")
  logging.set_verbosity(logging.WARNING)
  configure_xla()
  runs = {name: folders.split(",") for name, _, folders in (run.partition(":") for run in RUNS.value)}
  configs = {name: [json.loads((Path(f) / "config.json").read_text()) for f in fs] for name, fs in runs.items()}
  folds = {name: [config["data"]["fold"] for config in found] for name, found in configs.items()}
  [first, *_] = configs
  for name, found in configs.items():
    if folds[name] != folds[first] or any(asked(config) != asked(configs[first][0]) for config in found):
      raise ValueError(f"the run {name} was asked other questions than {first}, or has other bounds or folds")
  by_fold = [peers(config) for config in configs[first]]
  table: dict[str, Arm] = {name: Arm(all_gold=np.concatenate([fold[name] for fold in by_fold])) for name in by_fold[0]}
  arms = {name: read_arms(name, folders) for name, folders in runs.items()}
  for each in arms.values():
    table |= each
  reference = table[MEMORY]["all_gold"]
  if any((each[MEMORY]["all_gold"] != reference).any() for each in arms.values()):
    raise ValueError("the runs searched different memories: compare runs of one encoder")
  print(f"\n{len(reference)} questions, folds {folds[first]}\n")
  print(f"{'':36}all gold found        to the one search        exact match           F1")
  for name, scores in table.items():
    print(row(name, scores, reference))
  print("\nafter - before the reinforcement, and the smallest effect that would be seen with a power of .8")
  for name, each in arms.items():
    print(gain(name, each[f"{name}: before"], each[f"{name}: after"]))


if __name__ == "__main__":
  app.run(main)

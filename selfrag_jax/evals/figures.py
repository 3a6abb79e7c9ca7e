"""Figures of the experiments. matplotlib is imported only when one is drawn."""

import io
import itertools
import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from selfrag_jax.files import write_bytes_atomic

REFERENCES = {
  "oracle": ("#2a9d3a", "oracle documents"),
  "sft_gold": ("#8856a7", "gold demonstrations"),
  "bm25": ("#e6ab02", "its queries to BM25"),
  "sft": ("#d95f02", "before reinforcement"),
  "one_search": ("#7f7f7f", "one search"),
  "closed_book": ("#bdbdbd", "closed book"),
  "base": ("#a6761d", "before any training"),
}


def read_metrics(workdir: epath.PathLike, phase: str, name: str) -> tuple[list[int], list[float]]:
  """Return the steps and values of one metric of a phase from `metrics.jsonl`."""
  rows = [json.loads(line) for line in (epath.Path(workdir) / "metrics.jsonl").read_text().splitlines()]
  pairs = [(row["step"], row[name]) for row in rows if row["phase"] == phase and name in row]
  return [step for step, _ in pairs], [value for _, value in pairs]


def em_over_steps(workdir: epath.PathLike, report: Mapping[str, Any]) -> None:
  """Draw `report.png`: exact match over the steps of reinforcement, with the reference lines of the report."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
  sampled = read_metrics(workdir, "rl", "exact_match")
  steps, greedy = read_metrics(workdir, "rl", "eval/exact_match")
  _, before = read_metrics(workdir, "sft", "eval/exact_match")  # of the same questions
  axes.plot(*sampled, color="#9ecae1", linewidth=1, label="rollouts in training (sampled)")
  axes.plot(
    [0, *steps],
    [before[-1], *greedy],
    color="#08519c",
    linewidth=2,
    marker="o",
    markersize=3,
    label="validation questions (greedy)",
  )
  last = max(sampled[0], default=1)
  for name, (color, label) in REFERENCES.items():
    if name not in report["em"]:
      continue
    value = report["em"][name]
    axes.axhline(value, color=color, linestyle="--", linewidth=1.2, label=f"{label} ({value:.2f})")
  axes.axhline(report["chance"], color="black", linestyle=":", linewidth=1, label=f"chance ({report['chance']:.2f})")
  low, high = report["em_interval"]["refrag"]
  axes.errorbar(
    [last], [report["em"]["refrag"]], [[report["em"]["refrag"] - low], [high - report["em"]["refrag"]]],
    color="#08519c", capsize=4, marker="D", label=f"REFRAG, n = {report['n']} ({report['em']['refrag']:.2f})",
  )  # fmt: skip
  axes.set(xlabel="reinforcement step", ylabel="exact match", ylim=(-0.02, 1.03), xlim=(0, last * 1.02))
  runs = [(kind, len(list(run))) for kind, run in itertools.groupby(report["block_pattern"])]
  pattern = " ".join(kind if n == 1 else f"{n}{kind}" for kind, n in runs)
  axes.set_title(f"{report['task']}, blocks {pattern}, {report['parameters']:,} parameters, seed {report['seed']}")
  axes.grid(alpha=0.25)
  axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
  png = io.BytesIO()
  figure.savefig(png, format="png", dpi=150)
  plt.close(figure)
  write_bytes_atomic(epath.Path(workdir) / "report.png", png.getvalue())

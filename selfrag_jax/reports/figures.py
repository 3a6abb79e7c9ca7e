"""Figures of the experiments. matplotlib is imported only when a figure is drawn."""

import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from selfrag_jax.storage.atomic import write_bytes_atomic
from selfrag_jax.train.telemetry import read_rows

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
  pairs = [(row["step"], row[name]) for row in read_rows(workdir) if row["phase"] == phase and name in row]
  return [step for step, _ in pairs], [value for _, value in pairs]


def em_over_steps(workdir: epath.PathLike, report: Mapping[str, Any]) -> None:
  """Draw `report.png`: exact match over the steps of reinforcement, with the reference lines of the report."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
  sampled = read_metrics(workdir, "rl", "exact_match")
  steps, greedy = read_metrics(workdir, "rl", "eval/exact_match")
  _, before = read_metrics(workdir, "sft", "eval/exact_match")  # on the same questions
  axes.plot(*sampled, color="#9ecae1", linewidth=1, label="rollouts in training (sampled)")
  axes.plot(
    [*([0] if before else []), *steps],
    [*before[-1:], *greedy],
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
  _publish(figure, epath.Path(workdir) / "report.png")


# accuracy at relative depths 0, 1/4, 1/2, 3/4, 1, in percent (Liu et al. 2023, arXiv 2307.03172)
PUBLISHED = {
  "GPT-3.5-Turbo, 20 documents": (75.8, 57.2, 53.8, 55.4, 63.2),
  "Claude-1.3, 20 documents": (59.9, 55.9, 56.8, 57.2, 60.1),
  "Llama-2-70B-chat, 20 documents": (56.8, 53.3, 54.1, 59.7, 69.5),
  "MPT-30B-Instruct, 140 keys": (100.0, 93.6, 88.6, 80.4, 96.2),
}
CONDITIONS = {
  "memory": ("#08519c", "memory"),
  "oracle": ("#2a9d3a", "the needed fact alone"),
  "head_tail": ("#d95f02", "first and last facts"),
  "tail": ("#e6ab02", "last facts"),
  "random": ("#7f7f7f", "random facts"),
  "full_hybrid": ("#8856a7", "full context, hybrid"),
  "full_transformer": ("#c51b8a", "full context, attention"),
  "full_mamba": ("#1b9e77", "full context, Mamba-2"),
}


def accuracy_over_depth(workdir: epath.PathLike, report: Mapping[str, Any]) -> None:
  """Draw `position_recall.png`: accuracy over depth with 95 % bands for each length, and recall of the retriever."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  lengths = report["n_facts"]
  figure, panels = plt.subplots(
    1, len(lengths) + 1, figsize=(4.6 * (len(lengths) + 1), 4.6), sharey=True, layout="constrained"
  )
  for panel, n in zip(panels, lengths, strict=False):
    suffix = "" if n == lengths[0] else f"_{n}"
    depth = [position / (n - 1) for position in report["depths"][str(n)]]
    if n == lengths[0]:
      for i, (name, curve) in enumerate(PUBLISHED.items()):
        panel.plot(
          [0, 0.25, 0.5, 0.75, 1], [x / 100 for x in curve], color="#b0b0b0", linewidth=0.9,
          linestyle=("-", "--", ":", "-.")[i], label=f"{name} (published)",
        )  # fmt: skip
    for name, (color, label) in CONDITIONS.items():
      if (curve := report["conditions"].get(name + suffix)) is None:
        continue
      low, high = zip(*curve["interval_by_depth"], strict=True)
      panel.fill_between(depth, low, high, color=color, alpha=0.15, linewidth=0)
      panel.plot(
        depth, curve["accuracy_by_depth"], color=color, marker="o", markersize=2.5,
        **_weight(name), label=None if suffix else _seen(name, label, curve),
      )  # fmt: skip
    panel.axhline(
      report["chance"], color="black", linestyle=":", linewidth=0.8, label="chance" if n == lengths[0] else None
    )
    panel.set(title=f"{n} facts", xlabel="relative depth of the needed fact", ylim=(-0.02, 1.02), xlim=(0, 1))
    panel.grid(alpha=0.25)
  panels[0].set_ylabel("accuracy")
  retriever = panels[-1]
  for i, n in enumerate(lengths):
    curve = report["conditions"]["memory" + ("" if n == lengths[0] else f"_{n}")]
    depth = [position / (n - 1) for position in report["depths"][str(n)]]
    for name, key, style in (
      (f"recall@{curve['budget']}", "recall_by_depth", "-"),
      ("recall@1", "recall_at_1_by_depth", "--"),
    ):
      retriever.plot(
        depth, curve[key], style, color=("#08519c", "#d95f02", "#2a9d3a")[i % 3], label=f"{name}, {n} facts"
      )
  retriever.set(title="retriever", xlabel="relative depth of the needed fact", xlim=(0, 1))
  retriever.grid(alpha=0.25)
  retriever.legend(fontsize=8, loc="lower left")
  figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
  figure.suptitle(
    f"Recall by position: {report['variant']}, seed {report['seed']}, n = {report['conditions']['memory']['n']} a depth"
  )
  _publish(figure, epath.Path(workdir) / "position_recall.png")


def accuracy_over_depth_of_runs(path: epath.PathLike, reports: Sequence[Mapping[str, Any]]) -> None:
  """Draw the median accuracy over depth of several runs of a variant, and the range between the lowest and highest."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  lengths = reports[0]["n_facts"]
  figure, panels = plt.subplots(
    1, len(lengths), figsize=(4.8 * len(lengths), 4.6), sharey=True, squeeze=False, layout="constrained"
  )
  for panel, n in zip(panels[0], lengths, strict=True):
    depth = [position / (n - 1) for position in reports[0]["depths"][str(n)]]
    for name, (color, label) in CONDITIONS.items():
      key = name if n == lengths[0] else f"{name}_{n}"
      curves = [report["conditions"][key] for report in reports if key in report["conditions"]]
      if not curves:
        continue
      each = np.array([curve["accuracy_by_depth"] for curve in curves])
      panel.fill_between(depth, each.min(axis=0), each.max(axis=0), color=color, alpha=0.2, linewidth=0)
      runs = f"{len(curves)} run{'s' * (len(curves) > 1)}"
      panel.plot(
        depth, np.median(each, axis=0), color=color, marker="o", markersize=2.5, **_weight(name),
        label=f"{_seen(name, label, curves[0])}, {runs}",
      )  # fmt: skip
    panel.axhline(reports[0]["chance"], color="black", linestyle=":", linewidth=0.8, label="chance")
    panel.set(title=f"{n} facts", xlabel="relative depth of the needed fact", ylim=(-0.02, 1.02), xlim=(0, 1))
    panel.grid(alpha=0.25)
  panels[0][0].set_ylabel("accuracy: median and range of the runs")
  entries = panels[0][0].get_legend_handles_labels()
  figure.legend(*entries, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
  figure.suptitle(f"Recall by position: {reports[0]['variant']}, seeds {_ranges([r['seed'] for r in reports])}")
  _publish(figure, epath.Path(path))


def _seen(name: str, label: str, curve: Mapping[str, Any]) -> str:
  """Return the label of a condition, with the number of facts that it sees where that number is a budget."""
  return label if name == "oracle" or name.startswith("full_") else f"{label} ({curve['budget']} facts)"


def _weight(name: str) -> dict[str, Any]:
  """Return the line style of a condition: the memory is drawn thicker and above the others."""
  return {"linewidth": 2, "zorder": 3} if name == "memory" else {"linewidth": 1.2}


def _ranges(numbers: Sequence[int]) -> str:
  """Write numbers as ranges: 10–12, 15."""
  written: list[list[int]] = []
  for number in sorted(numbers):
    if written and number == written[-1][-1] + 1:
      written[-1] = [written[-1][0], number]
    else:
      written.append([number])
  return ", ".join("–".join(map(str, ends)) for ends in written)


def documents_over_depth(workdir: epath.PathLike, report: Mapping[str, Any]) -> None:
  """Draw `documents.png`: accuracy over the place of the gold document, one panel per file."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  files = report["files"]
  figure, panels = plt.subplots(
    1, len(files), figsize=(6.4 * len(files), 5.6), sharey=True, squeeze=False, layout="constrained"
  )
  for panel, (name, curves) in zip(panels[0], files.items(), strict=True):
    for i, (published, curve) in enumerate(PUBLISHED.items()):
      if ("keys" in published) == ("kv" in name):
        style = {"color": "#b0b0b0", "linewidth": 0.9, "linestyle": ("-", "--", ":", "-.")[i]}
        panel.plot([0, 0.25, 0.5, 0.75, 1], [x / 100 for x in curve], label=f"{published} (published)", **style)
    numbers = sorted(int(key.removeprefix("full_")) for key in curves if key.startswith("full_"))
    for i, n in enumerate(numbers):
      key, color = f"full_{n}", ("#6baed6", "#2171b5", "#08306b")[i % 3]
      depth = [place / max(n - 1, 1) for place in curves[key]["positions"]]
      low, high = zip(*curves[key]["interval_by_depth"], strict=True)
      panel.fill_between(depth, low, high, color=color, alpha=0.12, linewidth=0)
      panel.plot(depth, curves[key]["accuracy_by_depth"], color=color, marker="o", label=f"{n} documents")
      if (memory := curves.get(f"memory_{n}")) is not None:
        panel.axhline(memory["accuracy_by_depth"][0], color=color, linestyle="--", label=f"memory of {n} documents")
    for key, color, label in (("gold", "#2a9d3a", "that document alone"), ("closed_book", "black", "no document")):
      if key in curves:
        panel.axhline(curves[key]["accuracy_by_depth"][0], color=color, linestyle=":", label=label)
    panel.set(title=f"{name}, n = {curves[f'full_{numbers[0]}']['n']}", ylim=(-0.02, 1.02), xlim=(0, 1))
    panel.set_xlabel("relative place of the document that answers")
    panel.grid(alpha=0.25)
    panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False)
  panels[0][0].set_ylabel("accuracy")
  figure.suptitle(f"Recall by position on real documents: {report['config']['model']}")
  _publish(figure, epath.Path(workdir) / "documents.png")


def retrieval_bars(path: epath.PathLike, report: Mapping[str, Any], names: Sequence[str]) -> None:
  """Draw nDCG@10 of each retriever with its interval, and its time per query, into a file."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, (left, right) = plt.subplots(
    1, 2, figsize=(9, 1.6 + 0.45 * len(names)), width_ratios=(3, 2), sharey=True, layout="constrained"
  )
  rows = range(len(names))
  means = [report[f"{name}.ndcg@10"] for name in names]
  low, high = zip(*(report[f"{name}.ndcg@10_interval"] for name in names), strict=True)
  errors = [[m - l for m, l in zip(means, low, strict=True)], [h - m for m, h in zip(means, high, strict=True)]]
  left.barh(rows, means, xerr=errors, color="#6baed6", ecolor="#08306b", capsize=3, height=0.6)
  for row, mean, top in zip(rows, means, high, strict=True):
    left.text(top + 0.01, row, f"{mean:.3f}", va="center", fontsize=9)
  left.set(yticks=rows, yticklabels=names, xlim=(0, min(1.12, max(high) + 0.12)), xlabel="nDCG@10, 95 % interval")
  left.invert_yaxis()
  times = [report[f"{name}.ms_per_query"] for name in names]
  right.barh(rows, times, color="#bdbdbd", height=0.6)
  for row, time in zip(rows, times, strict=True):
    right.text(time * 1.1, row, f"{time:.2g}", va="center", fontsize=9)
  right.set(xscale="log", xlabel="ms a query", xlim=(min(times) / 3, max(times) * 4))
  counts = {"documents": "documents", "queries": "queries", "test.queries": "test queries"}
  figure.suptitle(", ".join(f"{report[key]:,} {what}" for key, what in counts.items() if key in report))
  _publish(figure, epath.Path(path))


def short(name: str) -> str:
  """Return the name of a report's number as words, without the section of the number."""
  return name.split(".", 1)[-1].replace(".", " ").replace("_", " ")


def runs_of_groups(workdir: epath.PathLike, summary: Mapping[str, Any]) -> None:
  """Draw `sweep.png`: the shown numbers of each run of each group, and their medians."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  rows = [(group, name, found["values"][name]) for group, found in summary.items() for name in found["shown"]]
  figure, axes = plt.subplots(figsize=(8, 1.2 + 0.24 * max(len(rows), 1)), layout="constrained")
  before = None
  for y, (group, _, value) in enumerate(rows):
    each = [number for _, number in value["of_runs"]]
    axes.scatter(each, [y] * len(each), s=22, color="#08519c", alpha=0.45, linewidths=0)
    axes.scatter(value["median"], y, s=70, marker="|", color="black")
    if before not in (None, group):
      axes.axhline(y - 0.5, color="black", linewidth=0.6)
    before = group
  labels = [f"{group}: {short(name)}" for group, name, _ in rows]
  axes.set_yticks(range(len(rows)), labels, fontsize=8)
  axes.set(xlim=(-0.02, 1.02), ylim=(len(rows) - 0.5, -0.5))
  axes.set_title("each run a dot, the median a line", fontsize=9, loc="left")
  axes.grid(alpha=0.25, axis="x")
  _publish(figure, epath.Path(workdir) / "sweep.png")


def _publish(figure: Any, path: epath.Path) -> None:
  import matplotlib.pyplot as plt

  png = io.BytesIO()
  figure.savefig(png, format="png", dpi=150)
  plt.close(figure)
  write_bytes_atomic(path, png.getvalue())

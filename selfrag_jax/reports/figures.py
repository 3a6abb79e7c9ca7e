"""Figures of the experiments. matplotlib is imported only when a figure is drawn."""

import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from selfrag_jax.reports.files import write_file
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
  figure = new_figure(8, 4.5)
  axes = figure.subplots()
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
    if (value := report["em"].get(name)) is not None:
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
  write_file(epath.Path(workdir) / "report.png", png_of(figure))


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
  lengths = report["n_facts"]
  figure = new_figure(4.6 * (len(lengths) + 1), 4.6)
  *panels, retriever = figure.subplots(1, len(lengths) + 1, sharey=True)
  _draw_published(panels[0], PUBLISHED)
  _draw_conditions(panels, [report], alpha=0.15)
  panels[0].set_ylabel("accuracy")
  for i, n in enumerate(lengths):
    curve = report["conditions"][_condition("memory", n, lengths)]
    for name, key, style in (
      (f"recall@{curve['budget']}", "recall_by_depth", "-"),
      ("recall@1", "recall_at_1_by_depth", "--"),
    ):
      color = ("#08519c", "#d95f02", "#2a9d3a")[i % 3]
      retriever.plot(_depths(report, n), curve[key], style, color=color, label=f"{name}, {n} facts")
  retriever.set(title="retriever", xlabel="relative depth of the needed fact", xlim=(0, 1))
  retriever.grid(alpha=0.25)
  retriever.legend(fontsize=8, loc="lower left")
  figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
  figure.suptitle(
    f"Recall by position: {report['variant']}, seed {report['seed']}, n = {report['conditions']['memory']['n']} a depth"
  )
  write_file(epath.Path(workdir) / "position_recall.png", png_of(figure))


def accuracy_over_depth_of_runs(path: epath.PathLike, reports: Sequence[Mapping[str, Any]]) -> None:
  """Draw the median accuracy over depth of several runs of a variant, and the range between the lowest and highest."""
  lengths = reports[0]["n_facts"]
  figure = new_figure(4.8 * len(lengths), 4.6)
  panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
  _draw_conditions(panels, reports, alpha=0.2, of_runs=True)
  panels[0].set_ylabel("accuracy: median and range of the runs")
  figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
  figure.suptitle(f"Recall by position: {reports[0]['variant']}, seeds {_ranges([r['seed'] for r in reports])}")
  write_file(path, png_of(figure))


def _draw_conditions(
  panels: Sequence[Any], reports: Sequence[Mapping[str, Any]], *, alpha: float, of_runs: bool = False
) -> None:
  """Draw the accuracy of each condition over depth, one panel per length, each curve in a band.

  The band is the range of the runs, or the 95 % interval of the only report.
  """
  lengths = reports[0]["n_facts"]
  for panel, n in zip(panels, lengths, strict=True):
    depth = _depths(reports[0], n)
    for name, (color, label) in CONDITIONS.items():
      key = _condition(name, n, lengths)
      curves = [report["conditions"][key] for report in reports if key in report["conditions"]]
      if not curves:
        continue
      each = np.array([curve["accuracy_by_depth"] for curve in curves])
      low, high = (each.min(axis=0), each.max(axis=0)) if of_runs else np.transpose(curves[0]["interval_by_depth"])
      runs = f", {len(curves)} run{'s' * (len(curves) > 1)}" if of_runs else ""
      panel.fill_between(depth, low, high, color=color, alpha=alpha, linewidth=0)
      panel.plot(
        depth, np.median(each, axis=0), color=color, marker="o", markersize=2.5, **_weight(name),
        label=_seen(name, label, curves[0]) + runs,
      )  # fmt: skip
    panel.axhline(reports[0]["chance"], color="black", linestyle=":", linewidth=0.8, label="chance")
    panel.set(title=f"{n} facts", xlabel="relative depth of the needed fact", ylim=(-0.02, 1.02), xlim=(0, 1))
    panel.grid(alpha=0.25)


def _draw_published(panel: Any, names: Iterable[str]) -> None:
  for name, linestyle in zip(PUBLISHED, ("-", "--", ":", "-."), strict=True):
    if name in names:
      shares = [percent / 100 for percent in PUBLISHED[name]]
      label = f"{name} (published)"
      panel.plot([0, 0.25, 0.5, 0.75, 1], shares, color="#b0b0b0", linewidth=0.9, linestyle=linestyle, label=label)


def _depths(report: Mapping[str, Any], n: int) -> list[float]:
  return [position / (n - 1) for position in report["depths"][str(n)]]


def _condition(name: str, n: int, lengths: Sequence[int]) -> str:
  """Return the name that a condition with n facts has in a report: at the first length, the name alone."""
  return name if n == lengths[0] else f"{name}_{n}"


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
  files = report["files"]
  figure = new_figure(6.4 * len(files), 5.6)
  panels = figure.subplots(1, len(files), sharey=True, squeeze=False)[0]
  for panel, (name, curves) in zip(panels, files.items(), strict=True):
    _draw_published(panel, [published for published in PUBLISHED if ("keys" in published) == ("kv" in name)])
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
  panels[0].set_ylabel("accuracy")
  figure.suptitle(f"Recall by position on real documents: {report['config']['model']}")
  write_file(epath.Path(workdir) / "documents.png", png_of(figure))


def retrieval_bars(path: epath.PathLike, report: Mapping[str, Any], names: Sequence[str]) -> None:
  """Draw nDCG@10 of each retriever with its interval, and its time per query, into a file."""
  figure = new_figure(9, 1.6 + 0.45 * len(names))
  left, right = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
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
  write_file(path, png_of(figure))


def answer_bars(path: epath.PathLike, report: Mapping[str, Any]) -> None:
  """Draw EM and F1 of each arm with their intervals, and the share of questions whose passages were all shown."""
  arms = report["arms"]
  figure = new_figure(9, 1.6 + 0.5 * len(arms))
  left, right = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
  rows = np.arange(len(arms))
  for place, (key, label, color) in enumerate((("em", "EM", "#08519c"), ("f1", "F1", "#6baed6"))):
    means = np.array([found[key] for found in arms.values()])
    low, high = np.array([found[f"{key}_interval"] for found in arms.values()]).T
    errors = np.maximum([means - low, high - means], 0)
    left.barh(
      rows + 0.38 * (place - 0.5), means, 0.36, xerr=errors, color=color, ecolor="black", capsize=2, label=label
    )
  left.set(yticks=rows, yticklabels=list(arms), xlim=(0, 1), xlabel="score, 95 % interval")
  left.legend(fontsize=8)
  left.invert_yaxis()
  right.barh(rows, [found.get("all_gold", 0.0) for found in arms.values()], 0.5, color="#bdbdbd")
  right.set(xlim=(0, 1), xlabel="questions whose gold passages were all shown")
  figure.suptitle(f"{report['with_answer']:,} questions with an answer, of {report['questions']:,}")
  write_file(path, png_of(figure))


def short(name: str) -> str:
  """Return the name of a report's number as words, without the section that all numbers beside it have."""
  return name.removeprefix("conditions.").removeprefix("em.").replace(".", " ").replace("_", " ")


def runs_of_groups(workdir: epath.PathLike, summary: Mapping[str, Any]) -> None:
  """Draw `sweep.png`: the shown numbers of each run of each group, and their medians."""
  rows = [(group, name, found["values"][name]) for group, found in summary.items() for name in found["shown"]]
  figure = new_figure(8, 1.2 + 0.24 * max(len(rows), 1))
  axes = figure.subplots()
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
  write_file(epath.Path(workdir) / "sweep.png", png_of(figure))


def new_figure(width: float, height: float) -> Any:
  """Make an empty figure, in inches. It has no window, so it needs no screen and nothing must be closed."""
  from matplotlib.figure import Figure

  return Figure(figsize=(width, height), layout="constrained")


def png_of(figure: Any, dpi: int = 150) -> bytes:
  """Return a figure as a PNG file."""
  png = io.BytesIO()
  figure.savefig(png, format="png", dpi=dpi)
  return png.getvalue()

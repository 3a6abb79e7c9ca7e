"""The report of RAG fine-tuning: the scores of answers, by the model that was asked and the documents it was shown."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from selfrag_jax.metrics.statistics import bootstrap_interval, wilson_interval

CONDITIONS = {
  "retrieved": "the documents that were retrieved",
  "gold": "the passage that answers alone",
  "plain": "the retrieved documents as text in the question",
  "edited": "retrieved documents with changed facts: the share that follows them",
  "missing": 'retrieved documents without the one that answers: the share of "I don\'t know"',
  "none": "no documents",
  "shuffled": "the documents of another question",
}


class Scores(NamedTuple):
  """Exact match and softer score of each question [N], and whether it has an answer, bool [N].

  `dropped` counts the documents of each prompt that did not fit into the model's context, int [N].
  """

  exact: np.ndarray
  soft: np.ndarray
  has_answer: np.ndarray
  dropped: np.ndarray


def summarize(scores: Mapping[str, Mapping[str, Scores]]) -> dict[str, Any]:
  """Return the scores of the questions with an answer, and how often it was right to give none, of every condition."""
  report: dict[str, Any] = {
    key: {} for key in ("em", "em_interval", "f1", "f1_interval", "no_answer", "dropped_documents")
  }
  for policy, of in scores.items():
    for found in report.values():
      found[policy] = {}
    for condition, (exact, soft, has_answer, dropped) in of.items():
      right, n = exact[has_answer], int(has_answer.sum())
      report["em"][policy][condition] = float(right.mean())
      report["em_interval"][policy][condition] = list(wilson_interval(int(right.sum()), n))
      report["f1"][policy][condition] = float(soft[has_answer].mean())
      report["f1_interval"][policy][condition] = list(bootstrap_interval(soft[has_answer]))
      report["dropped_documents"][policy][condition] = int(dropped.sum())
      if n < len(exact):
        report["no_answer"][policy][condition] = float(exact[~has_answer].mean())
  first = next(iter(next(iter(scores.values())).values()))
  return report | {"n": len(first.exact), "with_answer": int(first.has_answer.sum())}


def as_rows(report: Mapping[str, Any]) -> Iterator[list[Any]]:
  """Yield the header and one row per policy and condition."""
  yield ["policy", "documents", "em", "em_low", "em_high", "f1", "f1_low", "f1_high", "no_answer"]
  for policy, scores in report["em"].items():
    for condition, em in scores.items():
      f1, no_answer = report["f1"][policy][condition], report["no_answer"][policy].get(condition)
      values = [em, *report["em_interval"][policy][condition], f1, *report["f1_interval"][policy][condition]]
      yield [policy, condition, *(f"{x:.4f}" for x in values), "" if no_answer is None else f"{no_answer:.4f}"]


def table(report: Mapping[str, Any]) -> str:
  """Format the report for a terminal."""
  lines = [f"{'':10}{'documents':12}{'EM':>6}  {'95 % interval':17}{'F1':>5}  {'95 % interval':17}{'no answer':>9}"]
  for policy, scores in report["em"].items():
    for condition, em in scores.items():
      (low, high), (f1_low, f1_high) = (report[f"{key}_interval"][policy][condition] for key in ("em", "f1"))
      no_answer = report["no_answer"][policy].get(condition)
      unknown = f"{no_answer:9.3f}" if no_answer is not None else " " * 9
      f1 = f"{report['f1'][policy][condition]:6.3f}  [{f1_low:.3f}, {f1_high:.3f}]"
      lines.append(
        f"{policy:10}{condition:12}{em:6.3f}  [{low:.3f}, {high:.3f}]  {f1}  {unknown}   {CONDITIONS[condition]}"
      )
      if dropped := report["dropped_documents"][policy][condition]:
        lines.append(f"{'':22}{dropped} documents did not fit into the model's context, and were not shown")
  lines.append(f"n = {report['n']}, {report['with_answer']} of them with an answer; {report['wall_seconds']:.0f} s")
  return "\n".join(lines)

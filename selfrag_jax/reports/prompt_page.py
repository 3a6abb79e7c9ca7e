"""The report of a prompt optimization as an HTML page: scores over the steps, versions as diffs, past critiques."""

import difflib
import html
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from selfrag_jax.reports.figures import new_figure, png_of
from selfrag_jax.reports.page import image, render, table
from selfrag_jax.storage.atomic import write_bytes_atomic

CRITIQUES = 20  # rows in the table of the past critiques that were shown most often
SHOWN = 60  # of the steps with a new version, half of this number from either end are shown in full


def write(workdir: epath.Path, report: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
  """Write `report.html`, a self-contained file, and `prompt_optimization.png`."""
  config = report["config"]
  figure = _figure(history, config["task"]["sizes"]["train"] / config["optimizer"]["batch_size"])
  write_bytes_atomic(workdir / "prompt_optimization.png", figure)
  tried = [
    (before, row)
    for before, row in itertools.pairwise(history)
    if row.get("candidates", before["texts"]) != before["texts"]
  ]
  shown = tried if len(tried) <= SHOWN else [*tried[: SHOWN // 2], *tried[-SHOWN // 2 :]]
  account = report["account"]
  numbers = [
    *_test_scores(report),
    ("validation, first and last", " and ".join(_score(history[i]["valid"]) for i in (0, -1))),
    (
      "steps, of them with a new version, of them accepted",
      f"{len(history) - 1}, {len(tried)}, {sum(row['accepted'] for _, row in tried)}",
    ),
    ("calls, of which from the cache", f"{account['calls'] + account['cached_calls']:,}, {account['cached_calls']:,}"),
    ("tokens of prompts and of answers", f"{account['prompt_tokens']:,}, {account['completion_tokens']:,}"),
    ("cost", f"{account['cost']:.4f}"),
  ]
  parts = [
    f"<h1>{html.escape(str(report['config']['task']['name']))}: what criticism made of it</h1>",
    image(figure, "Scores over the steps"),
    table(("", ""), numbers),
    *(
      f"<h2>{html.escape(text['role'])}: at first, and in the end</h2>"
      f"<pre>{html.escape(text['initial'])}</pre><pre>{html.escape(text['final'])}</pre>"
      for text in report["texts"]
    ),
    *_remembered(history),
    f"<h2>Steps</h2><p>{len(shown)} of {len(tried)} steps that wrote a new version.</p>",
    *(_step([text["role"] for text in report["texts"]], before, row) for before, row in shown),
  ]
  write_bytes_atomic(workdir / "report.html", render("Prompt optimization", parts))


def _test_scores(report: Mapping[str, Any]) -> list[tuple[str, str]]:
  if report["ended"]:
    return [("ended early, without test scores", report["ended"])]
  low, high = report["test.difference_interval"]
  return [
    ("test score at first", f"{report['test.initial']:.3f}"),
    ("test score in the end", f"{report['test.final']:.3f}"),
    ("difference, paired 95 % interval", f"{report['test.difference']:+.3f} [{low:+.3f}, {high:+.3f}]"),
  ]


def _score(valid: float | None) -> str:
  return "not known" if valid is None else f"{valid:.3f}"


def diff(old: str, new: str) -> str:
  """Return the words of two texts as HTML, with deletions and insertions marked."""
  a, b = (re.findall(r"\s*\S+|\s+$", text) for text in (old, new))
  parts = []
  for name, a0, a1, b0, b1 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
    out, into = html.escape("".join(a[a0:a1])), html.escape("".join(b[b0:b1]))
    if name == "equal":
      parts.append(out)
    else:
      parts.append((f"<del>{out}</del>" if out else "") + (f"<ins>{into}</ins>" if into else ""))
  return "".join(parts)


def _step(roles: Sequence[str], before: Mapping[str, Any], row: Mapping[str, Any]) -> str:
  verdict = "accepted" if row["accepted"] else "rejected"
  change = "" if row["delta"] is None else f", validation {row['delta']:+.3f}"
  parts = [f"<h3>Step {row['step']}: {verdict}{change}; {row['right']} of {row['cases']} cases were right</h3>"]
  per_text = zip(roles, before["texts"], row["candidates"], row["critiques"], row["past"], strict=True)
  for role, old, new, critiques, past in per_text:
    if len(roles) > 1:
      parts.append(f"<h4>{html.escape(role)}</h4>")
    parts.append(_folded("critiques", critiques))
    parts.append(_folded("past critiques that were shown", past) if past else "")
    parts.append(f"<pre>{diff(old, new)}</pre>")
  return "".join(parts)


def _remembered(history: Sequence[Mapping[str, Any]]) -> list[str]:
  """Return the HTML of the past critiques: scores after steps with and without, and those shown most often."""
  tried = [row for row in history if row.get("delta") is not None]
  deltas = {kind: [row["delta"] for row in tried if any(row["past"]) == kind] for kind in (True, False)}
  rows = [
    (
      f"{name} past critiques",
      len(changes),
      f"{sum(change > 0 for change in changes)}, {sum(change < 0 for change in changes)}",
      f"{sum(changes) / len(changes):+.3f}",
    )
    for name, changes in (("with", deltas[True]), ("without", deltas[False]))
    if changes
  ]
  shown: dict[str, list[float]] = {}
  for row in tried:
    for line in itertools.chain.from_iterable(row["past"]):
      shown.setdefault(re.sub("^<[^>]*>|</PAST_FEEDBACK>$", "", line), []).append(row["delta"])
  if not shown:
    return []
  most = sorted(shown.items(), key=lambda item: -len(item[1]))[:CRITIQUES]
  return [
    "<h2>What was remembered</h2><p>Validation before and after the steps that were shown past critiques, and those "
    "that were not. A difference between the two says little by itself: which steps find something similar is no "
    "accident.</p>",
    table(("steps", "number", "better, worse", "mean change"), rows),
    f"<p>The {len(most)} past critiques that were shown the most, of {len(shown)}.</p>",
    table(
      ("critique", "shown", "better after it", "mean change"),
      [(text[:300], len(c), sum(change > 0 for change in c), f"{sum(c) / len(c):+.3f}") for text, c in most],
    ),
  ]


def _folded(what: str, lines: Sequence[str]) -> str:
  items = "".join(f"<li>{html.escape(line)}" for line in lines)
  return f"<details><summary>{what}: {len(lines)}</summary><ul>{items}</ul></details>"


def _figure(history: Sequence[Mapping[str, Any]], epoch: float) -> bytes:
  """Draw the validation score, the share of right answers in each batch, and a line after every `epoch` steps."""
  figure = new_figure(8, 4)
  axes = figure.subplots()
  asked = [row for row in history if "cases" in row]
  shares = [row["right"] / row["cases"] for row in asked]
  axes.plot([row["step"] + 1 for row in asked], shares, ".", color="#bdbdbd", label="batch")
  known = [row for row in history if row["valid"] is not None]
  axes.step([row["step"] + 1 for row in known], [row["valid"] for row in known], where="post", label="validation")
  axes.set(xlabel="step", ylabel="right", ylim=(-0.02, 1.02))
  for end in range(1, int((len(history) - 1) / epoch) + 1):
    axes.axvline(end * epoch, color="#dddddd", linestyle=":", label="epochs" if end == 1 else None, zorder=0)
  axes.legend(loc="lower right")
  return png_of(figure, dpi=120)

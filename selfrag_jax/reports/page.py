"""Reports as HTML pages: position recall with its figure and checks, and answers with the chunks retrieved for them."""

import base64
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from etils import epath

from selfrag_jax.reports.files import write_file

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
img { max-width: 100% } table { border-collapse: collapse; margin: 1rem 0 } caption { text-align: left }
td, th { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right } td:first-child { text-align: left }
ins { background: #d3f5d9; text-decoration: none } del { background: #fbd9d7 } pre { white-space: pre-wrap }
.holds { color: #1a7f37 } .fails { color: #b3261e; font-weight: bold } .needed { background: #fff3bf }
"""


def write_page(workdir: epath.PathLike, report: Mapping[str, Any]) -> None:
  """Write `position_recall.html`, a self-contained file, from the report and `position_recall.png`."""
  workdir = epath.Path(workdir)
  conditions = []
  for name, c in report["conditions"].items():
    shape = f"{c['u']:+.3f}", f"{c['range_upper']:.3f}"
    conditions.append((name, c["budget"], f"{c['accuracy']:.3f}", f"{c['worst']:.3f}", *shape, c["n"]))
  parts = [
    f"<h1>Recall by position: {escape(report['variant'])}, seed {report['seed']}</h1>",
    image((workdir / "position_recall.png").read_bytes(), "Accuracy over the depth of the needed fact"),
    "<h2>Checks</h2>",
    table(("", "value", "bound", ""), map(_check, report["checks"].items())),
    "<h2>Conditions</h2>",
    table(("", "facts seen", "accuracy", "worst depth", "U", "range below", "questions a depth"), conditions),
    "<h2>What was retrieved</h2>",
    "<p>Chunks in the order of their similarity; the needed one is marked.</p>",
    *map(_answer, report["examples"]),
  ]
  write_file(workdir / "position_recall.html", render("Recall by position", parts))


def write_answers(path: epath.PathLike, title: str, answers: Iterable[Mapping[str, Any]]) -> None:
  """Write answers, each with the chunks retrieved for it in the order of their similarity, as one file."""
  write_file(path, render(title, [f"<h1>{escape(title)}</h1>", *map(_answer, answers)]))


def render(title: str, parts: Iterable[str]) -> bytes:
  """Return a page, encoded, whose body are `parts`, which are HTML."""
  head = f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
  return (head + "".join(parts)).encode()


def image(png: bytes, description: str) -> str:
  """Return a PNG image as HTML that needs no other file."""
  return f'<img alt="{description}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _check(item: tuple[str, Mapping[str, Any]]) -> tuple[str, ...]:
  name, check = item
  bound = f">= {check['at_least']:.3g}" if check["at_least"] is not None else f"<= {check['at_most']:.3g}"
  return name, f"{check['value']:.3g}", bound, "holds" if check["holds"] else "fails"


def _answer(answer: Mapping[str, Any]) -> str:
  right = f" (right: {escape(answer['right'])})" if "right" in answer else ""
  caption = f"{escape(answer['question'])} <b>{escape(answer['answer'])}</b>{right}"
  rows = "".join(
    f"<tr{' class=needed' if chunk.get('needed') else ''}><td>{escape(chunk['text'])}<td>{escape(str(chunk['place']))}"
    f"<td>{chunk['score']:.3f}"
    for chunk in answer["chunks"]
  )
  return f"<table><caption>{caption}</caption><tr><th>chunk<th>place<th>similarity{rows}</table>"


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
  """Return a table as HTML; its cells are text, which is escaped."""
  cell = lambda value: f"<td{f' class={value}' if value in ('holds', 'fails') else ''}>{escape(str(value))}"
  body = "".join(f"<tr>{''.join(map(cell, row))}" for row in rows)
  return f"<table><tr>{''.join(f'<th>{escape(title)}' for title in head)}{body}</table>"

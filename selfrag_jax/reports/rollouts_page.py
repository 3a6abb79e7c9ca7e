"""A page of rollouts: each search with its query and documents, the answer, the reward, and what training changed."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from etils import epath

from selfrag_jax.reports.files import write_file
from selfrag_jax.reports.page import render

# a checked box hides the questions whose rollouts did not change, without a script
FILTER = """<style>#changed:checked ~ .same { display: none } section { border-top: 2px solid #ddd; padding-top: .5rem }
.rollout { margin: .6rem 0 .6rem 1rem } .right { color: #1a7f37 } .wrong { color: #b3261e } .meta { color: #666 }
td:first-child { max-width: 46rem }</style>
<input type="checkbox" id="changed"><label for="changed"> only questions whose greedy rollout has changed</label>"""


def write_rollouts(path: epath.PathLike, title: str, questions: Sequence[Mapping[str, Any]]) -> None:
  """Write the rollouts of questions as one file.

  A question has `question`, `right` (the accepted answers), `changed` and `rollouts`. A rollout has `policy`, `hops`
  (each a `query` and `documents` with `text`, `score` and `gold`), `answer`, `reward`, `advantage` (None: greedy),
  `exact` and `valid`.
  """
  changed = sum(bool(question["changed"]) for question in questions)
  parts = [
    f"<h1>{escape(title)}</h1>",
    f"<p>{len(questions)} questions, {changed} of them with another greedy rollout than before. Gold documents are "
    "marked; a score is the cosine of query and document.</p>",
    FILTER,
    *map(_question, questions),
  ]
  write_file(path, render(title, parts))


def _question(question: Mapping[str, Any]) -> str:
  right = " or ".join(question["right"])
  kind = "changed" if question["changed"] else "same"
  head = f"<section class={kind}><h3>{escape(question['question'])}</h3><p class=meta>right: {escape(right)}</p>"
  return head + "".join(map(_rollout, question["rollouts"])) + "</section>"


def _rollout(rollout: Mapping[str, Any]) -> str:
  advantage = "greedy" if rollout["advantage"] is None else f"advantage {rollout['advantage']:+.2f}"
  broken = "" if rollout["valid"] else ", format broken"
  said = "no answer" if rollout["answer"] is None else rollout["answer"]
  verdict = "right" if rollout["exact"] else "wrong"
  hops = "".join(_hop(number, hop) for number, hop in enumerate(rollout["hops"], 1))
  return (
    f"<div class=rollout><b>{escape(rollout['policy'])}</b> <span class=meta>{advantage}, reward "
    f"{rollout['reward']:.2f}{broken}</span>{hops}<p class={verdict}>answer: {escape(said)}</p></div>"
  )


def _hop(number: int, hop: Mapping[str, Any]) -> str:
  return (
    f"<table><caption>search {number}: <b>{escape(hop['query'])}</b></caption>{_documents(hop['documents'])}</table>"
  )


def _documents(documents: Iterable[Mapping[str, Any]]) -> str:
  rows = [
    f"<tr{' class=needed' if document['gold'] else ''}><td>{escape(document['text'])}<td>{document['score']:.3f}"
    for document in documents
  ]
  return "".join(rows) or "<tr><td>nothing was found<td>"

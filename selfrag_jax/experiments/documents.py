"""The experiment of recall by position on real documents, with any checkpoint of a chat model.

The gold document, the one with the answer, moves through the prompt. Its references are the gold document alone, no
document, and a memory that shows the few documents retrieved for the question, whatever their place. An answer is right
if a gold answer occurs in it (arXiv 2307.03172).
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from selfrag_jax.checked import Checked, Count
from selfrag_jax.encoders.token_bag import TokenBagEncoder
from selfrag_jax.experiments.base import write_report
from selfrag_jax.experiments.chat_model import BUCKET, ChatModel, load_chat
from selfrag_jax.generate.complete import check_new_tokens
from selfrag_jax.memory.topk_numpy import search_numpy
from selfrag_jax.metrics.answers import substring_match
from selfrag_jax.metrics.position import describe
from selfrag_jax.metrics.statistics import wilson_interval
from selfrag_jax.ragged import pad_rows, round_up
from selfrag_jax.reports import figures
from selfrag_jax.reports.files import write_file
from selfrag_jax.reports.thresholds import numbers
from selfrag_jax.settings import read_config, settings
from selfrag_jax.storage.atomic import json_bytes
from selfrag_jax.storage.json_lines import read_json_object
from selfrag_jax.tasks.documents import DocumentQuestion, positions, prompt, read_questions, with_gold_at


@dataclasses.dataclass(frozen=True)
class FilesPath(Checked):
  """The path of the files that an experiment reads."""

  path: str = ""


@dataclasses.dataclass(frozen=True)
class DocumentsConfig(Checked):
  """Recall by position on real documents."""

  n_documents: tuple[Count, ...] = (5, 10, 20)
  positions: Count = 5  # places of the gold document, evenly from the first to the last
  questions: Count = 100  # asked from each file
  top_k: Count = 2  # documents that the memory shows
  max_new_tokens: Count = 100  # a key and its value take 90
  batch_size: Count = 2


SECTIONS = {"model": str, "data": FilesPath, "documents": DocumentsConfig}
Shown = Callable[[DocumentQuestion, int, int], Sequence[str]]


@dataclasses.dataclass
class Experiment:
  """A chat model, and the questions by the name of their file."""

  config: dict[str, Any]
  settings: DocumentsConfig
  chat: ChatModel
  questions: dict[str, list[DocumentQuestion]]


def build(config: Mapping[str, Any]) -> Experiment:
  """Check a config and load its model and questions. Raises ValueError with the fix for a wrong config."""
  config = read_config(config, SECTIONS)
  section = settings(DocumentsConfig, config["documents"], "documents")
  path = settings(FilesPath, config["data"], "data").path
  if not path:
    raise ValueError("config.data.path is empty; give the files of questions and documents: --data=FOLDER")
  questions = {name: rows[: section.questions] for name, rows in read_questions(path).items()}
  for name, rows in questions.items():
    if (fewest := min(len(row.others) for row in rows)) < max(section.n_documents) - 1:
      raise ValueError(
        f"{name} has questions with {fewest + 1} documents, documents.n_documents asks for {max(section.n_documents)}"
      )
  check_new_tokens(section.max_new_tokens)
  chat = load_chat(config["model"])
  check_new_tokens(section.max_new_tokens, chat.context_tokens)
  return Experiment(config, section, chat, questions)


def planned(section: DocumentsConfig) -> dict[str, tuple[str, int, list[int]]]:
  """Return the curves of a file by name, each as (condition, number of documents, places of the gold document)."""
  curves: dict[str, tuple[str, int, list[int]]] = {}
  for n in section.n_documents:
    curves[f"full_{n}"] = "full", n, list(positions(n, section.positions))
  for n in section.n_documents:
    curves[f"memory_{n}"] = "memory", n, [n // 2]
  return {**curves, "gold": ("gold", 1, [0]), "closed_book": ("closed_book", 1, [0])}


def value_names(experiment: Experiment) -> set[str]:
  """Return the names of the numbers that the report will have."""
  wrong = lambda *_: [(0.0, 0)] * 2
  curves = {
    key: measure(wrong, [], lambda *_: [], n, places) for key, (_, n, places) in planned(experiment.settings).items()
  }
  return set(numbers({"config": experiment.config, "files": dict.fromkeys(experiment.questions, curves)}))


def dry_run(experiment: Experiment) -> None:
  """Print the model, how many questions each file has, and the curves that would be measured."""
  print(f"model {experiment.config['model']}")
  for name, questions in experiment.questions.items():
    print(f"{name}: {len(questions):,} questions, such as {questions[0].question!r}")
  for name, (_, n, places) in planned(experiment.settings).items():
    print(f"{name}: {n} documents, the one that answers at {', '.join(str(place + 1) for place in places)}")


def evaluate(experiment: Experiment, workdir: epath.PathLike) -> dict[str, Any]:
  """Measure every file at every number of documents, and write `documents.json`, `.csv` and `.png`.

  Each measured curve is saved in `documents.json` at once, and a later call does not measure it again.
  """
  workdir, section = epath.Path(workdir), experiment.settings
  target = workdir / "documents.json"
  report = _begun(target, experiment.config)
  answer = make_answer(experiment)
  for name, questions in experiment.questions.items():
    curves, shown = report["files"].setdefault(name, {}), conditions(experiment, questions)
    for key, (condition, n, places) in planned(section).items():
      if key in curves:
        continue
      curves[key] = measure(answer, questions, shown[condition], n, places)
      write_file(target, json_bytes(report))
      print(f"{name} {key}: {'  '.join(f'{x:.3f}' for x in curves[key]['accuracy_by_depth'])}", flush=True)
  write_report(workdir, "documents", report, as_rows(report))
  figures.documents_over_depth(workdir, report)
  print(table(report))
  return report


run = evaluate  # nothing is trained


def conditions(experiment: Experiment, questions: Sequence[DocumentQuestion]) -> dict[str, Shown]:
  """Return for each condition the function (question, number of documents, place of the gold one) -> shown texts."""
  retrieve = make_retrieve(experiment, questions)
  return {
    "full": with_gold_at,
    "memory": lambda question, n, place: retrieve(question, with_gold_at(question, n, place)),
    "gold": lambda question, *_: [question.gold],
    "closed_book": lambda *_: [],
  }


def measure(
  answer: Callable[..., list[tuple[float, int]]],
  questions: Sequence[DocumentQuestion],
  documents: Shown,
  n: int,
  places: Sequence[int],
) -> dict[str, Any]:
  """Return the curve of the accuracy on all questions, with the gold document at each of the places."""
  started = time.monotonic()
  rows = [answer(questions, [documents(question, n, place) for question in questions]) for place in places]
  hits = np.array([[right for right, _ in row] for row in rows]).T
  return {
    "positions": list(places),
    "accuracy_by_depth": hits.mean(axis=0).tolist(),
    "interval_by_depth": [list(wilson_interval(int(column.sum()), len(column))) for column in hits.T],
    "n": len(hits),
    "shape": describe(hits) if len(places) >= 4 else None,
    "prompt_tokens": int(np.mean([length for row in rows for _, length in row])),
    "seconds": round(time.monotonic() - started, 1),
  }


def _begun(target: epath.Path, config: Mapping[str, Any]) -> dict[str, Any]:
  if target.exists():
    report = read_json_object(target, "what an earlier run has measured")
    if report.get("config") != json.loads(json.dumps(config)):
      raise ValueError(f"{target} was measured with another config; use another workdir")
    files = report.get("files")
    of_files = list(files.values()) if isinstance(files, dict) else [None]
    if not all(isinstance(curves, dict) and all(map(_is_curve, curves.values())) for curves in of_files):
      raise ValueError(f"{target} was damaged; use another workdir, or delete it to measure again")
    return report
  return {"config": config, "files": {}}


def _is_curve(curve: Any) -> bool:
  """Tell whether a value has the form of a curve that `measure` returns."""
  fields = ("positions", "accuracy_by_depth", "interval_by_depth")
  return (
    isinstance(curve, dict)
    and {"n", "shape", "prompt_tokens", "seconds"} <= curve.keys()
    and all(isinstance(curve.get(name), list) for name in fields)
  )


def make_answer(experiment: Experiment) -> Callable[..., list[tuple[float, int]]]:
  """Return the function that answers questions with documents: 1.0 if right and the prompt's tokens, for each."""
  section = experiment.settings

  def answer(questions, shown):
    texts = [prompt(*pair) for pair in zip(questions, shown, strict=True)]
    turns = [[{"role": "user", "content": text}] for text in texts]
    answers = experiment.chat.answer(turns, max_new_tokens=section.max_new_tokens, batch_size=section.batch_size)
    return [
      (float(substring_match(given.text, question.answers)), given.prompt_tokens)
      for given, question in zip(answers, questions, strict=True)
    ]

  return answer


def make_retrieve(experiment: Experiment, questions: Sequence[DocumentQuestion]) -> Callable[..., list[str]]:
  """Return the function that retrieves `top_k` documents for a question and keeps their order in the prompt.

  It compares bags of token ids, in which a token counts by its rarity among all documents of the file.
  """
  tokenizer = experiment.chat.tokenizer
  texts = dict.fromkeys(text for question in questions for text in (question.gold, *question.others))
  ids = {text: tokenizer.encode(text) for text in texts}
  bag = TokenBagEncoder(512, tokenizer.vocab_size, tokenizer.encode)
  bag.fit_tokens(list(ids.values()))

  def vectors(rows):
    return np.asarray(bag.apply(bag.params, *pad_rows(rows, round_up(max(map(len, rows)), BUCKET))))

  def retrieve(question, documents):
    rows, query = vectors([ids[text] for text in documents]), vectors([tokenizer.encode(question.question)])
    found = search_numpy({"embeddings": rows}, query, experiment.settings.top_k).slots[0]
    return [documents[slot] for slot in sorted(found) if slot >= 0]

  return retrieve


def as_rows(report: Mapping[str, Any]) -> Iterator[list[Any]]:
  """Yield the header and one row per file, condition and position."""
  yield ["file", "condition", "position", "accuracy", "low", "high", "n", "prompt_tokens"]
  for name, curves in report["files"].items():
    for condition, curve in curves.items():
      for place, accuracy, (low, high) in zip(
        curve["positions"], curve["accuracy_by_depth"], curve["interval_by_depth"], strict=True
      ):
        numbers = (f"{x:.4f}" for x in (accuracy, low, high))
        yield [name, condition, place, *numbers, curve["n"], curve["prompt_tokens"]]


def table(report: Mapping[str, Any]) -> str:
  """Format the report for a terminal."""
  lines = []
  for name, curves in report["files"].items():
    lines.append(f"{name}, model {report['config']['model']}: accuracy by the place of the document that answers")
    for condition, curve in curves.items():
      by_place = "  ".join(
        f"{place + 1}: {x:.3f}" for place, x in zip(curve["positions"], curve["accuracy_by_depth"], strict=True)
      )
      shape = f"   U {curve['shape']['u']:+.3f}" if curve["shape"] else ""
      lines.append(f"  {condition:12} {by_place}{shape}   n = {curve['n']}, {curve['prompt_tokens']} tokens")
  return "\n".join(lines)

"""Questions over documents of which one holds the answer, at any position: the files of "Lost in the Middle".

Source: Liu et al. 2023, arXiv 2307.03172. Two layouts are read: questions with a gold document and distractors, and
lists of key-value pairs.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from selfrag_jax.storage.hub import locate_data
from selfrag_jax.storage.json_lines import get_field, read_jsonl


class DocumentQuestion(NamedTuple):
  """A question, the accepted answers, the gold document, which holds the answer, and other documents, which do not."""

  question: str
  answers: tuple[str, ...]
  gold: str
  others: tuple[str, ...]


def read_questions(path: epath.PathLike) -> dict[str, list[DocumentQuestion]]:
  """Read a `.jsonl` file, or all of a folder or of a name on the hub; returns the questions by the name of their file.

  A line is `{question, answers, gold: {title, text}, distractors: [{title, text}]}` or `{ordered_kv_records: [[key,
  value]], key, value}`. Raises FileNotFoundError if there is no file, and ValueError, with file and line, for any other
  line.
  """
  root = locate_data(path, ["*.jsonl"])
  files = sorted(root.glob("*.jsonl")) if root.is_dir() else [root]
  if not files or not files[0].exists():
    raise FileNotFoundError(f"{path} holds no questions; give a .jsonl file or a folder of them")
  return {file.stem: _read_file(file) for file in files}


def _read_file(file: epath.Path) -> list[DocumentQuestion]:
  questions = []
  for number, record in read_jsonl(file):
    try:
      questions.append(_pairs(record) if "ordered_kv_records" in record else _passages(record))
    except ValueError as error:
      raise ValueError(
        f"{file}, line {number}: {error}; expected question, answers, gold and distractors, or ordered_kv_records, "
        "key and value"
      ) from None
  if not questions:
    raise ValueError(f"{file} holds no questions")
  return questions


def _passages(record: Mapping[str, Any]) -> DocumentQuestion:
  question, answers = get_field(record, "question", str), get_field(record, "answers", list)
  if not answers or not all(isinstance(answer, str) for answer in answers):
    raise ValueError("answers must be texts, at least one")
  documents = [get_field(record, "gold", dict), *get_field(record, "distractors", list)]
  gold, *others = (f"(Title: {get_field(found, 'title', str)}) {get_field(found, 'text', str)}" for found in documents)
  return DocumentQuestion(question, tuple(answers), gold, tuple(others))


def _pairs(record: Mapping[str, Any]) -> DocumentQuestion:
  key, value = get_field(record, "key", str), get_field(record, "value", str)
  pairs: dict[str, str] = {}
  for pair in get_field(record, "ordered_kv_records", list):
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
      raise ValueError(f"{reprlib.repr(pair)} is no pair of texts")
    if pair[0] in pairs:
      raise ValueError(f"the key {pair[0]!r} occurs twice")
    pairs[pair[0]] = pair[1]
  if pairs.pop(key, None) != value:
    raise ValueError(f"the pairs do not say that {key!r} is {value!r}")
  write = lambda key, value: f'"{key}": "{value}"'
  others = tuple(write(*pair) for pair in pairs.items())
  return DocumentQuestion(f'What is the value of the key "{key}"?', (value,), write(key, value), others)


def prompt(question: DocumentQuestion, documents: Sequence[str]) -> str:
  """Write the documents and the question as a user's message."""
  if not documents:
    return f"Answer the question in a few words.\n\nQuestion: {question.question}"
  listed = "\n".join(f"[{number}] {document}" for number, document in enumerate(documents, 1))
  return (
    "Answer the question in a few words with what these documents say; some of them do not help.\n\n"
    f"{listed}\n\nQuestion: {question.question}"
  )


def with_gold_at(question: DocumentQuestion, n_documents: int, position: int) -> list[str]:
  """List `n_documents` documents, the gold one at `position`. Raises ValueError if there are too few others."""
  if not 0 <= position < n_documents or n_documents - 1 > len(question.others):
    raise ValueError(f"{n_documents} documents, one of them at {position}, from {len(question.others)} others")
  others = list(question.others[: n_documents - 1])
  return [*others[:position], question.gold, *others[position:]]


def positions(n_documents: int, n_positions: int) -> list[int]:
  """Return the positions for the gold document, evenly spaced from the first to the last."""
  return np.unique(np.linspace(0, n_documents - 1, n_positions).round().astype(int)).tolist()

"""Conversations whose documents were retrieved beforehand, as what a model is fine-tuned on and asked about."""

import os
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from etils import epath

from selfrag_jax.metrics.answers import CLOSED_ANSWERS, normalize_answer
from selfrag_jax.tasks.articles import exact_or_unknown, f1_or_unknown
from selfrag_jax.tasks.countries import ENDLESS
from selfrag_jax.tasks.country_wordings import UNKNOWN
from selfrag_jax.tasks.facts import SPLITS
from selfrag_jax.tasks.rag import Shown, StaticRAGTask, show
from selfrag_jax.tasks.search_task import ShuffledEpochs
from selfrag_jax.tasks.task import Conversation, Task

EPOCHS, SHOWN = range(2)  # keep the random numbers of different purposes apart


class Conversations:
  """The files `train.jsonl`, `valid.jsonl` and `test.jsonl` of a folder, as `save_conversations` writes them.

  The last turn of a conversation is the assistant's answer. `answers` of a record holds all that are accepted, none if
  its documents do not tell; a record without that field accepts its last turn. Where none is accepted, the last turn is
  UNKNOWN. Answers are scored by the exact match and the F1 of SQuAD.
  """

  conditions: ClassVar[tuple[str, ...]] = ("retrieved", "none", "shuffled")

  def __init__(self, path: epath.PathLike, seed: int = 0):
    """Read the files.

    Raises like `StaticRAGTask`; ValueError for a path that is no folder and has no `{split}`, and for a record without
    an answer at its end or with documents or answers that are none.
    """
    if "{split}" not in os.fspath(path) and not epath.Path(path).is_dir():
      raise ValueError(f"{path} is no folder: give one with train.jsonl, valid.jsonl and test.jsonl")
    self._seed, self._parts = seed, {split: _checked(StaticRAGTask(path, split)) for split in SPLITS}

  def of_phase(self, name: str) -> "Conversations":
    """Return these conversations, for every phase: they have no simpler form."""
    return self

  def size(self, split: str) -> int:
    """Return the number of conversations of a split."""
    return len(self._parts[split])

  def __str__(self) -> str:
    """Say in one line how many there are, and for how many of the test an answer stands in the documents."""
    told = [_tells(_documents(row), row["answers"]) for row in self._parts["test"] if row["answers"]]
    sizes = ", ".join(f"{split} {self.size(split):,}" for split in SPLITS)
    return f"{sizes} conversations; an answer stands in the documents of {sum(told):,} of {len(told):,} of the test"

  def questions(self, split: str, n: int, condition: str) -> Task:
    """Return the first `n` conversations of a split, or all if there are fewer, under a condition."""
    task = Task(f"conversations_{split}", self._parts[split], dict, exact_or_unknown, f1_or_unknown)
    return show(task, condition, partial(_other, self._parts[split]))[:n]  # type: ignore[arg-type]

  def training(self, shown: Shown, unanswerable: float) -> Task:
    """Return an endless view of the training's conversations, every epoch shuffled anew, with documents in any order.

    In a share `unanswerable` of those whose documents hold an answer, but for yes and no, documents of other
    conversations stand in their place, as many: the last turn is UNKNOWN there. The controls have the same last turns.
    """
    rows = self._parts["train"]
    task = show(Task("conversations_train", rows, dict), shown, partial(_other, rows))
    epochs = ShuffledEpochs(range(len(rows)), self._seed, EPOCHS)

    def make(index: int) -> Conversation:
      rng, at = np.random.default_rng([self._seed, SHOWN, index]), epochs[index]
      row, said = task[at], rows[at]["answers"]
      can_go = not CLOSED_ANSWERS & {*map(normalize_answer, said)} and _tells(_documents(rows[at]), said)
      spare = _spare(rows, at) if can_go and rng.random() < unanswerable else []
      taken, others = said if spare else (), iter(spare)
      messages = [_changed(message, taken, others, rng) for message in row["messages"]]
      if spare:
        messages[-1] = {**messages[-1], "content": UNKNOWN}
      return {**row, "messages": [message for message in messages if message.get("documents") != []]}

    return Task(f"conversations_train_{shown}", range(ENDLESS), make, exact_or_unknown, f1_or_unknown)


def _checked(task: StaticRAGTask) -> list[Conversation]:
  """Return the conversations with their accepted answers, without messages that show no document."""
  rows = []
  for number, row in enumerate(task, 1):
    where, last = f"conversation {number} of {task.name}", row["messages"][-1]
    if last["role"] != "assistant" or not isinstance(last.get("content"), str):
      raise ValueError(f"{where} does not end with an answer of the assistant")
    answers = row.get("answers", [last["content"]])
    if not isinstance(answers, list) or not all(isinstance(said, str) for said in answers):
      raise ValueError(f"{where}: 'answers' must be a list of texts, not {reprlib.repr(answers)}")
    answers = [said for said in answers if normalize_answer(said) not in ("", normalize_answer(UNKNOWN))]
    messages = [_message(message, where) for message in row["messages"]]
    if not answers:
      messages[-1] = {**last, "content": UNKNOWN}
    kept = [message for message in messages if message.get("documents") != []]
    rows.append({"id": str(number), **row, "messages": kept, "answers": answers})
  return rows


def _message(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
  """Return a message as it is. Raises ValueError for documents that the conditions could not change."""
  content = message.get("content")
  if isinstance(content, list) and any(isinstance(part, dict) and "documents" in part for part in content):
    raise ValueError(f"{where} has documents within a turn: put them into a message of the role retrieval")
  if message["role"] != "retrieval" or "documents" not in message:  # a notice is no document
    return message
  documents = message["documents"]
  if not isinstance(documents, list) or not all(
    isinstance(d, dict) and isinstance(d.get("content"), str) for d in documents
  ):
    raise ValueError(f"{where}: 'documents' must be a list of objects with a text as 'content'")
  return message


def _other(rows: Sequence[Conversation], index: int) -> int:
  """Return which conversation, from half of all further on, has other documents, which do not answer one.

  Raises ValueError if none has.
  """
  own = _documents(rows[index])
  for at in ((index + len(rows) // 2 + i) % len(rows) for i in range(len(rows))):
    found = _documents(rows[at])
    if at != index and found and found != own and not _tells(found, rows[index]["answers"]):
      return at
  raise ValueError(
    f"no other of {len(rows)} conversations has documents that do not answer number {index + 1}: there is no control "
    "with those of another question; leave it out of config.evaluation.conditions"
  )


def _spare(rows: Sequence[Conversation], index: int) -> list[Any]:
  """Return as many documents as a conversation shows, from those behind it; none answers it or is shown there.

  Nothing if they are too few.
  """
  own, said, found = _documents(rows[index]), rows[index]["answers"], []
  seen = {document["content"] for document in own}
  for at in range(index + 1, index + len(rows)):
    for document in _documents(rows[at % len(rows)]):
      if document["content"] not in seen and not _tells([document], said):
        found.append(document)
        seen.add(document["content"])
      if len(found) == len(own):
        return found
  return []


def _changed(message: Any, without: Sequence[str], spare: Iterator[Any], rng: np.random.Generator) -> Any:
  """Return a message with its documents in another order, the next spare ones in place of those that hold an answer."""
  if not message.get("documents"):
    return message
  documents = [next(spare) if _tells([document], without) else document for document in message["documents"]]
  return {**message, "documents": [documents[i] for i in rng.permutation(len(documents))]}


def _documents(row: Conversation) -> list[Any]:
  return [document for message in row["messages"] for document in message.get("documents", ())]


def _tells(documents: Sequence[Any], answers: Sequence[str]) -> bool:
  """Tell whether one of the answers stands in one of the documents, as whole words."""
  texts = [f" {normalize_answer(document['content'])} " for document in documents]
  return any(f" {said} " in text for said in map(normalize_answer, answers) if said for text in texts)

"""Conversations whose documents were retrieved beforehand, as what a model is fine-tuned on and asked about."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from etils import epath

from selfrag_jax.metrics.answers import normalize_answer
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
  its documents do not tell; a record without that field accepts its last turn.
  """

  conditions: ClassVar[tuple[str, ...]] = ("retrieved", "none", "shuffled")

  def __init__(self, path: epath.PathLike, seed: int = 0):
    """Read the files. Raises like `StaticRAGTask`, and ValueError for a conversation without an answer at its end."""
    self._seed, self._parts = seed, {split: _answered(StaticRAGTask(path, split)) for split in SPLITS}

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

    From a share `unanswerable` of those with an answer, the documents that hold it are taken away: the last turn is
    UNKNOWN there.
    """
    rows = self._parts["train"]
    task = show(Task("conversations_train", rows, dict), shown, partial(_other, rows))
    epochs = ShuffledEpochs(range(len(rows)), self._seed, EPOCHS)

    def make(index: int) -> Conversation:
      rng, row = np.random.default_rng([self._seed, SHOWN, index]), task[epochs[index]]
      is_taken = bool(row["answers"]) and rng.random() < unanswerable
      taken = row["answers"] if is_taken else ()
      messages = [_reordered(message, taken, rng) for message in row["messages"]]
      if is_taken:
        messages[-1] = {**messages[-1], "content": UNKNOWN}
      return {**row, "messages": [message for message in messages if message.get("documents") != []]}

    return Task(f"conversations_train_{shown}", range(ENDLESS), make, exact_or_unknown, f1_or_unknown)


def _answered(task: StaticRAGTask) -> list[Conversation]:
  """Return the conversations with their accepted answers."""
  rows = []
  for number, row in enumerate(task, 1):
    last = row["messages"][-1]
    if last["role"] != "assistant" or not isinstance(last.get("content"), str):
      raise ValueError(f"conversation {number} of {task.name} does not end with an answer of the assistant")
    rows.append({"id": str(number), "answers": [last["content"]], **row})
  return rows


def _other(rows: Sequence[Conversation], index: int) -> int:
  """Return which conversation, from half of all further on, has documents that do not answer one.

  Raises ValueError if none has.
  """
  order = ((index + len(rows) // 2 + i) % len(rows) for i in range(len(rows)))
  others = (at for at in order if at != index and not _tells(_documents(rows[at]), rows[index]["answers"]))
  if (found := next(others, None)) is None:
    raise ValueError(f"the documents of all {len(rows)} conversations answer that of number {index + 1}: no control")
  return found


def _reordered(message: Any, without: Sequence[str], rng: np.random.Generator) -> Any:
  """Return a message with its documents in another order, without those that hold one of the answers."""
  if message["role"] != "retrieval":
    return message
  kept = [document for document in message["documents"] if not _tells([document], without)]
  return {**message, "documents": [kept[i] for i in rng.permutation(len(kept))]}


def _documents(row: Conversation) -> list[Any]:
  return [document for m in row["messages"] if m["role"] == "retrieval" for document in m["documents"]]


def _tells(documents: Sequence[Any], answers: Sequence[str]) -> bool:
  """Tell whether one of the answers stands in one of the documents, as whole words."""
  texts = [f" {normalize_answer(document['content'])} " for document in documents]
  return any(f" {said} " in text for said in map(normalize_answer, answers) if said for text in texts)

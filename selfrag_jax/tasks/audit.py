"""An audit of a corpus: whether it has the passages from which its questions can be answered."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from selfrag_jax.metrics.answers import CLOSED_ANSWERS, normalize_answer
from selfrag_jax.retrieval.document import Document
from selfrag_jax.tasks.task import Conversation, Task

SHOWN = 3  # questions that a summary names


class Audit(NamedTuple):
  """What a corpus lacks, and how often an answer can be read in the gold passages of its question.

  `missing` holds the titles of the passages that are not in the corpus by the id of their question. Answers are looked
  for in the questions that have all their gold passages, except where the answer is yes or no; `extractive` counts
  these questions, `readable` those of them with an accepted answer in a passage. `ungrounded` questions name no passage
  and are in no other number. `by_title`: the corpus has chunks, of which all with the title of a passage count as it.
  """

  questions: int
  complete: int
  missing: Mapping[str, Sequence[str]]
  extractive: int
  readable: int
  ungrounded: int
  by_title: bool = False

  def __str__(self) -> str:
    """Say it in one line."""
    wanted = "titles of their gold passages" if self.by_title else "gold passages"
    said = [f"{self.complete} of {self.questions} questions have all {wanted}"]
    if self.missing:
      named = [f"{id} ({', '.join(titles)})" for id, titles in list(self.missing.items())[:SHOWN]]
      more = [f"and {len(self.missing) - SHOWN} more"] if len(self.missing) > SHOWN else []
      said.append(f"{self.questions - self.complete} left out: {', '.join(named + more)}")
    read = "the texts of these titles for" if self.by_title else "the gold passages of"
    said.append(f"an answer stands in {read} {self.readable} of {self.extractive}")
    if self.ungrounded:
      said.append(f"{self.ungrounded} more name no passage")
    return "; ".join(said)


def audit_corpus(examples: Iterable[Conversation], documents: Iterable[Document]) -> Audit:
  """Look for the gold passages of all examples in a corpus.

  A passage is found by title and text, without regard to white space, and by its title alone if the example names no
  more. Raises ValueError if no example names a passage, and if the corpus has none of them.
  """
  return _audit(examples, documents)[0]


def complete_only(task: Task, documents: Iterable[Document], by_title: bool = False) -> tuple[Task, Audit]:
  """Return a view of a task without the questions that lack a gold passage, and the audit that counts them.

  With `by_title`, the title of a passage is enough, for documents that are chunks of passages. Questions that name no
  passage stay. Raises ValueError like `audit_corpus`, and if no question is left.
  """
  audit, kept = _audit(task, documents, by_title)
  if not kept:
    raise ValueError(f"no question of {task.name} has all its gold passages in the corpus: {audit}")
  return task.select(kept), audit


def with_texts(examples: Iterable[Conversation], documents: Iterable[Document]) -> Iterator[Conversation]:
  """Yield examples whose gold passages have their texts: where a title is all that is named, that of the corpus."""
  texts = {_key({"title": document.title}): document.content for document in documents}
  whole = lambda passage: {"content": texts.get(_key({"title": passage["title"]}), ""), **passage}
  return ({**example, "gold": [whole(passage) for passage in example.get("gold", ())]} for example in examples)


def _audit(
  examples: Iterable[Conversation], documents: Iterable[Document], by_title: bool = False
) -> tuple[Audit, list[int]]:
  """Return the audit, and the indices of the examples whose gold passages are all there."""
  corpus = _texts_by_passage(documents)
  key = lambda passage: _key({"title": passage["title"]} if by_title else passage)
  read = lru_cache(None)(lambda of: normalize_answer(" ".join(corpus[of])))  # many questions are about one passage
  missing: dict[str, list[str]] = {}
  kept: list[int] = []
  grounded = lacking = passages = lost = extractive = readable = 0
  for index, example in enumerate(examples):
    gold = example.get("gold", ())
    lacks = [passage["title"] for passage in gold if key(passage) not in corpus]
    grounded, passages, lost = grounded + bool(gold), passages + len(gold), lost + len(lacks)
    if lacks:
      lacking += 1
      missing[example["id"]] = lacks
      continue
    kept.append(index)
    answers = {normalize_answer(answer) for answer in example.get("answers", ())} - {""}
    if gold and answers and not answers & CLOSED_ANSWERS:
      text = " ".join(read(key(passage)) for passage in gold)
      extractive += 1
      readable += any(f" {answer} " in f" {text} " for answer in answers)
  if not passages:
    raise ValueError(f"none of the {len(kept)} questions names a gold passage; there is nothing to look for")
  if lost == passages:
    first = next(iter(missing.items()))
    fix = "do its documents have titles?" if by_title else "is this the corpus of these questions, in whole passages?"
    raise ValueError(
      f"none of the {passages} gold passages of {grounded} questions is in the corpus; the first missing ones are "
      f"{first}: {fix}"
    )
  ungrounded = len(kept) + lacking - grounded
  return Audit(grounded, grounded - lacking, missing, extractive, readable, ungrounded, by_title), kept


def _texts_by_passage(documents: Iterable[Document]) -> dict[tuple[str, ...], list[str]]:
  """Return the texts of a corpus by title and content, and by title alone."""
  corpus: dict[tuple[str, ...], list[str]] = {}
  for document in documents:
    corpus.setdefault(_key({"title": document.title}), []).append(document.text)
    corpus[_key({"title": document.title, "content": document.content})] = [document.text]
  return corpus


def _key(passage: Mapping[str, str]) -> tuple[str, ...]:
  title = _squeeze(passage["title"]).replace("_", "")  # Wikipedia's addresses have it in the place of a space
  return (title, _squeeze(passage["content"])) if "content" in passage else (title,)


def _squeeze(text: str) -> str:
  return "".join(text.split())

"""Questions of a data set's files beside the passages that a retriever finds for them, split by article.

The corpus is made of all passages of the file, or is a knowledge base. Answers are short; a question that has none, and
one whose passage is not shown, is answered by UNKNOWN.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from selfrag_jax.metrics.answers import exact_match, normalize_answer, squad_f1
from selfrag_jax.retrieval.beir import TitleParts, deal
from selfrag_jax.retrieval.manager import RetrievalManager
from selfrag_jax.tasks.audit import complete_only, with_texts
from selfrag_jax.tasks.countries import ENDLESS
from selfrag_jax.tasks.country_wordings import UNKNOWN
from selfrag_jax.tasks.documents import DocumentQuestion, prompt
from selfrag_jax.tasks.official import corpus_of
from selfrag_jax.tasks.rag import ALARM, Shown
from selfrag_jax.tasks.search_task import ShuffledEpochs
from selfrag_jax.tasks.task import Conversation, Task
from selfrag_jax.text.rag_prompts import create_rag_training_example

INSTRUCTION = f"Answer the question in a few words with what the documents say. If they do not say it: {UNKNOWN}"
SPLIT, EPOCHS, SHOWN = range(3)  # keep the random numbers of different purposes apart

SPARE = 4  # passages that are found beyond those that are shown, in place of those that must not be
PARTS, BM25 = TitleParts(), "bm25"


class Articles:
  """The questions of a task whose examples name their gold passages.

  A question belongs to the split of the article of its first gold passage: no article of `test` was seen in training.
  The first `top_k` passages of `retriever`, among all articles, or of the folder `knowledge_base` are shown.
  """

  conditions: ClassVar[tuple[str, ...]] = ("retrieved", "gold", "plain", "none", "shuffled")

  def __init__(
    self,
    task: Task,
    *,
    retriever: str = "",
    knowledge_base: str = "",
    top_k: int = 3,
    further: int = 0,
    parts: TitleParts = PARTS,
    seed: int = 0,
  ):
    """Make the splits; `further` questions about the same passage follow the first one of a conversation of training.

    Questions whose gold passages the corpus lacks, of a knowledge base by their titles, are left out; `audit` counts
    and names them. Raises ValueError if a split gets no question with an answer, for a task without gold passages, for
    a corpus without any of them, and for a knowledge base that is not of the type `retriever`.
    """
    if not any(example.get("gold") for example in task):
      raise ValueError(f"{task.name} names no gold passages: there is no corpus to search")
    self._top_k, self._further, self._seed = top_k, further, seed
    self._retriever = RetrievalManager(
      retriever or (None if knowledge_base else BM25), knowledge_base or None
    ).retriever
    if not knowledge_base:
      self._retriever.add_documents(corpus_of(task))
    documents = self._retriever.documents
    task, self.audit = complete_only(task, documents, by_title=bool(knowledge_base))
    self._examples = examples = list(with_texts(task, documents))
    self._gold = [[(d["title"], d["content"]) for d in example["gold"]] for example in examples]
    dealt = deal({gold[0][0] for gold in self._gold if gold}, vars(parts), seed)
    split_of = {title: split for split, titles in dealt.items() for title in titles}
    self._rows = rows = [int(i) for i in self._rng(SPLIT).permutation(len(examples)) if self._gold[i]]
    self._places = {row: place for place, row in enumerate(rows)}
    self._parts = {split: [i for i in rows if split_of[self._gold[i][0][0]] == split] for split in dealt}
    if empty := [split for split, part in self._parts.items() if not any(examples[i]["answers"] for i in part)]:
      raise ValueError(f"the split {empty[0]} has no question with an answer: give it a larger share of the articles")

  def of_phase(self, name: str) -> "Articles":
    """Return these questions, for every phase: real ones have no simpler form."""
    return self

  def size(self, split: str) -> int:
    """Return the number of questions of a split."""
    return len(self._parts[split])

  def questions(self, split: str, n: int, condition: str) -> Task:
    """Return the first `n` questions of a split, or all if there are fewer, under a condition.

    `plain` writes the retrieved passages into the question as text, for models that do not know our tokens; `shuffled`
    shows those of a question about another article.
    """
    passages = {"gold": self._gold.__getitem__, "none": lambda row: (), "shuffled": self._of_another_article}
    texts, is_plain = passages.get(condition, self._found), condition == "plain"
    make = lambda row: self._conversation(row, texts(row), is_plain)
    return Task(f"articles_{split}", self._parts[split][:n], make, exact_or_unknown, f1_or_unknown)

  def training(self, shown: Shown, unanswerable: float) -> Task:
    """Return an endless view of the training's questions, every epoch shuffled anew, with passages in any order.

    An answer is trained on only beside its passage, which is added where it was not found. The share `unanswerable` of
    the conversations begins with UNKNOWN: the passage is taken away, and no further question follows; or, in half of
    these, the question is replaced by one without an answer about the same passage if there is one. Half of SQuAD 2.0
    are such questions, and from as many of them a model learns first to answer nothing.
    """
    epochs = ShuffledEpochs([row for row in self._parts["train"] if self._has_answer(row)], self._seed, EPOCHS)

    def make(index: int) -> Conversation:
      rng, row = self._rng(SHOWN, index), epochs[index]
      is_taken = rng.random() < unanswerable
      silent = [other for other in self._about[self._gold[row][0]] if not self._has_answer(other)]
      if is_taken and silent and rng.random() < 0.5:
        row, is_taken = int(rng.choice(silent)), False
      found, gold = self._found(row), self._gold[row]
      others = [text for text in self._by_question[row] if text not in gold]
      if shown == "none":
        found = []
      elif shown == "shuffled":
        found = self._of_another_article(row)
      elif is_taken:
        others = [text for text in others if not any(said in text[1] for said in self._examples[row]["answers"])]
        found = others[: self._top_k]  # as many as elsewhere: their number must not tell the answer
      else:
        found = [*gold, *others][: max(self._top_k, len(gold))]
      texts = [found[i] for i in rng.permutation(len(found))]
      made = self._conversation(row, texts, answer=UNKNOWN if is_taken else None)
      more = [] if is_taken else self._further_turns(row, unanswerable, rng)
      return {**made, "messages": [*made["messages"], *more]}

    return Task(f"articles_train_{shown}", range(ENDLESS), make, exact_or_unknown, f1_or_unknown)

  def _has_answer(self, row: int) -> bool:
    return bool(self._examples[row]["answers"])

  def _further_turns(self, row: int, unanswerable: float, rng: np.random.Generator) -> list[dict[str, str]]:
    """Return more questions about the gold passage of a row, with their answers; a share of them has none."""
    gold = set(self._gold[row])
    others = [other for other in self._about[self._gold[row][0]] if other != row and gold.issuperset(self._gold[other])]
    wanted = [other for other in others if self._has_answer(other) or rng.random() < unanswerable]
    chosen = rng.permutation(wanted)[: self._further].tolist()
    asked = [(self._examples[other]["question"], _answer(self._examples[other])) for other in chosen]
    roles = "user", "assistant"
    return [{"role": role, "content": text} for turn in asked for role, text in zip(roles, turn, strict=True)]

  def _conversation(
    self, row: int, texts: Sequence[tuple[str, str]], plain: bool = False, answer: str | None = None
  ) -> dict[str, Any]:
    example = self._examples[row]
    documents = [{"title": title, "content": content} for title, content in texts]
    question, said = example["question"], answer or _answer(example)
    if plain:
      listed = [f"(Title: {title}) {content}" for title, content in texts]
      question, documents = prompt(DocumentQuestion(question, (), "", ()), listed), []
    made = create_rag_training_example(question, said, documents, system=None if plain else INSTRUCTION)
    return {**made, "id": example["id"], "answers": example["answers"]}

  @cached_property
  def _by_question(self) -> dict[int, list[tuple[str, str]]]:
    """The passages that the retriever finds for each question, some more than are shown."""
    asked = [example["question"] for example in self._examples]
    found = self._retriever.retrieve_batch(asked, self._top_k + SPARE)
    if len(asked) >= ALARM and not any(found):
      raise ValueError(
        f"nothing was found for any of {len(asked)} questions in {len(self._retriever):,} documents: is it the right "
        "knowledge base?"
      )
    return {row: [(d.title, d.content) for d in documents] for row, documents in enumerate(found)}

  @cached_property
  def _about(self) -> dict[tuple[str, str], list[int]]:
    """The questions of each first gold passage."""
    rows: dict[tuple[str, str], list[int]] = {}
    for row in self._rows:
      rows.setdefault(self._gold[row][0], []).append(row)
    return rows

  def _found(self, row: int) -> list[tuple[str, str]]:
    return self._by_question[row][: self._top_k]

  def _of_another_article(self, row: int) -> list[tuple[str, str]]:
    """Return what was found for the next question, half of all further on, whose passages are not those of this one."""
    n, gold = len(self._rows), set(self._gold[row])
    others = (self._rows[(self._places[row] + n // 2 + i) % n] for i in range(n))
    title = lambda row: self._gold[row][0][0]
    return next(self._found(o) for o in others if title(o) != title(row) and not gold & set(self._found(o)))

  def _rng(self, *stream: int) -> np.random.Generator:
    return np.random.default_rng([self._seed, *stream])


def _answer(example: Conversation) -> str:
  return next(iter(example["answers"]), UNKNOWN)


def _said(completion: str) -> str:
  """Return an answer as SQuAD scores it, where not to know is the empty answer."""
  return "" if normalize_answer(completion) == normalize_answer(UNKNOWN) else completion


def exact_or_unknown(conversation: Conversation, completion: str) -> float:
  """Score an answer by exact match; UNKNOWN is right where no answer is."""
  return exact_match(_said(completion), conversation["answers"])


def f1_or_unknown(conversation: Conversation, completion: str) -> float:
  """Score an answer by the F1 of SQuAD; UNKNOWN is right where no answer is."""
  return squad_f1(_said(completion), conversation["answers"])

"""Questions about invented countries, whose documents are retrieved: a task that no weights can answer by heart.

Every world has countries of its own, with a document for each of their facts. A question is asked beside the documents
that a retriever finds for it in its world, so distractors are real: other facts of the same country, and the same fact
of others. Names are pairs of words; names of `valid` and `test` never occur in training, wordings of each in no other
split; their words do, some of them only where a training has noise and reversed questions.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np

from selfrag_jax.metrics.answers import exact_match
from selfrag_jax.retrieval.base import BaseRetriever, create
from selfrag_jax.retrieval.document import Document
from selfrag_jax.tasks.country_wordings import RELATIONS, REVERSED, UNKNOWN, noisy, vocabulary
from selfrag_jax.tasks.facts import FIRST, HELD_OUT, LAST, SPLITS
from selfrag_jax.tasks.rag import Shown, show
from selfrag_jax.tasks.task import Conversation, Task
from selfrag_jax.text.rag_prompts import create_rag_training_example
from selfrag_jax.text.tokenizer import WordTokenizer

ENDLESS = 2**31 - 1  # questions of a training
WORLD, SHOWN, ORDER = 0, 1, 2  # keep the random numbers of different purposes apart


class World(NamedTuple):
  """Documents, and questions with the number of the document that answers each."""

  documents: list[Document]
  questions: list[tuple[str, int]]

  def value(self, place: int) -> str:
    """Return the value that a document states."""
    return self.documents[place].metadata["value"]

  def rivals(self, place: int) -> list[int]:
    """List the documents of the same country or the same relation as a document."""
    n = len(RELATIONS)
    same = lambda other: other // n == place // n or other % n == place % n
    return [other for other in range(len(self.documents)) if other != place and same(other)]

  def turn(self, place: int, of: "Countries", rng: np.random.Generator) -> tuple[str, str]:
    """Return a question that a document answers, in any wording of a training, and its answer."""
    document, name = self.documents[place], list(RELATIONS)[place % len(RELATIONS)]
    if of.reversed and rng.random() < of.reversed:
      question = REVERSED[rng.integers(len(REVERSED))].replace("{r}", name)
      return question.format(v=self.value(place)), document.title
    by = "authors" if of.authors and rng.random() < of.authors else "train"
    wordings = RELATIONS[name][by].questions
    return noisy(wordings[rng.integers(len(wordings))], of.noise, rng).format(c=document.title), self.value(place)


class Asked(NamedTuple):
  """A question about a world, the place of the document that answers it, and a search for it in its world."""

  world: World
  question: str
  place: int
  search: Callable[[], list[int]]


@dataclasses.dataclass(frozen=True)
class Countries:
  """Worlds of `n_countries` each, a function of the seed, the split and the number of the world.

  `retriever` and `top_k` find the documents. Raises ValueError for more names than are held out.
  """

  conditions: ClassVar[tuple[str, ...]] = ("retrieved", "edited", "missing", "none", "shuffled")
  n_countries: int = 12
  retriever: str = "bm25"
  top_k: int = 5
  further: int = 9  # questions after the first one of a conversation of training
  near: float = 0.0  # the share of these conversations with documents of the same relation or country
  noise: float = 0.0  # in a training, the share of words that are left out or replaced, and of sentences turned round
  reversed: float = 0.0  # the share of the further questions that give a value and ask for its country
  alike: float = 0.0  # the share of the worlds of a training whose names share their few words
  authors: float = 0.0  # the share of the statements and questions of a training that authors wrote
  seed: int = 0

  def __post_init__(self):
    most = len(FIRST) * len(LAST) // HELD_OUT // (1 + len(RELATIONS))
    if not 2 <= self.n_countries <= most:
      raise ValueError(f"n_countries = {self.n_countries} must lie in [2, {most}]: each needs names that are held out")

  @property
  def per_world(self) -> int:
    """The number of questions about a world."""
    return self.n_countries * len(RELATIONS)

  @property
  def tokenizer(self) -> WordTokenizer:
    return WordTokenizer(vocabulary())

  def world(self, split: str, number: int, edited: bool = False) -> World:
    """Draw a world; `edited` changes the value in every document, and nothing else."""
    if split not in SPLITS:
      raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    rng, n, r = self._rng(WORLD, split, number), self.n_countries, len(RELATIONS)
    names = _names(split == "train")
    if split == "train" and self.alike and rng.random() < self.alike:
      size = max(14, math.ceil((3 * n * (1 + r)) ** 0.5))  # so few words make about twice the names that are needed
      few = {word for words in (FIRST, LAST) for word in rng.choice(words, size, replace=False)}
      names = [name for name in names if few.issuperset(name.split())]
    names = [names[i] for i in rng.permutation(len(names))[: n * (1 + r)]]
    countries, values = names[:n], names[n:]
    documents, questions = [], []
    for i, country in enumerate(countries):
      for j, wordings in enumerate(RELATIONS.values()):
        of = "authors" if split == "train" and self.authors and rng.random() < self.authors else split
        said, asked = (kind[rng.integers(len(kind))] for kind in wordings[of])
        noise = self.noise if split == "train" else 0.0
        statement, question = noisy(said, noise, rng), noisy(asked, noise, rng)
        at = i * r + j
        value = values[(at + 1) % len(values)] if edited else values[at]
        content = statement.format(c=country, v=value)
        documents.append(Document(str(at), country, content, {"value": value}))
        questions.append((question.format(c=country), at))
    return World(documents, questions)

  def task(self, split: str, n: int, *, edited: bool = False, unanswerable: float = 0.0) -> Task:
    """Return the first `n` questions of a split, each with the documents that were retrieved for it.

    The retriever sees the documents of the question's world; `edited` gives every document another value. The share
    `unanswerable` of the questions is asked where the document that answers is missing: the answer is UNKNOWN.
    """

    def make(asked: Asked, rng: np.random.Generator) -> Conversation:
      known = rng.random() >= unanswerable
      places = [place for place in asked.search() if known or place != asked.place][: self.top_k]
      return _conversation(asked, rng.permutation(places), known)

    return self._task(split, n, make, edited)

  def questions(self, split: str, n: int, condition: str) -> Task:
    """Return the first `n` questions of a split under a condition.

    The documents are `retrieved`; `edited`, each with another value; `missing` the one that answers; `none`; or those
    of a question about another world, `shuffled`.
    """
    more = self.per_world  # the last questions get the documents of the world after theirs
    edited, missing = condition == "edited", float(condition == "missing")
    task = self.task(split, n + more, edited=edited, unanswerable=missing)
    return (show(task, condition, more) if condition in ("none", "shuffled") else task)[:n]

  def training(self, shown: Shown, unanswerable: float) -> Task:
    """Return the conversations of the training, which never end; see `task` for the share `unanswerable`.

    The first question of a conversation is followed by others about its documents, drawn with replacement: were each
    document asked for once, the last answers would follow from those before. The document that answers the first one is
    added where it was not found. The share `unanswerable` of the others asks, too, for what no shown document states,
    where a rival of one is not shown.
    """

    def make(asked: Asked, rng: np.random.Generator) -> Conversation:
      world, known = asked.world, rng.random() >= unanswerable
      # beside rivals, only country and relation together tell which document answers
      near = self.near and rng.random() < self.near
      found = rng.permutation(world.rivals(asked.place)).tolist() if near else asked.search()
      others = [place for place in found if place != asked.place][: self.top_k - known]
      shown = [*others, *([asked.place] if known else [])]
      conversation = _conversation(asked, rng.permutation(shown), known)
      turns = []
      for place in rng.choice(shown, self.further):
        # a rival of a shown document: that its country, or its relation, stands there does not make it known
        hidden = [rival for rival in world.rivals(place) if rival not in shown] if rng.random() < unanswerable else []
        question, value = world.turn(rng.choice(hidden) if hidden else place, self, rng)
        answer = UNKNOWN if hidden else value
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
      return {**conversation, "messages": [*conversation["messages"], *turns]}

    return show(self._task("train", ENDLESS, make), shown, self.per_world)

  def of_phase(self, name: str) -> "Countries":
    """Return what phase `pretrain`, `choose` or `rag` reads.

    A fresh model that meets all variety at once learns to choose late, or never: the first two have no noise and no
    authors, and `choose` has rivals alone.
    """
    plain = dataclasses.replace(self, noise=0.0, authors=0.0)
    rivals = dataclasses.replace(plain, near=1.0, reversed=0.0, alike=0.0)
    return {"pretrain": plain, "choose": rivals, "rag": self}[name]

  def size(self, split: str) -> int | None:
    """Return None: the questions of a split never end."""
    return None

  def _task(
    self, split: str, n: int, make: Callable[[Asked, np.random.Generator], Conversation], edited: bool = False
  ) -> Task:
    """Make each conversation when it is asked for: a training draws few from a world."""
    world = lru_cache(64)(lambda number: self.world(split, number, edited))

    @lru_cache(64)
    def retriever(number: int) -> BaseRetriever:
      retriever = create(self.retriever)
      retriever.add_documents(world(number).documents)
      return retriever

    def find(index: int) -> Conversation:
      number, at = divmod(index, self.per_world)
      # neighbours in a batch ask about different countries
      order = self._rng(ORDER, split, number).permutation(self.per_world).tolist()
      question, place = world(number).questions[order[at]]

      def search() -> list[int]:
        """Find documents, and any others where fewer share a word with the question: their number tells nothing."""
        found = [int(document.id) for document in retriever(number).retrieve(question, self.top_k + 1)]
        return list(dict.fromkeys([*found, *order]))[: self.top_k + 1]

      return make(Asked(world(number), question, place, search), self._rng(SHOWN, split, number, order[at]))

    right = lambda conversation, completion: exact_match(completion, conversation["answers"])
    return Task(f"countries_{split}", range(n), find, right)

  def _rng(self, stream: int, split: str, *numbers: int) -> np.random.Generator:
    return np.random.default_rng([self.seed, stream, SPLITS.index(split), *numbers])


def _conversation(asked: Asked, places: Iterable[int], known: bool) -> Conversation:
  world = asked.world
  shown = [{"title": d.title, "content": d.content} for d in (world.documents[place] for place in places)]
  answer = world.value(asked.place) if known else UNKNOWN
  example = create_rag_training_example(asked.question, answer, shown, id=f"{asked.place}")
  return {**example, "answers": (answer,), "gold": world.documents[asked.place].content}


@lru_cache(2)
def _names(trained: bool) -> list[str]:
  """List the names for training, or those that are held out: every fourth diagonal of the grid of pairs of words."""
  grid = [(i + j, f"{first} {last}") for i, first in enumerate(FIRST) for j, last in enumerate(LAST)]
  return [name for diagonal, name in grid if (diagonal % HELD_OUT != 0) == trained]

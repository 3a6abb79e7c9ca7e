"""A search task of multi-hop questions over one shared corpus of passages."""

import dataclasses
from collections import Counter
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from selfrag_jax.checked import Checked, Share
from selfrag_jax.metrics.answers import normalize_answer
from selfrag_jax.ragged import pad_rows
from selfrag_jax.tasks.datasets import QAFolder, Question
from selfrag_jax.tasks.demonstrations import PassageDemonstrations, whole_words
from selfrag_jax.tasks.search_task import (
  NOTICE,
  SPLITS,
  STRATEGIES,
  Corpus,
  Indices,
  SearchBatch,
  ShuffledEpochs,
)
from selfrag_jax.text.chat import CHATML, ChatTemplate, document_body, render_for_completion
from selfrag_jax.text.tokenizer import Tokenizer

INSTRUCTION = (
  "Answer the question. Search for passages first, as often as you need: each search shows what it found. "
  "Then give a short answer."
)
SPLIT_STREAM, EPOCH_STREAM, DEMONSTRATION_STREAM = range(3)  # keep the random numbers of different purposes apart


@dataclasses.dataclass(frozen=True)
class Parts(Checked):
  """The share of the questions in each split."""

  sft: Share = 0.4
  train: Share = 0.2
  valid: Share = 0.1
  test: Share = 0.3

  def __post_init__(self):
    super().__post_init__()
    if not np.isclose(sum(vars(self).values()), 1):
      raise ValueError(f"the shares {vars(self)} must add up to 1")


class PassageSearch:
  """Questions that share one corpus, split by a seed into disjoint parts.

  The splits are "sft" for demonstrations and "train" for reinforcement, both endless, with every epoch shuffled anew;
  "valid" and "test". A policy that was shown how a question is answered answers it the same way every time, and
  reinforcement finds no difference to learn from: therefore "train" has questions of its own.

  Passage i is in slot i; if it exceeds `document_tokens`, only its head is kept, and `cut_passages` counts it. No
  question is cut: `dropped_questions` counts those whose prompt exceeds `prompt_tokens`, `unanswered_questions` those
  without an answer.

  A passage is found by its title and the kept part of its text, or by its title alone (`index`). The share `cloze` of
  the gold demonstrations asks for a name or a number that is left out of a sentence of a random passage, the share
  `bridge` by way of another passage that names this one: these never run out, whereas the sft questions are few and
  soon memorised. They also use passages of held-out questions, never a question, and never two that a held-out
  question needs as a bridge.

  Every question is tested once if `fold` runs from 0 until the test parts, one behind the other, are all questions.

  Where a rule writes the first query (`first_query`), the first search of every demonstration is for its question. It
  finds the passage that shares the most and the rarest words with it; for a question that is made of passages, the
  first of these, or in MISS_RATE of the searches the most similar one that does not help. Of `documents_per_search`
  passages that a demonstration shows, the others are those most similar to the query, but none of another search.
  Where the name of the next passage stands in the last one that was found, the query is this name (`queries` =
  "name"), or all names there that the question does not hold ("names"), as far as there is room.

  Raises ValueError if a part is empty, and if a title leaves no room for one word of its passage or query.
  """

  notice = NOTICE

  def __init__(
    self,
    data: QAFolder,
    tokenizer: Tokenizer,
    template: ChatTemplate = CHATML,
    *,
    document_tokens: int = 96,
    prompt_tokens: int = 96,
    max_query_tokens: int = 24,
    index: Literal["title_text", "title"] = "title_text",
    parts: Parts = Parts(),
    cloze: float = 0.0,
    bridge: float = 0.0,
    fold: int = 0,
    first_query: Literal["policy", "question"] = "policy",
    documents_per_search: int = 1,
    queries: Literal["name", "names"] = "name",
    seed: int = 0,
  ):
    if index not in ("title_text", "title"):
      raise ValueError(f"index must be title_text or title, got {index!r}")
    self.tokenizer, self.template, self.seed = tokenizer, template, seed
    self.document_tokens, self.prompt_tokens = document_tokens, prompt_tokens
    self.documents = [{"title": passage.title, "content": self._shown(*passage[1:])} for passage in data.passages]
    shown = [document["content"] for document in self.documents]
    self.cut_passages = sum(passage.text != text for passage, text in zip(data.passages, shown, strict=True))
    self.corpus = self._make_corpus(index)

    prompts = {question: self._prompt(question.text) for question in data.questions}
    self._prompts = {question: ids for question, ids in prompts.items() if len(ids) <= prompt_tokens}
    self.dropped_questions = len(prompts) - len(self._prompts)
    self._question_tokens = max((len(tokenizer.encode(question.text)) for question in self._prompts), default=0)
    self._gold_width = max((len(question.gold) for question in self._prompts), default=0)
    self.unanswered_questions = data.unanswered
    self._parts = self._split(parts, fold)
    self._demonstrations = PassageDemonstrations(
      self.documents,
      tokenizer,
      [question.gold for split in ("valid", "test") for question in self._parts[split]],
      max_query_tokens=max_query_tokens,
      cloze=cloze,
      bridge=bridge,
      first_query=first_query,
      documents_per_search=documents_per_search,
      queries=queries,
    )
    self._epochs = {
      split: ShuffledEpochs(self._parts[split], seed, EPOCH_STREAM, SPLITS.index(split)) for split in ("sft", "train")
    }
    self.chance = self._best_constant()

  def size(self, split: str) -> int:
    """Return the number of different questions. Raises ValueError for an unknown split."""
    if split not in self._parts:
      raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    return len(self._parts[split])

  def batch(self, split: str, indices: Indices) -> SearchBatch:
    """Return the questions and the shared corpus; gold slots are padded with -1 to the most that any question has.

    Raises ValueError for a negative index, and for one past the end of valid or test.
    """
    chosen = self._choose(split, indices)
    prompts, lengths = pad_rows([self._prompts[question] for question in chosen], self.prompt_tokens)
    questions = pad_rows([self.tokenizer.encode(question.text) for question in chosen], self._question_tokens)
    gold, _ = pad_rows([question.gold for question in chosen], self._gold_width, pad=-1)
    zeros, answers = np.zeros(len(chosen), np.int32), [question.answers for question in chosen]
    return SearchBatch(np.asarray(indices), prompts, lengths, *questions, gold, zeros, zeros, answers, self.corpus)

  def texts(self, split: str, indices: Indices) -> list[str]:
    """Return the texts of the questions."""
    return [question.text for question in self._choose(split, indices)]

  def demonstration(self, split: str, index: int, strategy: str, max_hops: int) -> dict[str, Any]:
    """Write a conversation about question `index` of `split`; a pure function of its arguments and the seed.

    "gold" reads the first `max_hops` gold passages in the order of the hops and gives the first answer; shares of the
    indices of `sft` get a question that is made of passages instead. A query has only words of the question or of an
    earlier passage: the passage's name if they contain it, else the words that best tell the passage from the others.
    As far as `max_hops` has room, MISS_RATE of the searches are preceded by one with fewer words, which finds the most
    similar wrong passage. "random" teaches the format alone: 1..max_hops searches for titles drawn uniformly, and the
    answer of another sft question; OVERRUN_RATE of the conversations search once too often and get NOTICE.

    Raises ValueError for an unknown strategy or max_hops < 1.
    """
    if strategy not in STRATEGIES or max_hops < 1:
      raise ValueError(
        f"strategy must be one of {', '.join(STRATEGIES)} and max_hops >= 1, got {strategy!r} and {max_hops}"
      )
    [question] = self._choose(split, [index])
    rng = self._rng(DEMONSTRATION_STREAM, SPLITS.index(split), index)
    if strategy == "gold":  # beyond the split sft, the question itself is wanted
      question, searches = self._demonstrations.gold(question, max_hops, rng, may_make=split == "sft")
      answer = question.answers[0]
    else:
      searches = self._demonstrations.random(question, max_hops, rng)
      others = self._parts["sft"]
      pair = [others[i] for i in rng.choice(len(others), 2, replace=False)]
      answer = next(other for other in pair if other != question).answers[0]
    turn = self._demonstrations.turn(question, searches, answer, max_hops, rng)
    return {"messages": [*_messages(question.text), turn]}

  def _shown(self, title: str, text: str) -> str:
    """Return the head of `text` that fits into a document."""
    return whole_words(
      text,
      lambda head: len(document_body(self.tokenizer, {"title": title, "content": head})),
      self.document_tokens,
      f"the passage {title!r}: raise document_tokens",
    )

  def _make_corpus(self, index: str) -> Corpus:
    texts = [doc["title"] if index == "title" else f"{doc['title']}\n{doc['content']}" for doc in self.documents]
    keys = [self.tokenizer.encode(text) for text in texts]
    bodies = [document_body(self.tokenizer, document) for document in self.documents]
    return Corpus(
      *pad_rows(keys, max(map(len, keys))),
      *pad_rows(bodies, self.document_tokens),
      np.zeros(len(keys), np.int32),
    )

  def _prompt(self, text: str) -> list[int]:
    return render_for_completion(self.tokenizer, {"messages": _messages(text)}, self.template)

  def _split(self, shares: Parts, fold: int) -> dict[str, list[Question]]:
    kept, ratios = list(self._prompts), vars(shares)
    ends = [round(end * len(kept)) for end in np.cumsum(list(ratios.values()))[:-1]]
    tested = len(kept) - ends[-1]
    order = np.roll(self._rng(SPLIT_STREAM).permutation(len(kept)), fold * tested)
    shuffled = [kept[i] for i in order]
    parts = [shuffled[start:end] for start, end in pairwise([0, *ends, len(kept)])]
    # the answer of a random demonstration comes from another question
    if len(parts[0]) < 2 or not all(parts):
      raise ValueError(
        f"{len(kept)} questions cannot be split by {ratios}, which must leave 2 for sft and 1 for each "
        f"of train, valid and test; {self.dropped_questions} more had prompts longer than prompt_tokens = "
        f"{self.prompt_tokens}"
      )
    if fold < 0 or fold * tested >= len(kept):
      raise ValueError(f"fold = {fold}: {-(-len(kept) // tested)} folds have tested all of the {len(kept)} questions")
    return dict(zip(ratios, parts, strict=True))

  def _best_constant(self) -> float:
    """Return the best exact match on the held-out questions that one constant answer from training reaches."""
    held_out = [*self._parts["valid"], *self._parts["test"]]
    right = Counter(answer for question in held_out for answer in set(map(normalize_answer, question.answers)))
    seen = [*self._parts["sft"], *self._parts["train"]]
    known = {normalize_answer(answer) for question in seen for answer in question.answers}
    return max(right[answer] for answer in known) / len(held_out)

  def _choose(self, split: str, indices: Indices) -> list[Question]:
    size, epochs = self.size(split), self._epochs.get(split)
    end = size if epochs is None else float("inf")
    if wrong := [int(i) for i in indices if not 0 <= i < end]:
      raise ValueError(f"index {wrong[0]} of {split} is outside [0, {end})")
    questions = self._parts[split] if epochs is None else epochs
    return [questions[i] for i in indices]

  def _rng(self, stream: int, *counters: int) -> np.random.Generator:
    return np.random.default_rng([self.seed, stream, *counters])


def _messages(question: str) -> list[dict[str, Any]]:
  return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]

"""Demonstrations of how questions over passages are answered: which searches find what, and what they show."""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import permutations
from typing import Any, Literal, NamedTuple

import numpy as np

from selfrag_jax.retrieval.multi_hop import names_in
from selfrag_jax.tasks.cloze import bridge_question, bridges, cloze_question, named
from selfrag_jax.tasks.datasets import Question
from selfrag_jax.tasks.search_task import OVERRUN_RATE, search_turn
from selfrag_jax.text.tokenizer import Tokenizer

QUERY_WORDS = 6
MISS_RATE = 0.25  # of the gold searches fail at first: a policy that never saw a failure repeats a failed search
# words that begin a sentence, and no name
_OPENING = re.compile(
  r"\A(?:The|A|An|In|On|At|By|For|From|He|She|It|They|His|Her|Its|This|These|As|After|When|While|With|Since)\b"
  r"\s*(?:(?:of|the|de|and)\s+)*"
)
_DISAMBIGUATION = re.compile(r"\s*\([^()]*\)$")


class Searches(NamedTuple):
  """The queries of a demonstration, and the passage that each of them finds."""

  queries: list[str]
  passages: list[int]


class PassageDemonstrations:
  """Writes the searches and the answer of demonstrations over passages; `PassageSearch` tells what they are.

  `held_out` are the gold passages of each held-out question: no bridge joins two of them, no query behind one of them
  names another, and no two are shown beside each other. Raises ValueError for wrong values, and if a title leaves no
  room for one word of its query.
  """

  def __init__(
    self,
    documents: Sequence[dict[str, str]],
    tokenizer: Tokenizer,
    held_out: Collection[Sequence[int]],
    *,
    max_query_tokens: int,
    cloze: float,
    bridge: float,
    first_query: Literal["policy", "question"],
    documents_per_search: int,
    queries: Literal["name", "names"],
  ):
    if min(cloze, bridge) < 0 or cloze + bridge > 1:
      raise ValueError(f"cloze and bridge must be shares in [0, 1] that add up to at most 1, got {cloze} and {bridge}")
    if queries not in ("name", "names"):
      raise ValueError(f"queries must be name or names, got {queries!r}")
    if documents_per_search < 1:
      raise ValueError(f"documents_per_search must be at least 1, got {documents_per_search}")
    self.documents, self.tokenizer, self.max_query_tokens = documents, tokenizer, max_query_tokens
    self._cloze_share, self._bridge_share = cloze, bridge
    self._first_query: Literal["policy", "question"] = first_query
    self._per_search, self._all_names = documents_per_search, queries == "names"
    self._words = [set(_words(_said(document))) for document in documents]
    self._frequency = Counter(word for words in self._words for word in words)
    # whoever writes a query cannot know that the title has a disambiguation such as "Medici (board game)"
    self._names = [_DISAMBIGUATION.sub("", doc["title"]) or doc["content"] for doc in documents]
    self._name_queries = [self._query_head(name) for name in self._names]
    self._texts = [document["content"] for document in documents]
    self._partners: dict[int, set[int]] = {}  # that a held-out question needs beside a passage
    for one, other in {pair for gold in held_out for pair in permutations(gold, 2)}:
      self._partners.setdefault(one, set()).add(other)
    pairs = bridges(self._names, self._texts) if bridge else []
    self._bridges = [(first, second) for first, second in pairs if second not in self._partners.get(first, ())]

  def gold(
    self, question: Question, max_hops: int, rng: np.random.Generator, *, may_make: bool
  ) -> tuple[Question, Searches]:
    """Return searches for the gold passages of a question, or of one that is made of passages, and the question."""
    drawn = rng.random()
    made = self._made(drawn, rng) if may_make else None
    asked, found = made or question, []
    if self._first_query == "question":
      found = [self._found_first(question) if made is None else self._found_for_made(made, max_hops, rng)]
    return asked, self._gold_searches(asked, found, max_hops, rng)

  def random(self, question: Question, max_hops: int, rng: np.random.Generator) -> Searches:
    """Return searches for titles drawn uniformly, at times one more than the budget allows."""
    overrun = rng.random() < OVERRUN_RATE
    n_searches = max_hops + 1 if overrun else rng.integers(1, max_hops, endpoint=True)
    passages = rng.integers(len(self.documents), size=n_searches).tolist()
    queries = [self._name_queries[passage] for passage in passages]
    if self._first_query == "question":
      queries[0], passages[0] = question.text, self._found_first(question)
    return Searches(queries, passages)

  def turn(
    self, question: Question, searches: Searches, answer: str, max_hops: int, rng: np.random.Generator
  ) -> dict[str, Any]:
    """Write the assistant's message."""
    shown = self._shown_by(searches, question.gold, rng)
    return search_turn(searches.queries, shown, answer, max_hops, self._first_query)

  def _query_head(self, query: str) -> str:
    return whole_words(
      query,
      lambda head: len(self.tokenizer.encode(head)),
      self.max_query_tokens,
      f"the query {query[:80]!r}: raise max_query_tokens",
    )

  def _gold_searches(
    self, question: Question, first: Sequence[int], max_hops: int, rng: np.random.Generator
  ) -> Searches:
    """Return the queries and what they find; `first` is what the question itself has found, if it is a query."""
    queries, found = [question.text] * len(first), [*first]
    read = [question.text, *(_said(self.documents[passage]) for passage in first)]
    left = max_hops - len(found)
    gold = [passage for passage in question.gold if passage not in found][:left]
    spare = left - len(gold)
    for passage in gold:
      name = named(self._names[passage])
      telling = self._telling_words("\n".join(read), passage)
      is_named = any(name.search(text) for text in read)
      query = self._name_queries[passage] if is_named else self._query_head(" ".join(telling))
      if self._all_names and found:
        query = self._names_query(question.text, found[-1], passage) or query
      attempt = self._some_words(telling, rng)
      wrong = self._others([*question.gold, *found])
      if rng.random() < MISS_RATE and spare and wrong and attempt.lower() not in ("", query.lower()):
        queries.append(attempt)
        found.append(self._most_similar(attempt, wrong))
        read.append(_said(self.documents[found[-1]]))
        spare -= 1
      queries.append(query)
      found.append(passage)
      read.append(_said(self.documents[passage]))
    return Searches(queries, found)

  def _shown_by(self, searches: Searches, gold: Sequence[int], rng: np.random.Generator) -> list[list[dict[str, str]]]:
    """Return what each search shows: its passage, at any place among the most similar ones that help no search."""
    partners = [other for passage in searches.passages for other in self._partners.get(passage, ())]
    shown, left = [], self._others([*searches.passages, *gold, *partners])
    for query, passage in zip(*searches, strict=True):
      found: list[int] = []
      while left and len(found) + 1 < self._per_search:
        found.append(self._most_similar(query, left))
        left = left - {found[-1]} - self._partners.get(found[-1], set())
      if found:
        found.insert(rng.integers(len(found), endpoint=True), passage)
      shown.append([self.documents[each] for each in found or [passage]])
    return shown

  def _made(self, drawn: float, rng: np.random.Generator) -> Question | None:
    """Return a question that is made of passages, for a share of the numbers that are drawn from [0, 1)."""
    if drawn < self._cloze_share:
      return cloze_question(self._texts, rng)
    if drawn < self._cloze_share + self._bridge_share:
      return bridge_question(self._names, self._texts, self._bridges, rng)
    return None

  def _telling_words(self, read: str, passage: int) -> list[str]:
    """Return the rarest words that a text shares with a passage, in the order and the spelling of the text."""
    words: dict[str, str] = {}
    for word in re.findall(r"\w+", read):
      words.setdefault(word.lower(), word)
    shared = words.keys() & self._words[passage] or words.keys()
    in_order = [word for word in words if word in shared]
    rarest = set(sorted(in_order, key=self._frequency.__getitem__)[:QUERY_WORDS])
    return [words[word] for word in in_order if word in rarest]

  def _names_query(self, question: str, found: int, passage: int) -> str:
    """Return the names in the text of a passage that the question does not hold, that of the next passage in its place.

    Of more names than there is room for, the last ones are left out. Without that of the next passage, an empty text.
    """
    text, needed = self._texts[found], self._name_queries[passage]
    if (place := named(self._names[passage]).search(text)) is None:
      return ""
    hidden = [named(self._names[other]) for other in self._partners.get(found, ())]
    is_new = lambda name: name and name.lower() not in question.lower() and not any(h.search(name) for h in hidden)
    before, after = (
      [name for each in names_in(part) if is_new(name := _OPENING.sub("", each))]
      for part in (text[: place.start()], text[place.end() :])
    )
    names = list(dict.fromkeys([*before, needed, *after]))
    chosen, query = {needed}, needed
    for name in names:
      longer = ", ".join(each for each in names if each in chosen or each == name)
      if len(self.tokenizer.encode(longer)) <= self.max_query_tokens:
        chosen, query = chosen | {name}, longer
    return query

  def _some_words(self, words: list[str], rng: np.random.Generator) -> str:
    """Return some of the words, but not all, in their order; an empty text for a single word."""
    if len(words) < 2:
      return ""
    kept = rng.choice(len(words), rng.integers(1, len(words)), replace=False)
    return self._query_head(" ".join(words[i] for i in sorted(kept)))

  def _others(self, passages: Sequence[int]) -> set[int]:
    return set(range(len(self.documents))) - set(passages)

  def _found_first(self, question: Question) -> int:
    """Return the passage that a demonstration finds for its question."""
    return self._most_similar(question.text, self._others([]))

  def _found_for_made(self, made: Question, max_hops: int, rng: np.random.Generator) -> int:
    """Return the passage that a demonstration finds for a question that is made of passages."""
    wrong = self._others(made.gold)
    is_missed = wrong and len(made.gold) < max_hops and rng.random() < MISS_RATE
    return self._most_similar(made.text, wrong) if is_missed else made.gold[0]

  def _most_similar(self, query: str, passages: set[int]) -> int:
    """Return the passage that shares the most and the rarest words with a query; the first of equals."""
    weights = {word: 1 / self._frequency[word] for word in _words(query) if word in self._frequency}
    score = lambda passage: sum(weight for word, weight in weights.items() if word in self._words[passage])
    return max(sorted(passages), key=score)


def _said(document: dict[str, str]) -> str:
  return f"{document['title']}\n{document['content']}"


def _words(text: str) -> list[str]:
  return re.findall(r"\w+", text.lower())


def whole_words(text: str, length: Callable[[str], int], limit: int, what: str) -> str:
  """Return the longest run of whole words from the start of `text` that has at most `limit` tokens."""
  if length(text) <= limit:
    return text
  ends = [word.end() for word in re.finditer(r"\S+", text)]
  n_words = bisect_right(ends, limit, key=lambda end: length(text[:end]))
  if not n_words:
    raise ValueError(f"{limit} tokens do not hold one word of {what}")
  return text[: ends[n_words - 1]]

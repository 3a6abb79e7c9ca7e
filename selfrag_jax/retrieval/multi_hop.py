"""`MultiHopRetriever`: a retriever that searches several times; a later query is written from what was found before."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from selfrag_jax.memory.filters import Where
from selfrag_jax.memory.scoring import check_k
from selfrag_jax.retrieval.base import BaseRetriever, Hits, create, register
from selfrag_jax.retrieval.composite import CompositeRetriever
from selfrag_jax.retrieval.document import Document
from selfrag_jax.text.words import words

FUNCTION = "function"  # the name in a folder of a rule that was given as a function
# the question, and the new documents of each search so far, best first -> the next query; None: no further search
WriteQuery = Callable[[str, Sequence[Sequence[Document]]], str | None]

_NAME = re.compile(r"\b[A-Z][\w'’-]*(?:\s+(?:(?:of|the|de|and)\s+)*[A-Z][\w'’-]*)*")


def names_in(text: str) -> list[str]:
  """List the names in a text once each, in their order: runs of words that begin with a capital letter."""
  return list(dict.fromkeys(_NAME.findall(text)))


def add_names(question: str, read: Sequence[Sequence[Document]]) -> str | None:
  """Write the question again, with the names in the best new document that nothing read before it holds.

  A document without capitals gives all of its new words instead. None if there is nothing new.
  """
  if not read[-1]:
    return None
  best = f"{read[-1][0].title}. {read[-1][0].content}"
  before = "\n".join([question, *(document.text for found in read[:-1] for document in found[:1])]).lower()
  names = [name for name in names_in(best) if name.lower() not in before]
  known = set(words(before))
  new = names or [word for word in dict.fromkeys(words(best)) if word not in known]
  return f"{question} {' '.join(new)}" if new else None


def add_passage(question: str, read: Sequence[Sequence[Document]]) -> str | None:
  """Write the question and the best new document, for an encoder that was trained on both (arXiv 2009.12756)."""
  return f"{question} {read[-1][0].text}" if read[-1] else None


RULES = {"add_names": add_names, "add_passage": add_passage}


@register("multi_hop")
class MultiHopRetriever(CompositeRetriever):
  """A retriever that shares its `top_k` documents between up to `hops` searches of another retriever.

  The first query is the question; a rule, or a function such as a language model, writes each later query from the
  documents that are new. Results take turns: the best of each search, then the second best, and so on. The `components`
  of a result say in which `hop` it was found, by which `query`, with which `score`.
  """

  def __init__(
    self,
    retriever: BaseRetriever | str = "bm25",
    write_query: WriteQuery | str = "add_names",
    *,
    hops: int = 2,
    retriever_settings: dict[str, Any] | None = None,
  ):
    """Make a retriever from another retriever, and take over its documents if it holds any.

    Args:
      retriever: a retriever, or a retriever's name, with `retriever_settings`.
      write_query: `add_names`, `add_passage`, or a function, which must be given to `load` again. It returns None to
        stop.
      hops: the most searches for a question.

    Raises ValueError for an unknown name and for wrong values.
    """
    first = create(retriever, **retriever_settings or {}) if isinstance(retriever, str) else retriever
    if isinstance(write_query, str) and write_query not in (*RULES, FUNCTION):
      raise ValueError(f"no rule for queries is called {write_query!r}; {', '.join(RULES)}, or a function of your own")
    super().__init__(
      [first],
      retriever=first.name,
      write_query=write_query if isinstance(write_query, str) else FUNCTION,
      hops=check_k(hops, "hops"),
      retriever_settings=first.settings,
    )
    self.first, self._given = first, write_query

  def _write_query(self, question: str, read: Sequence[Sequence[Document]]) -> str | None:
    if self._given == FUNCTION:
      raise ValueError("this retriever was saved with a function; give it again: load(folder, write_query=...)")
    rule = RULES[self._given] if isinstance(self._given, str) else self._given
    return rule(question, read)

  def _search(self, queries: Sequence[str], top_k: int, where: Where | None) -> Hits:
    self._check_parts()
    hops = min(self.settings["hops"], top_k)
    sizes = [top_k // hops + (hop < top_k % hops) for hop in range(hops)]
    read: list[list[list[Document]]] = [[] for _ in queries]
    asked: list[list[str]] = [[query] for query in queries]
    for hop, size in enumerate(sizes):
      going = [i for i in range(len(queries)) if len(asked[i]) > hop]
      enough = sum(sizes[: hop + 1])  # some of these were found before
      found = self.first.retrieve_batch([asked[i][hop] for i in going], enough, where=where)
      for i, documents in zip(going, found, strict=True):
        known = {document.id for earlier in read[i] for document in earlier}
        read[i].append([document for document in documents if document.id not in known][:size])
        if hop + 1 < hops and (query := self._write_query(queries[i], read[i])) is not None:
          asked[i].append(query)
    return _hits(asked, read)

  def _check_encoders(self, replaced: bool) -> None:
    super()._check_encoders(replaced)
    if self._given == FUNCTION:
      self._write_query("", [])  # raises


def by_search(found: Sequence[Document]) -> list[tuple[str | None, list[Document]]]:
  """Group results by the search that found them, each with its query; results of one search are one group, of None."""
  searches: dict[int, tuple[str | None, list[Document]]] = {}
  for document in found:
    said = next((each for each in document.components if "hop" in each), {})
    searches.setdefault(said.get("hop", 0), (said.get("query"), []))[1].append(document)
  return [searches[hop] for hop in sorted(searches)]


def _hits(asked: Sequence[Sequence[str]], read: Sequence[Sequence[Sequence[Document]]]) -> Hits:
  """Let the searches of each question take turns; a score is 1 / the place in that order."""
  found = Hits([], [], [])
  for queries, searches in zip(asked, read, strict=True):
    places = [
      (rank, hop, document) for hop, documents in enumerate(searches) for rank, document in enumerate(documents)
    ]
    places.sort(key=lambda place: place[:2])
    found.ids.append([document.id for _, _, document in places])
    found.scores.append([1 / (1 + at) for at in range(len(places))])
    found.components.append(  # type: ignore[union-attr]
      [({"hop": hop, "query": queries[hop], "rank": rank + 1, "score": d.score},) for rank, hop, d in places]
    )
  return found

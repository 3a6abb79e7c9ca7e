"""A prompt with numbered documents, as many of them as fit into the context, and earlier turns of a conversation."""

import dataclasses
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from selfrag_jax.generate.engine import Engine
from selfrag_jax.memory.records import Chunk
from selfrag_jax.metrics.citations import find_citations
from selfrag_jax.metrics.sentences import sentence_spans
from selfrag_jax.retrieval.document import Document
from selfrag_jax.text.chat import COMPACT
from selfrag_jax.text.special import MAX_DOCUMENTS

DocumentsAs = Literal["text", "tokens"]
Turns = Sequence[Mapping[str, Any]]

UNKNOWN = "I do not know."
INSTRUCTIONS = (
  "Answer the question from the numbered documents. After each sentence, cite the documents that say it by their "
  f"number in brackets, such as [1]. If the documents do not answer the question, say: {UNKNOWN}"
)


@dataclasses.dataclass(frozen=True)
class Source:
  """A document that was shown: its number in citations, and its text as far as it was shown."""

  number: int
  text: str
  title: str = ""
  source: str = ""  # where the text is from: a file or an address
  score: float | None = None  # in the search that found it; higher is better
  is_cited: bool = False
  is_cut: bool = False  # only the beginning of its text was shown
  id: str = ""
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def said(self) -> str:
    """The title and the text, which citations are compared with."""
    return f"{self.title}\n{self.text}" if self.title else self.text


def find_sources(memory: Any, query: str, top_k: int) -> list[Source]:
  """Return the best texts of a retriever, a store or a Self-RAG model. Raises ValueError for another `memory`."""
  if top_k < 1:
    raise ValueError(f"top_k is {top_k}; it must be at least 1")
  if hasattr(memory, "explain"):
    found = memory.explain([query])[0]
  elif hasattr(memory, "retrieve"):
    found = memory.retrieve(query, top_k)
  elif hasattr(memory, "search"):
    found = memory.search(query, top_k)
  else:
    raise ValueError(
      f"a {type(memory).__name__} finds no texts; give a retriever, a RetrievalManager, a MemoryStore or a SelfRAGModel"
    )
  if not isinstance(found, Sequence) or not all(isinstance(each, Document | Chunk) for each in found):
    raise ValueError(f"a {type(memory).__name__} found {found!r:.80}; it must return a list of documents or chunks")
  return as_sources(found[:top_k])


def as_sources(found: Iterable[Document | Chunk]) -> list[Source]:
  """Number documents and chunks from 1 on; those without a text are left out."""
  sources = [_source(each) for each in found]
  said = [source for source in sources if source.text.strip() or source.title.strip()]
  return [dataclasses.replace(source, number=number) for number, source in enumerate(said, 1)]


def _source(found: Document | Chunk) -> Source:
  metadata = found.metadata
  if isinstance(found, Document):
    fields, text = found.fields, found.content
  else:
    fields, text = metadata, found.text
  title, source = str(fields.get("title") or ""), str(fields.get("source") or "")
  return Source(0, text, title, source, found.score, id=found.id, metadata=dict(metadata))


class Prompt(NamedTuple):
  """Token ids, the sources that they show, and how many documents and turns of the history were left out."""

  ids: list[int]
  shown: list[Source]
  dropped: int
  forgotten: int


def make_prompt(
  engine: Engine,
  question: str,
  history: Turns,
  found: Sequence[Source],
  max_new_tokens: int,
  documents_as: DocumentsAs | None,
) -> Prompt:
  """Return a prompt that leaves room for `max_new_tokens` in the context, with as many documents and turns as fit."""
  room = engine.context_tokens - max_new_tokens
  as_tokens = documents_as == "tokens" if documents_as else engine.template is COMPACT
  allowed = found[:MAX_DOCUMENTS] if as_tokens else found
  fixed = [message for message in history[:1] if message.get("role") == "system"]
  turns = list(history[len(fixed) :])

  def render(turns: Turns, shown: Sequence[Source]) -> list[int]:
    show = _as_tokens if as_tokens else _as_text
    return engine.render({"messages": show(fixed, turns, shown, question)})

  # without a document there are no instructions, so the least prompt has an empty one
  least = len(render([], [Source(1, "")] if found else []))
  if least > room:
    raise ValueError(
      f"the question has {least:,} tokens with its instructions, and with max_new_tokens = {max_new_tokens:,} they are "
      f"more than the {engine.context_tokens:,} of the context: shorten it, or lower max_new_tokens"
    )
  bare, turns_room = len(render([], [])), (room - least) // 2 if found else room - least
  starts = [0, *(i for i, turn in enumerate(turns) if i and turn.get("role") == "user"), len(turns)]
  begin = starts[bisect_left(starts, True, key=lambda i: len(render(turns[i:], [])) - bare <= turns_room)]
  turns, forgotten = turns[begin:], begin
  fits = lambda shown: len(render(turns, shown)) <= room
  n = _most(len(allowed), lambda n: fits(allowed[:n]))
  shown = list(allowed[:n])
  if n < len(allowed) and (part := _beginning(allowed[n], lambda source: fits([*shown, source]), is_only=not n)):
    shown.append(part)
  if found and not shown:
    raise ValueError(
      f"no word of the documents fits into the {engine.context_tokens:,} tokens of the context beside the question and "
      f"max_new_tokens = {max_new_tokens:,}: lower it, or shorten the question"
    )
  return Prompt(render(turns, shown), shown, len(found) - len(shown), forgotten)


def _most(n: int, fits: Callable[[int], bool]) -> int:
  """Return the largest number up to n that fits; if one does not, no larger one does."""
  return bisect_left(range(1, n + 1), True, key=lambda i: not fits(i))


def _beginning(source: Source, fits: Callable[[Source], bool], *, is_only: bool) -> Source | None:
  """Return the first sentences of a source that fit; of the only source its first words, if no sentence does."""
  text = source.text
  ends = [[end for _, end in sentence_spans(text)]]
  if is_only:
    ends += [[match.end() for match in re.finditer(r"\S+", text)], list(range(1, len(text)))]
  for places in ends:
    cut = lambda n, places=places: dataclasses.replace(source, text=f"{text[: places[n - 1]]} …", is_cut=True)
    if n := _most(len(places), lambda n, cut=cut: fits(cut(n))):
      return cut(n)
  return None


def _as_text(fixed: Turns, turns: Turns, shown: Sequence[Source], question: str) -> list[Mapping[str, Any]]:
  """Return the messages of a prompt with numbered documents in the user's turn."""
  if not shown:
    return [*fixed, *turns, {"role": "user", "content": question}]
  system = "\n\n".join([*(str(message.get("content")) for message in fixed), INSTRUCTIONS])
  documents = "\n\n".join(f"[{source.number}] {_without_marks(source)}" for source in shown)
  content = f"{documents}\n\nQuestion: {question}"
  return [{"role": "system", "content": system}, *turns, {"role": "user", "content": content}]


def _as_tokens(fixed: Turns, turns: Turns, shown: Sequence[Source], question: str) -> list[Mapping[str, Any]]:
  """Return the messages of a prompt with a retrieval message, which control tokens mark and number."""
  documents = [{"title": source.title, "content": source.text} for source in shown]
  retrieval = [{"role": "retrieval", "documents": documents}] if documents else []
  return [*fixed, *turns, *retrieval, {"role": "user", "content": question}]


def _without_marks(source: Source) -> str:
  """Return a source as a prompt shows it: what looks like a citation there must not pass for the number of another."""
  text, pieces, at = "\n".join([" ".join(source.title.split()), source.text]).strip(), [], 0
  for begin, end, _ in find_citations(text):
    pieces += [text[at:begin], "(", text[begin + 1 : end - 1], ")"]
    at = end
  return "".join([*pieces, text[at:]])

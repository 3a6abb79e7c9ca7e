"""Answers from documents: found, shown to a model as far as they fit, and cited in ways that are checked.

  answer("Where do ships land?", retriever, Engine(load_model("smollm2-135m")))

`answer` works over whatever finds texts: a retriever or `RetrievalManager`, a `MemoryStore` with an encoder, or a
`SelfRAGModel`. Every citation `[n]` of its text names a document that was shown. Small models hardly ever cite, so a
statement without a citation gets the shown documents that support it (the post-hoc citations of ALCE, arXiv
2305.14627), by rules: `selfrag_jax.metrics.rule_checker`.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

from selfrag_jax.cited_prompt import UNKNOWN, DocumentsAs, Prompt, Source, Turns, find_sources, make_prompt
from selfrag_jax.generate.engine import Engine
from selfrag_jax.generate.generation import FinishReason, Generation, GenerationSettings
from selfrag_jax.metrics.abstention import says_unknown
from selfrag_jax.metrics.citations import find_citations, find_support, remove_citations
from selfrag_jax.text.cited_stream import Citation, CitedStream
from selfrag_jax.text.tokenizer import well_formed

Require = Literal["nothing", "sources", "support"]


@dataclasses.dataclass(frozen=True)
class Answer:
  """An answer and what it rests on.

  `text` has checked citations; `written` is what the model wrote. `removed` are the numbers that the model cited and
  that no shown document has. `abstained`: there is no answer in the documents, or the model says so. `dropped`
  counts the documents that were found and not shown, `forgotten` the turns of the history that were not.
  """

  question: str
  text: str
  sources: tuple[Source, ...]
  citations: tuple[Citation, ...]
  removed: tuple[int, ...]
  abstained: bool
  finish_reason: FinishReason
  prompt_tokens: int
  tokens: int
  written: str
  dropped: int = 0
  forgotten: int = 0

  @property
  def turns(self) -> list[dict[str, str]]:
    """The question and the answer as turns of a `history`, without citations, whose numbers mean nothing there."""
    return [{"role": "user", "content": self.question}, {"role": "assistant", "content": remove_citations(self.text)}]

  def to_dict(self) -> dict[str, Any]:
    """Return the answer as a dict for JSON."""
    sources = [{**vars(source), "metadata": dict(source.metadata)} for source in self.sources]
    return {
      **vars(self),
      "sources": sources,
      "citations": [c._asdict() for c in self.citations],
      "removed": [*self.removed],
    }


class AnswerStream:
  """An answer that is being written: iterate over its pieces of text, then read `answer`; see `stream_answer`.

  `sources` are there from the beginning. Leaving the loop early, or `cancel` from any thread, ends the text; `answer`
  has what was written.
  """

  def __init__(self, question: str, prompt: Prompt, generation: Generation | None, *, require: Require, checks: bool):
    self.question, self.sources = question, tuple(prompt.shown)
    self.answer: Answer | None = None
    self._prompt, self._generation = prompt, generation
    self._needs_support, self._checks = require == "support" and checks, checks
    self._stream = CitedStream(len(self.sources), self._attribute)
    self._statements = 0
    self._is_refusal = self._is_supported = self._is_cut_off = False

  def cancel(self) -> None:
    """End the text before its next token."""
    if self._generation is not None:
      self._generation.cancel()

  def __iter__(self) -> Iterator[str]:
    if self.answer is not None:
      return
    if self._generation is None:  # nothing was found
      self.answer = self._finish(UNKNOWN, "stop", abstained=True)
      yield UNKNOWN
      return
    text = held = ""
    try:
      for piece in self._generation:
        held += self._stream.add(piece) if self._checks else piece
        if held and not self._withholds:
          text, piece, held = text + held, held, ""
          yield piece
      reason = self._generation.finish_reason or "stop"
      self._is_cut_off = reason == "cancelled"
      held += self._stream.end() if self._checks else ""
      abstained = self._withholds or self._says_unknown or (reason == "stop" and not text + held)
      piece = UNKNOWN if self._withholds else held
      self.answer = self._finish(text + piece, reason, abstained)
      if piece:
        yield piece
    finally:
      self._generation.cancel()
      if self.answer is None and self._generation.error is None:
        self.answer = self._finish(text, "cancelled", self._says_unknown)

  @property
  def _withholds(self) -> bool:
    """Whether the text must not be given: no statement so far is supported, and one has to be."""
    return self._needs_support and not self._is_supported

  @property
  def _says_unknown(self) -> bool:
    return self._is_refusal and not self._is_supported

  def _attribute(self, statement: str, written: Sequence[int]) -> Sequence[int]:
    """Return the numbers of the documents that a statement shall cite besides those that it cites."""
    self._statements += 1
    if says_unknown(statement):
      self._is_refusal |= self._statements == 1
      return ()
    if self._is_cut_off:
      return ()
    if written and not self._needs_support:
      self._is_supported = True  # the model says so
      return ()
    found = find_support(statement, [source.said for source in self.sources])
    self._is_supported |= bool(found)
    return () if written else found

  def _finish(self, text: str, reason: FinishReason, abstained: bool) -> Answer:
    generation = self._generation
    in_text = {number for _, _, numbers in find_citations(text) for number in numbers} if self._checks else set()
    citations = tuple(citation for citation in self._stream.citations if citation.number in in_text)
    cited = {citation.number for citation in citations}
    return Answer(
      question=self.question,
      text=text,
      sources=tuple(dataclasses.replace(source, is_cited=source.number in cited) for source in self.sources),
      citations=citations,
      removed=tuple(dict.fromkeys(self._stream.removed)),
      abstained=abstained,
      finish_reason=reason,
      prompt_tokens=len(generation.prompt) if generation else 0,
      tokens=sum(generation.mask) if generation else 0,
      written=generation.text if generation else "",
      dropped=self._prompt.dropped,
      forgotten=self._prompt.forgotten,
    )


def answer(
  question: str,
  memory: Any,
  engine: Engine,
  *,
  top_k: int = 5,
  history: Turns = (),
  settings: GenerationSettings | None = None,
  query: str | None = None,
  require: Require = "sources",
  documents_as: DocumentsAs | None = None,
  **changes: Any,
) -> Answer:
  """Answer a question from the best documents for it, with checked citations.

  Args:
    question: a text that is not empty.
    memory: a retriever or `RetrievalManager`, a `MemoryStore` with an encoder, or a `SelfRAGModel`, which finds at most
      the `top_k` of its config.
    engine: the engine of a language model.
    top_k: the most documents to show. Those that do not fit into the context are left out, the last first; if there is
      room, the first of them is shown in part.
    history: earlier turns of the conversation, as `Answer.turns` gives them; the oldest ones are left out until the
      rest takes at most half of the room. A system message in front stays there.
    settings: how the text is written; `changes` are fields of it, such as `max_new_tokens=64`. With a `schema` the text
      stays as it is, without citations.
    query: what to look for (None: the question).
    require: without `sources` (nothing was found), or without `support` (no statement is supported by what was shown),
      the answer is that there is none. `nothing`: without sources, the model answers on its own.
    documents_as: numbered `text` in the user's turn, for chat models; or the `tokens` of a retrieval message, which
      models of `configs/rag.py` have learned. None: tokens for models without a pretrained chat template.

  Raises ValueError for an empty question, for a memory that finds no texts, for a question or documents of which
  nothing fits into the context, and like `Engine.submit`.
  """
  stream = stream_answer(
    question,
    memory,
    engine,
    top_k=top_k,
    history=history,
    settings=settings,
    query=query,
    require=require,
    documents_as=documents_as,
    **changes,
  )
  for _ in stream:
    pass
  assert stream.answer is not None  # an error was raised otherwise
  return stream.answer


def stream_answer(
  question: str,
  memory: Any,
  engine: Engine,
  *,
  top_k: int = 5,
  history: Turns = (),
  settings: GenerationSettings | None = None,
  query: str | None = None,
  require: Require = "sources",
  documents_as: DocumentsAs | None = None,
  **changes: Any,
) -> AnswerStream:
  """Begin an answer as `answer` gives it; the pieces of text come as they are written, with checked citations.

  The documents are found and the prompt is made before this returns; see `answer` for arguments and errors.
  """
  settings = dataclasses.replace(settings or GenerationSettings(), **changes)
  for name, value, allowed in (("require", require, Require), ("documents_as", documents_as, DocumentsAs)):
    if value is not None and value not in get_args(allowed):
      raise ValueError(f"{name} is {value!r}; one of {', '.join(get_args(allowed))}")
  if not isinstance(question, str) or not question.strip() or well_formed(question) != question:
    raise ValueError(f"the question is {question!r:.80}; ask with a text, without half a surrogate pair")
  if settings.tools:
    raise ValueError("answer() searches once, before the text; for tools use Engine.generate_from_conversation")
  found = find_sources(memory, question if query is None else query, top_k)
  if not found and require != "nothing":
    return AnswerStream(question, Prompt([], [], 0, 0), None, require=require, checks=False)
  prompt = make_prompt(engine, question, history, found, settings.max_new_tokens, documents_as)
  [generation] = engine.submit(prompt.ids, settings)
  checks = settings.schema is None and bool(found)
  return AnswerStream(question, prompt, generation, require=require, checks=checks)

"""Queries that a language model writes for the later searches of a question."""

from collections.abc import Sequence

from selfrag_jax.generate.engine import Engine
from selfrag_jax.retrieval.document import Document
from selfrag_jax.text.rag_prompts import format_documents_for_prompt

ASK = "Which name or fact is still missing to answer the question? Write what to search for next, in a few words."


class QueryWriter:
  """Writes the next query with an engine's model: a `write_query` of `MultiHopRetriever` and of `MultiHopRAGTask`.

  The model is shown the question and the best new documents of each search, `documents` of each, the oldest left out
  first where they do not fit into its context. A search looks for the question and for what it writes, or for that
  alone (`with_question=False`); it ends where the model writes nothing, or nothing new was found.
  """

  def __init__(self, engine: Engine, *, documents: int = 1, max_new_tokens: int = 32, with_question: bool = True):
    """Take an engine whose tokenizer has a chat template. Raises ValueError for fewer than one document."""
    if documents < 1:
      raise ValueError(f"documents = {documents}: a query is written from at least one")
    self._engine, self._documents, self._with_question = engine, documents, with_question
    self._new_tokens = max_new_tokens

  def __call__(self, question: str, read: Sequence[Sequence[Document]]) -> str | None:
    """Return the next query; None to stop. Raises ValueError for a question that does not fit into the context."""
    if not read[-1]:
      return None
    shown = [document for found in read for document in found[: self._documents]]
    prompt = self._prompt(question, shown)
    while shown and len(prompt) + self._new_tokens > self._engine.context_tokens:
      shown = shown[1:]
      prompt = self._prompt(question, shown)
    (generation,) = self._engine.submit(prompt, max_new_tokens=self._new_tokens, stop=["\n"])
    written = " ".join(generation.wait().text.split())
    if not written:
      return None
    return f"{question} {written}" if self._with_question else written

  def _prompt(self, question: str, shown: Sequence[Document]) -> list[int]:
    found = format_documents_for_prompt([{"title": d.title, "content": d.content} for d in shown]).text
    asked = f"{found}\n\nQuestion: {question}\n\n{ASK}"
    return self._engine.render({"messages": [{"role": "user", "content": asked}]})

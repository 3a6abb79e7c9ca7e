"""Models with a memory, as an app asks them: one that chats, or one that continues `[MEM] chunk … [SEP] prompt`."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from selfrag_jax.answers import AnswerStream, stream_answer
from selfrag_jax.apps.memory import write_texts
from selfrag_jax.cited_prompt import Prompt, Turns, as_sources
from selfrag_jax.generate.engine import Engine
from selfrag_jax.generate.generation import GenerationSettings
from selfrag_jax.memory.records import Chunk
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.manager import RetrievalManager
from selfrag_jax.self_rag import SelfRAGModel


class ChatAssistant:
  """A chat model that answers from a memory, and from a knowledge base if one is loaded.

  A question for which neither has a text is answered by the model alone.
  """

  def __init__(
    self, engine: Engine, memory: MemoryStore, top_k: int = 5, knowledge_base: RetrievalManager | None = None
  ):
    """memory: with an encoder."""
    self.engine, self.memory, self.top_k, self.knowledge_base = engine, memory, top_k, knowledge_base

  def write_to_memory(
    self, texts: Sequence[str], metadata: Sequence[Mapping[str, Any]], *, replacing: Sequence[str] = ()
  ) -> list[str]:
    """Write texts in place of the chunks with the ids `replacing`; return the new ids."""
    return write_texts(self.memory, texts, metadata, replacing)

  def load(self, folder: str) -> int:
    """Search the knowledge base in a folder, too, in place of the one before; return how many documents it has."""
    self.knowledge_base = RetrievalManager(None, folder)
    return len(self.knowledge_base.retriever)

  def retrieve(self, query: str, top_k: int) -> list[Document | Chunk]:
    """Return the best texts of the memory and of the knowledge base in turn: their scores cannot be compared."""
    remembered = self.memory.search(query, top_k) if len(self.memory) else []
    known = self.knowledge_base.retrieve(query, top_k) if self.knowledge_base else []
    pairs = itertools.zip_longest(remembered, known)
    return [found for pair in pairs for found in pair if found is not None][:top_k]

  def stream(self, question: str, history: Turns, settings: GenerationSettings) -> AnswerStream:
    """Begin the answer to a question."""
    return stream_answer(
      question, self, self.engine, top_k=self.top_k, history=history, settings=settings, require="nothing"
    )


class CompletionAssistant:
  """A model that continues prompts behind chunks of its memory, as the Self-RAG phases teach it; it has no history."""

  def __init__(self, engine: Engine, rag: SelfRAGModel):
    self.engine, self.rag, self.memory = engine, rag, rag.memory
    self.write_to_memory = rag.write_to_memory

  def load(self, folder: str) -> int:
    """Raises ValueError: such a model reads chunks of its own memory."""
    raise ValueError(f"this model reads its memory alone: /remember the texts of {folder}, or start with a chat model")

  def stream(self, question: str, history: Turns, settings: GenerationSettings) -> AnswerStream:
    """Begin to continue a prompt."""
    (found,) = self.rag.explain([question])
    (ids,) = self.rag.augment([question], [found])
    [generation] = self.engine.submit(ids, settings)
    return AnswerStream(question, Prompt(ids, as_sources(found), 0, 0), generation, require="nothing", checks=False)


Assistant = ChatAssistant | CompletionAssistant

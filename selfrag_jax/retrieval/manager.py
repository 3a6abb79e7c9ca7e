"""`RetrievalManager`: a knowledge base beside conversations."""

import copy
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from selfrag_jax import files
from selfrag_jax.memory.records import Where
from selfrag_jax.retrieval.base import BaseRetriever, create, load
from selfrag_jax.retrieval.document import Document, without_origin
from selfrag_jax.retrieval.sources import read_source, source_files

POSITIONS = ("before_user", "after_system")


class RetrievalManager:
  """Retrieves documents and puts them into conversations.

  The knowledge base is a folder of `prepare_knowledge_base` or `save_knowledge_base`; without one it begins empty.
  """

  def __init__(
    self,
    retriever_type: str | None = None,
    knowledge_base_path: str | os.PathLike | None = None,
    **settings: Any,
  ):
    """Open a knowledge base, or an empty retriever of a type (`dense` unless one is named) with `settings`.

    Raises FileNotFoundError for a folder without a knowledge base, ValueError for an unknown type, or another one than
    the folder's.
    """
    if knowledge_base_path is None:
      self.retriever: BaseRetriever = create(retriever_type or "dense", **settings)
    else:
      self.retriever = load(knowledge_base_path, **settings)
      if retriever_type not in (None, self.retriever.name):
        raise ValueError(f"{knowledge_base_path} is of the type {self.retriever.name}, not {retriever_type}")

  def retrieve(self, query: str, top_k: int = 5, *, where: Where | None = None) -> list[Document]:
    """Return the best documents for a query, best first."""
    return self.retriever.retrieve(query, top_k, where=where)

  def augment_conversation(
    self,
    conversation: Mapping[str, Any],
    *,
    query: str | None = None,
    top_k: int = 5,
    insert_position: str = "before_user",
    where: Where | None = None,
  ) -> dict[str, Any]:
    """Return a copy of a conversation with one message of role `retrieval` more; nothing found: none more.

    Args:
      conversation: `{"messages": [...]}` as `selfrag_jax.text.chat` renders it.
      query: what to look for (None: the last user's turn).
      top_k: documents.
      insert_position: `before_user`: before that turn; `after_system`: behind the system's turn, or first.
      where: as in `retrieve`.

    Raises ValueError for another position, and without a user's turn.
    """
    if insert_position not in POSITIONS:
      raise ValueError(f"insert_position is {insert_position!r}; one of {', '.join(POSITIONS)}")
    messages = list(copy.deepcopy(conversation["messages"]))
    turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not turns:
      raise ValueError("the conversation has no turn of a user; there is nothing to look for")
    found = self.retrieve(messages[turns[-1]]["content"] if query is None else query, top_k, where=where)
    if found:
      systems = [i for i, message in enumerate(messages) if message["role"] == "system"]
      at = turns[-1] if insert_position == "before_user" else systems[0] + 1 if systems else 0
      messages.insert(at, {"role": "retrieval", "documents": [document.to_dict() for document in found]})
    return {**conversation, "messages": messages}

  def add_documents(self, documents: Iterable[Document | Mapping[str, Any]]) -> int:
    """Add documents, or what `Document.to_dict` gives, and return how many. ValueError for an id that is taken."""
    given = (d if isinstance(d, Document) else Document.from_dict(d) for d in documents)
    return self.retriever.add_documents(map(without_origin, given))

  def save_knowledge_base(self, path: str | os.PathLike) -> None:
    """Keep documents and index in a folder; the old one or the new, whenever it is killed."""
    self.retriever.save(path)

  def load_knowledge_base(self, path: str | os.PathLike) -> None:
    """Open another knowledge base in place of this one. Raises like the constructor."""
    self.retriever = load(path)

  def save_jsonl(self, path: str | os.PathLike) -> None:
    """Write the documents as JSON lines, whole or not at all."""
    lines = (json.dumps(document.to_dict(), ensure_ascii=False) + "\n" for document in self.retriever.documents)
    files.write_bytes_atomic(path, "".join(lines).encode())

  def load_jsonl(self, path: str | os.PathLike) -> int:
    """Add the documents of a file, as `source_files` takes them, and return how many. Raises like `read_source`."""
    found = [each.document for name, file in source_files(path).items() for each in read_source(name, Path(file))]
    return self.add_documents(found)

"""`RetrievalManager`, which augments conversations by documents of a knowledge base."""

import copy
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from selfrag_jax.memory.filters import Where
from selfrag_jax.retrieval.base import BaseRetriever, create, load
from selfrag_jax.retrieval.document import Document, by_hand, file_of, whole_id, without_origin
from selfrag_jax.retrieval.listing import LeftOut, list_sources
from selfrag_jax.retrieval.multi_hop import by_search
from selfrag_jax.retrieval.reading import Chunking, read_chunks
from selfrag_jax.storage.atomic import write_bytes_atomic

POSITIONS = ("before_user", "after_system")


class RetrievalManager:
  """Retrieves documents of a knowledge base and puts them into conversations.

  A knowledge base is a folder written by `prepare_knowledge_base` or `save_knowledge_base`; without a folder it is
  empty at first.
  """

  def __init__(
    self,
    retriever_type: str | BaseRetriever | None = None,
    knowledge_base_path: str | os.PathLike | None = None,
    **settings: Any,
  ):
    """Open a knowledge base, or make an empty retriever of a type (`dense` by default) with `settings`.

    A retriever in place of the type is taken as it is. Raises FileNotFoundError for a folder without a knowledge base,
    ValueError for an unknown type, and for a type that differs from the folder's.
    """
    if isinstance(retriever_type, BaseRetriever):
      if knowledge_base_path is not None or settings:
        raise ValueError("a retriever is given: a folder and settings belong to a type; give one or the other")
      self.retriever = retriever_type
    elif knowledge_base_path is None:
      self.retriever = create(retriever_type or "dense", **settings)
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
    """Return a copy of a conversation with an added message of role `retrieval`; none is added if nothing is found.

    A retriever that searches several times adds a message for each search, with its `query`.

    Args:
      conversation: `{"messages": [...]}` as `selfrag_jax.text.chat` renders it.
      query: the query (None: the text of the last user turn).
      top_k: the largest number of documents.
      insert_position: `before_user`: before the last user turn; `after_system`: after the system turn, or first.
      where: a filter, as in `retrieve`.

    Raises ValueError for another position, and for a conversation without a user turn.
    """
    if insert_position not in POSITIONS:
      raise ValueError(f"insert_position is {insert_position!r}; one of {', '.join(POSITIONS)}")
    messages = list(copy.deepcopy(conversation["messages"]))
    turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not turns:
      raise ValueError("the conversation has no turn of a user; there is nothing to look for")
    found = self.retrieve(messages[turns[-1]]["content"] if query is None else query, top_k, where=where)
    systems = [i for i, message in enumerate(messages) if message["role"] == "system"]
    at = turns[-1] if insert_position == "before_user" else systems[0] + 1 if systems else 0
    for query, documents in reversed(by_search(found)):
      asked = {} if query is None else {"query": query}
      messages.insert(at, {"role": "retrieval", **asked, "documents": [document.to_dict() for document in documents]})
    return {**conversation, "messages": messages}

  def add_documents(self, documents: Iterable[Document | Mapping[str, Any]]) -> int:
    """Add documents, or results of `Document.to_dict`, and return how many. Raises ValueError for a taken id."""
    return self.retriever.add_documents(_documents(documents))

  def upsert_documents(self, documents: Iterable[Document | Mapping[str, Any]]) -> int:
    """Add documents, all or none, in place of the old documents with their ids and all chunks; return how many.

    A sync replaces a document that took the place of a file's document by the one in the file, and also restores
    deleted documents of files.
    """
    return self._replace(_documents(documents))

  def add_files(
    self, paths: Sequence[str | os.PathLike], *, upsert: bool = False, skip_bad: bool = False
  ) -> dict[str, Any]:
    """Add the documents of files, cut as the knowledge base was built; return a report with the number `added`.

    upsert: replace the old documents with their ids. skip_bad: leave out, and count, lines and files that cannot be
    read. Raises like `list_sources` and `read_source`, and ValueError for an id that is taken; nothing is added then.
    """
    left_out, held = LeftOut(skip_bad), self.retriever.documents
    # a knowledge base without a chunking, such as one that was not built from files, leaves documents whole
    chunking = Chunking(**self.retriever.build.get("chunking", {"size": 0}))
    taken = () if upsert else {id for document in held for id in (document.id, whole_id(document))}
    places = dict.fromkeys(taken, "a document of the knowledge base, which only upsert (--upsert) replaces")
    sources = list_sources(paths, left_out)
    chunks, counts = read_chunks(sources, left_out, chunking, self.retriever, places, progress=False)
    # a sync may replace a document of a file; a retriever that was not built from files is never synced
    new = [by_hand(chunk, file_of(chunk) if self.retriever.build else None) for chunk in chunks]
    added = self._replace(new) if upsert else self.retriever.add_documents(new)
    return {"added": added, **counts, **left_out.report()}

  def _replace(self, new: Sequence[Document]) -> int:
    ids, wholes = {document.id for document in new}, set(map(whole_id, new))
    old = [document for document in self.retriever.documents if whole_id(document) in wholes]
    stale = [document.id for document in old if document.id not in ids]
    came = {whole_id(document): file for document in old if (file := file_of(document)) is not None}
    replaced = self.retriever.upsert_documents(
      by_hand(document, file_of(document) or came.get(whole_id(document))) for document in new
    )
    self.retriever.delete(stale)
    return replaced

  def save_knowledge_base(self, path: str | os.PathLike, *, overwrite: bool = False) -> None:
    """Write documents and index to a folder; a killed process leaves the old files or the new files.

    Unless `overwrite` is set, raises FileExistsError for a folder that holds another knowledge base than this one.
    """
    self.retriever.save(path, overwrite=overwrite)

  def load_knowledge_base(self, path: str | os.PathLike) -> None:
    """Open another knowledge base in place of this one. Raises like the constructor."""
    self.retriever = load(path)

  def save_jsonl(self, path: str | os.PathLike) -> None:
    """Write the documents as JSON lines, all or none."""
    lines = (json.dumps(document.to_dict(), ensure_ascii=False) + "\n" for document in self.retriever.documents)
    write_bytes_atomic(path, "".join(lines).encode())

  def load_jsonl(self, path: str | os.PathLike) -> int:
    """Add the documents of a file or folder as `add_files` does, and return how many."""
    return self.add_files([path])["added"]


def _documents(given: Iterable[Document | Mapping[str, Any]]) -> list[Document]:
  return [without_origin(d if isinstance(d, Document) else Document.from_dict(d)) for d in given]

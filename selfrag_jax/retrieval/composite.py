"""`CompositeRetriever`, the base class of retrievers that search other retrievers."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from selfrag_jax.retrieval.base import BaseRetriever
from selfrag_jax.retrieval.document import Document


class CompositeRetriever(BaseRetriever):
  """A retriever whose documents are indexed by its parts; each part holds all of them.

  The index of a single part is kept in the retriever's folder itself, those of several parts in numbered folders.
  """

  def __init__(self, parts: Sequence[BaseRetriever], **settings: Any):
    """Take over the documents of the parts, and give them to empty parts. Raises ValueError if full parts differ."""
    super().__init__(**settings)
    self.parts = parts
    full = [part for part in parts if len(part)]
    if not full:
      return
    first = full[0]
    for part in full[1:]:
      for one, other in ((first, part), (part, first)):
        if missing := one._documents.keys() - other._documents.keys():
          raise ValueError(
            f"{one.name} holds {len(missing)} documents that {other.name} does not, such as {min(missing)!r}; "
            "give both the same, or retrievers without documents"
          )
      if changed := [id for id, document in first._documents.items() if part._documents[id] != document]:
        raise ValueError(f"the document {changed[0]!r} of {first.name} is another one than that of {part.name}")
    for part in parts:
      if not len(part):
        part.add_documents(first.documents)
      # all parts need one order, that of the rows that they keep in a folder
      part._documents = {id: part._documents[id] for id in first._documents}
    self._documents = dict(first._documents)

  def _add(self, documents: Sequence[Document]) -> None:
    self._in_all(documents, [partial(part.add_documents, documents) for part in self.parts])

  def _prepare(self, documents: Sequence[Document]) -> Callable[[], None]:
    return partial(self._in_all, documents, [part._ready(documents) for part in self.parts])

  def _in_all(self, documents: Sequence[Document], adds: Sequence[Callable[[], Any]]) -> None:
    """Add documents to all parts by calling their functions `adds`; if one fails, remove them from all parts."""
    done: list[BaseRetriever] = []
    try:
      for part, add in zip(self.parts, adds, strict=True):
        add()
        done.append(part)
    except BaseException:
      for part in done:
        part.delete([document.id for document in documents])
      raise

  def _delete(self, ids: Sequence[str]) -> None:
    for part in self.parts:
      part.delete(ids)

  def _check_parts(self) -> None:
    """Raise ValueError if a part has other documents than this retriever."""
    if changed := [part.name for part in self.parts if len(part) != len(self)]:
      raise ValueError(f"{changed[0]} was changed by itself: add and delete documents by the {self.name} retriever")

  def _folders(self, folder: Path) -> Iterator[tuple[BaseRetriever, Path]]:
    for number, part in enumerate(self.parts):
      yield part, folder / str(number) if len(self.parts) > 1 else folder

  def _save(self, folder: Path) -> None:
    for part, inside in self._folders(folder):
      inside.mkdir(exist_ok=True)
      part._save(inside)

  def _load(self, folder: Path) -> None:
    for part, inside in self._folders(folder):
      part._documents = dict(self._documents)
      part._load(inside)

"""`BaseRetriever`, the base class of all retrievers, and the registry of their names for configs and command lines."""

import abc
import dataclasses
import importlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from selfrag_jax.checked import check_value
from selfrag_jax.memory.filters import Where, check_where, predicate
from selfrag_jax.memory.scoring import check_k
from selfrag_jax.retrieval.document import (
  Document,
  check_storable,
  is_utf8,
  read_documents,
  whole_id,
  write_documents,
)
from selfrag_jax.retrieval.folder import SETTINGS, publish, verified
from selfrag_jax.storage.generation import DamagedError, FolderError, version

# our retrievers -> the modules that register them, which are imported when a retriever is asked for by name
BUILTIN = {
  name: f"selfrag_jax.retrieval.{name}" for name in ("simple", "bm25", "dense", "hybrid", "rerank", "multi_hop")
}
_registry: dict[str, type["BaseRetriever"]] = {}


class Hits(NamedTuple):
  """The results of an index: for each query the ids of the best documents, best first, and their scores."""

  ids: list[list[str]]
  scores: list[list[float]]
  components: list[list[Sequence[Mapping[str, Any]]]] | None = None  # `Document.components` of each result


class BaseRetriever(abc.ABC):
  """A collection of documents that are found by queries; higher scores are better.

  A subclass keeps an index of the texts and defines three methods: `_add`, `_delete` and `_search`. Decorated with
  `register(name)`, it can be named in every config and command. `settings` are the arguments of its constructor. A
  folder keeps the settings and the documents; `load` indexes the documents anew, unless the subclass also defines
  `_save` and `_load` to keep its index.
  Threads must not share a retriever: a search may build or extend its index.
  """

  name: ClassVar[str] = ""
  parts: Sequence["BaseRetriever"] = ()  # the retrievers that this retriever searches in turn

  def __init__(self, **settings: Any):
    # NumPy scalars become Python numbers, which a folder can keep
    self.settings = {name: x.item() if isinstance(x, np.generic) else x for name, x in settings.items()}
    self.build: dict[str, Any] = {}  # how the knowledge base was built; empty for other retrievers
    self._read: dict[Path, str] = {}  # folder -> the version that was read or written there last
    self._documents: dict[str, Document] = {}

  @abc.abstractmethod
  def _add(self, documents: Sequence[Document]) -> None:
    """Index documents, whose ids are new."""

  @abc.abstractmethod
  def _delete(self, ids: Sequence[str]) -> None:
    """Take documents out of the index."""

  @abc.abstractmethod
  def _search(self, queries: Sequence[str], top_k: int, where: Where | None) -> Hits:
    """Find the best `top_k` documents that match `where`; fewer if fewer match. There is at least one document."""

  def _prepare(self, documents: Sequence[Document]) -> Callable[[], None]:
    """Do the part of `_add` that may fail, and return a function that does the rest.

    The index stays unchanged; the ids of the documents may be taken.
    """
    # a trial under other ids shows whether the documents can be indexed, while documents with their ids still exist
    trial = [dataclasses.replace(document, id=f"{document.id} {uuid.uuid4().hex}") for document in documents]
    self._add(trial)
    self._delete([document.id for document in trial])
    return lambda: self._add(documents)

  def _ready(self, documents: Sequence[Document]) -> Callable[[], None]:
    """Return a function that adds documents, to be called when the old documents with their ids are deleted."""
    insert = self._prepare(documents)

    def add() -> None:
      insert()
      self._documents.update({document.id: document for document in documents})

    return add

  def _save(self, folder: Path) -> None:  # noqa: B027, most indexes are made anew
    """Write the index to a folder."""

  def _load(self, folder: Path) -> None:
    """Read the index that `_save` has written; the documents are loaded already."""
    self._add(self.documents)

  def retrieve(self, query: str, top_k: int = 5, *, where: Where | None = None) -> list[Document]:
    """Return the best documents for a query, best first, each with its score."""
    return self.retrieve_batch([query], top_k, where=where)[0]

  def retrieve_batch(
    self, queries: Sequence[str], top_k: int = 5, *, where: Where | None = None
  ) -> list[list[Document]]:
    """Return the best documents for each query; fewer than `top_k` if fewer match, none for an empty query.

    `where` is a filter on metadata, id, title and source (see `selfrag_jax.memory.filters`), or a function of them; it
    is applied inside the search. Raises ValueError for `top_k` below 1, for a text in place of a list, and for a filter
    that is invalid or names a field that no document has.
    """
    if isinstance(queries, str):
      raise ValueError("queries are a list of texts; retrieve() takes one")
    queries = list(queries)
    for query in queries:
      if not isinstance(query, str) or not is_utf8(query):
        raise ValueError(f"a query is {query!r}; it must be a text, without half a surrogate pair")
    top_k = check_k(top_k, "top_k")
    if where is not None:
      check_where(where, (document.fields for document in self._documents.values()))
    asked = [query for query in queries if query.strip()]
    if not self._documents or not asked:
      return [[] for _ in queries]
    found = self._search(asked, min(top_k, len(self)), where)
    parts = found.components or [[()] * len(ids) for ids in found.ids]
    results = (
      [self._documents[id].with_score(float(score), part) for id, score, part in zip(*row, strict=True)]
      for row in zip(found.ids, found.scores, parts, strict=True)
    )
    return [next(results) if query.strip() else [] for query in queries]

  def add_documents(self, documents: Iterable[Document]) -> int:
    """Add documents, all or none, and return how many were added.

    Raises ValueError for an id that is taken, and for metadata that no file can hold.
    """
    new = _by_id(documents)
    if taken := next((id for id in new if id in self._documents), None):
      raise ValueError(f"the id {taken!r} is taken; upsert_documents replaces it, or give this one another id")
    if new:
      self._add(list(new.values()))
      self._documents.update(new)
    return len(new)

  def upsert_documents(self, documents: Iterable[Document]) -> int:
    """Add documents in place of the old documents with their ids, and return how many were added.

    If that fails, the old documents stay. Raises ValueError for two documents with one id, and for metadata that no
    file can hold.
    """
    new = _by_id(documents)
    old = [self._documents[id] for id in new if id in self._documents]
    if not old:
      return self.add_documents(new.values())
    add = self._ready(list(new.values()))
    self.delete([document.id for document in old])
    try:
      add()
    except BaseException:
      self.add_documents(old)
      raise
    return len(new)

  def delete(self, ids: str | Iterable[str] | None = None, *, where: Where | None = None) -> int:
    """Delete documents by id, or all documents that match `where`, and return how many were deleted.

    The id of a document that was cut into chunks deletes all its chunks. Raises KeyError for an unknown id (nothing is
    deleted), ValueError if neither or both arguments are given, and for a filter that is empty or that `retrieve_batch`
    would refuse.
    """
    if (ids is None) == (where is None):
      raise ValueError("delete takes ids or where, one of the two")
    if where is not None:
      if not where:
        raise ValueError("where is empty, which every document fits; name what is to be deleted")
      check_where(where, (document.fields for document in self._documents.values()))
      fits = predicate(where)
      chosen = [document.id for document in self.documents if fits(document.fields)]
    else:
      chosen = self._held([ids] if isinstance(ids, str) else list(ids or ()))
    if chosen:
      self._delete(chosen)
      for id in chosen:
        del self._documents[id]
    return len(chosen)

  def _held(self, ids: Sequence[str]) -> list[str]:
    """Return the ids of stored documents, without repetitions; the id of a cut document gives those of its chunks."""
    chunks: dict[str, list[str]] = {}
    if any(id not in self._documents for id in ids):
      for document in self.documents:
        chunks.setdefault(whole_id(document), []).append(document.id)
    if missing := [id for id in ids if id not in self._documents and id not in chunks]:
      raise KeyError(f"no document has the id {missing[0]!r}")
    return list(dict.fromkeys(held for id in ids for held in ([id] if id in self._documents else chunks[id])))

  def get(self, id: str) -> Document:
    """Return a document by its id. Raises KeyError."""
    if id not in self._documents:
      raise KeyError(f"no document has the id {id!r}")
    return self._documents[id]

  @property
  def documents(self) -> list[Document]:
    """The documents in the order in which they were added."""
    return list(self._documents.values())

  def __len__(self) -> int:
    return len(self._documents)

  def __contains__(self, id: str) -> bool:
    return id in self._documents

  def _allowed(self, ids: Sequence[str | None], where: Where | None) -> np.ndarray | None:
    """Return a mask bool [N] of the ids whose documents match `where` (an id of None: deleted); None if no filter."""
    if where is None:
      return None
    fits = predicate(where)
    return np.array([id is not None and fits(self._documents[id].fields) for id in ids], bool)

  def _check_encoders(self, replaced: bool) -> None:
    """Check, after a load, that each part's encoder or reranker is the one that the folder was saved with.

    `replaced`: settings were replaced on loading. Raises ValueError if a function is missing, or embeds otherwise.
    """
    for part in self.parts:
      part._check_encoders(replaced)

  def save(self, folder: str | os.PathLike, *, overwrite: bool = False) -> None:
    """Write documents, settings and index to a local folder; a killed process leaves the old files or the new files.

    Unless `overwrite` is set, raises FileExistsError for a folder with a knowledge base that this retriever was neither
    loaded from nor saved to, and FolderError if another process has changed the folder since. Raises FolderError for a
    folder of other files.
    """
    if type(self).name not in _registry:
      raise ValueError(f"{type(self).__name__} has no name to be loaded by; decorate it with @register('...')")
    kept = {"type": type(self).name, "settings": self.settings, "build": self.build}
    with publish(folder, self._read, overwrite=overwrite) as files:
      write_documents(files, self.documents)
      (files / SETTINGS).write_text(json.dumps(kept, indent=1), encoding="utf-8")
      self._save(files)


def load(folder: str | os.PathLike, **settings: Any) -> BaseRetriever:
  """Load a retriever from a folder that `save` has written.

  `settings` replace settings in the folder, for example by a function, which no file can hold. Raises FileNotFoundError
  for a folder without a retriever; ValueError for an unknown type, and if the vectors were made by a function that is
  not given, or by another one than the given; FolderError for a folder that is damaged or newer than this version.
  """
  retriever, kept = _read_folder(folder, settings)
  # another backend may search the vectors, but queries must be embedded by the encoder that made them
  retriever._check_encoders(bool(settings.keys() - {"backend"}) and retriever.settings != kept)
  return retriever


def read_folder(folder: str | os.PathLike) -> BaseRetriever:
  """Load a retriever like `load`, but without the functions that it needs for searches, and unchecked."""
  return _read_folder(folder, {})[0]


def _read_folder(folder: str | os.PathLike, settings: dict[str, Any]) -> tuple[BaseRetriever, dict[str, Any]]:
  """Return the retriever that a folder holds, and the settings in the folder."""
  while True:
    before = version(folder)
    try:
      retriever, kept = _load(verified(folder), settings)
    except Exception:
      if version(folder) == before:
        raise
    else:
      if version(folder) == before:
        retriever._read[Path(folder).resolve()] = before
        return retriever, kept
    # another process has published meanwhile, and deleted the files that were being read: read the new files


def _load(files: Path, settings: dict[str, Any]) -> tuple[BaseRetriever, dict[str, Any]]:
  try:
    kept = json.loads((files / SETTINGS).read_text(encoding="utf-8"))
    name, own, build = kept["type"], dict(kept["settings"]), dict(kept["build"])
  except (LookupError, TypeError, ValueError, RecursionError) as error:
    raise DamagedError(
      f"{files / SETTINGS} is not what a save writes ({error!r}); build {files.parent} again"
    ) from None
  retriever = create(name, **{**own, **settings})
  if len(retriever):
    raise ValueError("the retrievers that are given hold documents already; give empty ones, the folder fills them")
  retriever.build = build
  try:
    retriever._documents = {document.id: document for document in read_documents(files)}
    retriever._load(files)
  except FolderError:
    raise
  except (AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError) as error:
    # the hashes match, so another program has written the files
    raise DamagedError(f"{files} holds what no save writes ({error!r}); build {files.parent} again") from error
  return retriever, own


def _by_id(documents: Iterable[Document]) -> dict[str, Document]:
  """Map ids to documents without scores. Raises ValueError for a repeated id, and for documents no file can hold."""
  new: dict[str, Document] = {}
  for document in documents:
    if not isinstance(document, Document):
      raise ValueError(f"{document!r} is no Document; Document(content=...) makes one of a text, from_dict of a record")
    if document.id in new:
      raise ValueError(f"two documents have the id {document.id!r}, which is taken by the first; each needs its own")
    check_storable(document)
    new[document.id] = dataclasses.replace(document, score=None, components=())
  return new


R = TypeVar("R", bound=BaseRetriever)


def register(name: str) -> Callable[[type[R]], type[R]]:
  """Return a decorator that names a retriever class for configs, command lines and saved folders."""

  def named(cls: type[R]) -> type[R]:
    cls.name = name
    _registry[name] = cls
    return cls

  return named


def create(name: str, **settings: Any) -> BaseRetriever:
  """Make a retriever by its name. Raises ValueError for wrong settings and, with all names, for an unknown name."""
  if name in BUILTIN:
    importlib.import_module(BUILTIN[name])
  if name not in _registry:
    known = sorted({*BUILTIN, *_registry})
    raise ValueError(f"no retriever is called {name!r}; one of {', '.join(known)}, or register() your own in a plugin")
  hints = getattr(_registry[name].__init__, "__annotations__", {})
  for key, value in settings.items():
    plain = value.item() if isinstance(value, np.generic) else value
    check_value(hints.get(key), plain, f"the setting {key} of {name}")
  try:
    return _registry[name](**settings)
  except TypeError as error:
    raise ValueError(f"the settings of {name} do not fit: {error}") from error


def import_plugins(names: Iterable[str]) -> None:
  """Import modules that register retrievers. Raises ValueError for a module that is not found."""
  for name in names:
    try:
      importlib.import_module(name)
    except ModuleNotFoundError as error:
      raise ValueError(f"the plugin {name} was not found ({error}); is its folder in PYTHONPATH?") from None

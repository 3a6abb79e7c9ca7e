"""`BaseRetriever`: what all retrievers share, and the registry by which configs and command lines name them."""

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
from selfrag_jax.storage.generation import DamagedError, version

# the module of each of ours, which registers it: imported when it is named
BUILTIN = {name: f"selfrag_jax.retrieval.{name}" for name in ("simple", "bm25", "dense", "hybrid", "rerank")}
_registry: dict[str, type["BaseRetriever"]] = {}


class Hits(NamedTuple):
  """What an index finds: for each query the ids of the best documents, best first, and their scores."""

  ids: list[list[str]]
  scores: list[list[float]]
  components: list[list[Sequence[Mapping[str, Any]]]] | None = None  # what a document's `components` are to be


class BaseRetriever(abc.ABC):
  """Documents that are found by a query; higher scores are better.

  A subclass keeps an index over the texts and has three methods: `_add`, `_delete` and `_search`. Decorated with
  `register(name)` it can be named in every config and command. `settings` are the arguments of its constructor: a
  folder keeps them, and the documents, which `load` indexes anew unless `_save` and `_load` keep the index as well.
  """

  name: ClassVar[str] = ""

  def __init__(self, **settings: Any):
    # of numpy's numbers Python's, which a folder can keep
    self.settings = {name: x.item() if isinstance(x, np.generic) else x for name, x in settings.items()}
    self.build: dict[str, Any] = {}  # how its knowledge base was made, if it is one
    self._read: dict[Path, str] = {}  # folder -> the version that was read or written there
    self._documents: dict[str, Document] = {}

  @property
  def parts(self) -> Sequence["BaseRetriever"]:
    """The retrievers that this one asks."""
    return ()

  @abc.abstractmethod
  def _add(self, documents: Sequence[Document]) -> None:
    """Index documents; their ids are new."""

  @abc.abstractmethod
  def _delete(self, ids: Sequence[str]) -> None:
    """Take documents out of the index."""

  @abc.abstractmethod
  def _search(self, queries: Sequence[str], top_k: int, where: Where | None) -> Hits:
    """Find the best `top_k` of the documents that fit `where`: fewer if fewer match. There is at least one document."""

  def _prepare(self, documents: Sequence[Document]) -> Callable[[], None]:
    """Do what may fail of `_add`, and return what does the rest; the index is unchanged. Their ids may be taken."""
    # what cannot be indexed shows under other ids, while those are still there
    trial = [dataclasses.replace(document, id=f"{document.id} {uuid.uuid4().hex}") for document in documents]
    self._add(trial)
    self._delete([document.id for document in trial])
    return lambda: self._add(documents)

  def _ready(self, documents: Sequence[Document]) -> Callable[[], None]:
    """Return what adds documents, once those that have their ids are gone."""
    insert = self._prepare(documents)

    def add() -> None:
      insert()
      self._documents.update({document.id: document for document in documents})

    return add

  def _save(self, folder: Path) -> None:  # noqa: B027, most indexes are made anew
    """Keep the index in a folder."""

  def _load(self, folder: Path) -> None:
    """Read what `_save` has kept; the documents are there already."""
    self._add(self.documents)

  def retrieve(self, query: str, top_k: int = 5, *, where: Where | None = None) -> list[Document]:
    """Return the best documents for a query, best first, each with its score."""
    return self.retrieve_batch([query], top_k, where=where)[0]

  def retrieve_batch(
    self, queries: Sequence[str], top_k: int = 5, *, where: Where | None = None
  ) -> list[list[Document]]:
    """Return the best documents for each query; fewer than `top_k` where fewer match, none for an empty query.

    `where` is a filter on metadata, id, title and source as `selfrag_jax.memory.filters` has them, or a function of
    these; it is applied inside the search. Raises ValueError for `top_k` below 1, a text in place of a list, and a
    filter that is not understood or names what no document has.
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
    """Add documents and return how many; all or none of them.

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
    """Add documents, in place of those that have their ids, and return how many.

    If that fails what was there stays. Raises ValueError for two documents of one id, and for metadata that no file can
    hold.
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
    """Delete documents by id, or those that fit `where`, and return how many.

    The id of a document that was cut is that of all its chunks. Raises KeyError for an id that is not there (nothing is
    deleted), ValueError if neither or both are given, and for a filter that is empty or does not fit, as in
    `retrieve_batch`.
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
    """Return ids of documents that are there, once each, with those of all chunks for a document that was cut."""
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
    """Return which of the documents (None: deleted) fit, bool [N]; None: all of them."""
    if where is None:
      return None
    fits = predicate(where)
    return np.array([id is not None and fits(self._documents[id].fields) for id in ids], bool)

  def _take_over(self, parts: Sequence["BaseRetriever"]) -> None:
    """Begin with the documents that parts hold; those that hold none get them. Raises ValueError if parts differ."""
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
      # in one order, which is that of the rows that they keep in a folder
      part._documents = {id: part._documents[id] for id in first._documents}
    self._documents = dict(first._documents)

  def _check_encoders(self, replaced: bool) -> None:
    """Raise ValueError if a function that made what was read is missing, or if it or what is `replaced` is another."""
    for part in self.parts:
      part._check_encoders(replaced)

  def save(self, folder: str | os.PathLike, *, overwrite: bool = False) -> None:
    """Keep documents, settings and index in a local folder: killed at any moment, it holds the old ones or the new.

    Raises FileExistsError for a folder that holds a knowledge base which was neither opened as this one nor saved by
    it, unless `overwrite` is set; FolderError for a folder of other files, and if another process has changed it since.
    """
    if type(self).name not in _registry:
      raise ValueError(f"{type(self).__name__} has no name to be loaded by; decorate it with @register('...')")
    kept = {"type": type(self).name, "settings": self.settings, "build": self.build}
    with publish(folder, self._read, overwrite=overwrite) as files:
      write_documents(files, self.documents)
      (files / SETTINGS).write_text(json.dumps(kept, indent=1), encoding="utf-8")
      self._save(files)


def load(folder: str | os.PathLike, **settings: Any) -> BaseRetriever:
  """Open what `save` has written; `settings` replace those that it keeps, such as a callable that no file can hold.

  Raises FileNotFoundError for a folder without a retriever, ValueError for one of an unknown type, and if its vectors
  were made by a function that is not given, or by another one; FolderError for one that is damaged or newer than this
  version.
  """
  retriever, kept = _read_folder(folder, settings)
  # vectors may be searched otherwise; what makes a query's vector must be what made them
  retriever._check_encoders(bool(settings.keys() - {"backend"}) and retriever.settings != kept)
  return retriever


def read_folder(folder: str | os.PathLike) -> BaseRetriever:
  """Do what `load` does, but without the functions that a retriever needs to be searched."""
  return _read_folder(folder, {})[0]


def _read_folder(folder: str | os.PathLike, settings: dict[str, Any]) -> tuple[BaseRetriever, dict[str, Any]]:
  """Return the retriever that a folder holds, and the settings that it keeps."""
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
    # another process has published, and taken away what was being read: read what there is now


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
  retriever._documents = {document.id: document for document in read_documents(files)}
  retriever._load(files)
  return retriever, own


def _by_id(documents: Iterable[Document]) -> dict[str, Document]:
  """Return documents, without the score of a search, by their ids. Raises ValueError for what cannot be kept."""
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
  """Name a retriever, for configs, command lines and the folders that it is kept in."""

  def named(cls: type[R]) -> type[R]:
    cls.name = name
    _registry[name] = cls
    return cls

  return named


def create(name: str, **settings: Any) -> BaseRetriever:
  """Make the retriever of a name. Raises ValueError, with the list, for one that is not registered, or its settings."""
  if name in BUILTIN:
    importlib.import_module(BUILTIN[name])
  if name not in _registry:
    known = sorted({*BUILTIN, *_registry})
    raise ValueError(f"no retriever is called {name!r}; one of {', '.join(known)}, or register() your own in a plugin")
  try:
    return _registry[name](**settings)
  except TypeError as error:
    raise ValueError(f"the settings of {name} do not fit: {error}") from error


def import_plugins(names: Iterable[str]) -> None:
  """Import modules that register retrievers. Raises ValueError for one that is not found."""
  for name in names:
    try:
      importlib.import_module(name)
    except ModuleNotFoundError as error:
      raise ValueError(f"the plugin {name} was not found ({error}); is its folder in PYTHONPATH?") from None

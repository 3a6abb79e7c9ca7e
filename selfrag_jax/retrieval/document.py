"""`Document`, a text with an id that a retriever returns with a score, and the reader and writer of document files."""

import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from selfrag_jax.text.tokenizer import well_formed

# Metadata that a build adds to a document. FILE: the file from which it was built. PART: the number of a chunk within
# its document. FORMER: the file of a document that was added or merged, or that replaced a document of that file; a
# sync that finds the id in a file replaces it.
FILE, PART, FORMER = "kb:file", "kb:chunk", "kb:former_file"

OWN = ("id", "title", "source")  # fields of a document that a filter sees; metadata may have the same names
DEEPEST = 50  # levels of nested metadata: far below the depth at which JSON raises RecursionError


@dataclasses.dataclass(frozen=True)
class Document:
  """A text of a knowledge base. Documents are immutable: a search result is a copy with its own `score`.

  The id of a document that is given none is a digest of its contents, the same in every process: equal documents have
  equal ids.
  """

  id: str = cast(str, None)
  title: str = ""
  content: str = ""
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  score: float | None = None  # the score in the search that found it; higher is better
  source: str = ""  # the origin of the text: a file or an address
  # in a result of a hybrid retriever, one entry for each part that found it: {retriever, part, rank, score, gives}
  components: Sequence[Mapping[str, Any]] = ()

  def __post_init__(self):
    """Check the fields and copy the metadata as JSON would read it back: NumPy values become Python's, tuples lists.

    Raises ValueError for an id or texts of another type, and for metadata whose names are not texts.
    """
    for name in ("title", "content", "source") if self.id is None else ("id", "title", "content", "source"):
      text = getattr(self, name)
      if not isinstance(text, str):
        raise ValueError(f"{name} of document {self.id!r} is {text!r}, it must be a text")
      if not is_utf8(text):
        raise ValueError(f"{name} of document {self.id!r} has half a surrogate pair, which UTF-8 cannot hold: {text!r}")
    if not isinstance(self.metadata, Mapping):
      raise ValueError(
        f"metadata of document {self.id!r} is {self.metadata!r}, it must be a mapping of names to values"
      )
    if self.id == "":
      raise ValueError(
        f"a document needs an id that is not empty, or none; its content begins with {self.content[:40]!r}"
      )
    try:
      object.__setattr__(self, "metadata", MappingProxyType(_copied(self.metadata)))
    except (ValueError, RecursionError) as error:
      reason = "nested too deeply" if isinstance(error, RecursionError) else error
      raise ValueError(f"document {self.id!r} has metadata {reason}") from None
    if not all(isinstance(each, Mapping) for each in self.components):
      raise ValueError(f"components of document {self.id!r} are {self.components!r}, they must be mappings")
    object.__setattr__(self, "components", tuple(map(dict, self.components)))
    if self.id is None:
      object.__setattr__(self, "id", self._digest())

  def __hash__(self) -> int:
    return hash(self.id)

  def __getstate__(self) -> dict[str, Any]:
    """Return the fields with metadata as a dict, since pickle and copy cannot handle a view of a dict."""
    return {**self.__dict__, "metadata": dict(self.metadata)}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state, metadata=MappingProxyType(state["metadata"]))

  def _digest(self) -> str:
    """Return a digest of the document's contents as an id. Raises ValueError for metadata that JSON cannot hold."""
    held = [self.title, self.content, self.source, dict(self.metadata)]
    return hashlib.sha256(_as_json(held, "a document without id", sort_keys=True)).hexdigest()[:32]

  def with_score(self, score: float, components: Sequence[Mapping[str, Any]] = ()) -> "Document":
    """Return a copy with a score and components; the other fields have been checked already."""
    result = object.__new__(type(self))
    # dataclasses.replace would take as long as a search by BM25
    result.__dict__.update(self.__dict__, score=score, components=tuple(components))
    return result

  @property
  def text(self) -> str:
    """The title and content, joined as retrievers index them."""
    return f"{self.title} {self.content}" if self.title else self.content

  @property
  def fields(self) -> dict[str, Any]:
    """The fields that a filter sees: the metadata, and id, title and source.

    Metadata with one of these three names appears as `metadata.id`, `metadata.title` or `metadata.source`. Metadata
    named title or source is also the title or source of a document that has none.
    """
    given = self.metadata
    others = {f"metadata.{name}": given[name] for name in OWN if name in given}
    title, source = self.title or given.get("title", ""), self.source or given.get("source", "")
    return {**others, **given, "id": self.id, "title": title, "source": source}

  def to_dict(self) -> dict[str, Any]:
    """Return the document as a dict for JSON, without `components` if they are empty."""
    record = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    record |= {"metadata": _copied(self.metadata), "components": [dict(each) for each in self.components]}
    return record if self.components else {name: value for name, value in record.items() if name != "components"}

  @classmethod
  def from_dict(cls, record: Mapping[str, Any]) -> "Document":
    """Make a document from the result of `to_dict`. Raises ValueError, naming unknown fields."""
    known = {field.name for field in dataclasses.fields(cls)}
    if unknown := record.keys() - known:
      raise ValueError(f"a document has no {', '.join(sorted(unknown))}; put it into metadata. It has {sorted(known)}")
    return cls(**record)


def _copied(value: Any) -> Any:
  """Return a deep copy of a value as JSON would read it back.

  A value that JSON cannot hold keeps its type: it can be filtered, but not added. Raises ValueError for names that are
  not texts.
  """
  if value is None or isinstance(value, (str, bool, int, float)):
    return value
  if isinstance(value, Mapping):
    if bad := [name for name in value if not isinstance(name, str)]:
      raise ValueError(f"under {bad[0]!r}; names are texts")
    return {name: _copied(each) for name, each in value.items()}
  if isinstance(value, (list, tuple)):
    return [_copied(each) for each in value]
  return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else copy.deepcopy(value)


def is_deeper(value: Any, levels: int) -> bool:
  """Tell whether lists and dicts are nested in more than `levels` levels, without recursion."""
  level = [value]
  for _ in range(levels):
    if not level:
      return False
    level = [x for v in level if isinstance(v, (list, dict)) for x in (v.values() if isinstance(v, dict) else v)]
  return bool(level)


def check_storable(document: Document) -> None:
  """Raise ValueError for metadata that cannot be written to a file, or not be read back from it."""
  if is_deeper(dict(document.metadata), DEEPEST + 1):
    raise ValueError(f"the metadata of document {document.id!r} is nested more than {DEEPEST} deep; leave that out")
  _as_json(dict(document.metadata), f"document {document.id!r}")


def is_utf8(text: str) -> bool:
  """Tell whether a text can be written as UTF-8; one with a lone surrogate, which JSON escapes allow, cannot."""
  return well_formed(text) == text


def _as_json(value: Any, what: str, **options: Any) -> bytes:
  """Return a value as JSON bytes. Raises ValueError, with the owner `what` of the metadata, if JSON cannot hold it."""
  try:
    return json.dumps(value, ensure_ascii=False, **options).encode()
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(
      f"the metadata of {what} cannot be written as JSON ({error}): use texts, numbers and lists"
    ) from None


SHARD = 50_000  # documents, or embeddings, in one file


def without_origin(document: Document) -> Document:
  """Return a document without the metadata that a build adds, as for a document that is added by hand."""
  if not document.metadata.keys() & {FILE, PART, FORMER}:
    return document
  kept = {name: value for name, value in document.metadata.items() if name not in (FILE, PART, FORMER)}
  return dataclasses.replace(document, metadata=kept)


def by_hand(document: Document, file: str | None) -> Document:
  """Return a document without a file of a build, so that a sync keeps it.

  With a `file`, the one that the document, or a document that it replaces, came from, a sync that finds its id in a
  file replaces it.
  """
  kept = {name: value for name, value in document.metadata.items() if name not in (FILE, FORMER)}
  return dataclasses.replace(document, metadata=kept if file is None else {**kept, FORMER: file})


def file_of(document: Document) -> str | None:
  """Return the file that a document, or a document that it replaces, came from; None for a document without one."""
  return document.metadata.get(FILE, document.metadata.get(FORMER))


def whole_id(document: Document) -> str:
  """Return the id of the document that a chunk was cut from, or the document's own id if it is whole."""
  return document.id.rpartition("#")[0] if PART in document.metadata else document.id


def write_documents(folder: Path, documents: Sequence[Document]) -> None:
  """Write documents, in order, as JSON records of ArrayRecord files."""
  from array_record.python import array_record_module

  for number, start in enumerate(range(0, len(documents), SHARD)):
    writer = array_record_module.ArrayRecordWriter(str(folder / f"documents-{number:05}.array_record"), "group_size:64")
    for document in documents[start : start + SHARD]:
      writer.write(_as_json(document.to_dict(), f"document {document.id!r}"))
    writer.close()


def read_documents(folder: Path) -> Iterator[Document]:
  """Yield the documents that `write_documents` has written."""
  from array_record.python import array_record_module

  for file in sorted(folder.glob("documents-*.array_record")):
    reader = array_record_module.ArrayRecordReader(str(file))
    for record in reader.read_all():
      yield Document.from_dict(json.loads(record))
    reader.close()

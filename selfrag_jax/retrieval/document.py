"""`Document`: a text with an id, which a retriever returns with a score; files of them."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

# in the metadata of what a knowledge base was built of: the file, and which of the document's chunks it is
FILE, PART = "kb:file", "kb:chunk"


@dataclasses.dataclass(frozen=True)
class Document:
  """A text of a knowledge base. It cannot be changed: a result is a copy with its own `score`."""

  id: str
  title: str = ""
  content: str = ""
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  score: float | None = None  # of the search that found it; higher is better
  source: str = ""  # where it comes from: a file, an address

  def __post_init__(self):
    """Raises ValueError for an id or texts of another type, and for metadata that JSON cannot name."""
    for name in ("id", "title", "content", "source"):
      if not isinstance(getattr(self, name), str):
        raise ValueError(f"{name} of document {self.id!r} is {getattr(self, name)!r}, it must be a text")
    if not self.id:
      raise ValueError(f"a document needs an id that is not empty; its content begins with {self.content[:40]!r}")
    if bad := [key for key in self.metadata if not isinstance(key, str)]:
      raise ValueError(f"document {self.id!r} has metadata under {bad[0]!r}; names are texts")
    object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))

  def with_score(self, score: float) -> "Document":
    """Return a copy with a score, which is all that differs: the fields have been checked."""
    copy = object.__new__(Document)
    copy.__dict__.update(self.__dict__, score=score)  # dataclasses.replace takes as long as a search by BM25
    return copy

  @property
  def text(self) -> str:
    """Title and content, as retrievers index them."""
    return f"{self.title} {self.content}" if self.title else self.content

  @property
  def fields(self) -> dict[str, Any]:
    """What a filter sees: the metadata, and id, title and source."""
    return {**self.metadata, "id": self.id, "title": self.title, "source": self.source}

  def to_dict(self) -> dict[str, Any]:
    """Return the document as JSON holds it."""
    return {**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, "metadata": dict(self.metadata)}

  @classmethod
  def from_dict(cls, record: Mapping[str, Any]) -> "Document":
    """Make a document of `to_dict`. Raises ValueError, naming what is missing or unknown."""
    known = {field.name for field in dataclasses.fields(cls)}
    if unknown := record.keys() - known:
      raise ValueError(f"a document has no {', '.join(sorted(unknown))}; put it into metadata. It has {sorted(known)}")
    if "id" not in record:
      raise ValueError(f"a document needs an id; this one has {sorted(record)}")
    return cls(**record)


SHARD = 50_000  # documents, or embeddings, of a file


def without_origin(document: Document) -> Document:
  """Return a document without what a build notes in its metadata: it is added by hand."""
  if not document.metadata.keys() & {FILE, PART}:
    return document
  kept = {name: value for name, value in document.metadata.items() if name not in (FILE, PART)}
  return dataclasses.replace(document, metadata=kept)


def write_documents(folder: Path, documents: Sequence[Document]) -> None:
  """Write documents as ArrayRecord files of JSON, in their order."""
  from array_record.python import array_record_module

  for number, start in enumerate(range(0, len(documents), SHARD)):
    writer = array_record_module.ArrayRecordWriter(str(folder / f"documents-{number:05}.array_record"), "group_size:64")
    for document in documents[start : start + SHARD]:
      writer.write(json.dumps(document.to_dict(), ensure_ascii=False).encode())
    writer.close()


def read_documents(folder: Path) -> Iterator[Document]:
  """Yield what `write_documents` has written."""
  from array_record.python import array_record_module

  for file in sorted(folder.glob("documents-*.array_record")):
    reader = array_record_module.ArrayRecordReader(str(file))
    for record in reader.read_all():
      yield Document.from_dict(json.loads(record))
    reader.close()

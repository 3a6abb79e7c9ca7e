"""Knowledge bases: files are read, cleaned, cut, freed of duplicates, embedded, and published as a whole."""

import contextlib
import dataclasses
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from jax.experimental import multihost_utils
from tqdm import tqdm

from selfrag_jax import files
from selfrag_jax.retrieval.base import BaseRetriever, create, load
from selfrag_jax.retrieval.dense import DenseRetriever
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.duplicates import Duplicates
from selfrag_jax.retrieval.embedding import BlockEncoder
from selfrag_jax.retrieval.folder import MANIFEST
from selfrag_jax.retrieval.sources import Found, read_source, source_files
from selfrag_jax.text.chunking import Method, chunk, count_words

UNFINISHED = ".build"  # beside the published files: the blocks of a build that has not ended
FILE, PART = "file", "chunk"  # in the metadata: where a document was read, and which of its chunks it is


@dataclasses.dataclass(frozen=True)
class Chunking:
  """How documents are cut: into chunks of at most `size` words or tokens of the encoder; `size` 0 leaves them whole."""

  size: int = 180  # words, of which all-MiniLM-L6-v2 reads about 190
  overlap: int = 0
  method: Method = "recursive"
  unit: Literal["word", "token"] = "word"

  def __post_init__(self):
    """Raises ValueError for what does not fit."""
    if self.unit not in ("word", "token"):
      raise ValueError(f"the unit of chunks is {self.unit!r}; one of word, token")
    if self.size:
      chunk("", self.size, self.overlap, method=self.method)


def prepare_knowledge_base(
  documents: str | os.PathLike | Sequence[str | os.PathLike],
  output: str | os.PathLike,
  retriever_type: str = "dense",
  *,
  settings: dict[str, Any] | None = None,
  chunking: Chunking = Chunking(),
  near_duplicates: float = 1.0,
  sync: bool = False,
  skip_bad: bool = False,
  progress: bool = True,
) -> dict[str, Any]:
  """Build a knowledge base from files, and return what was read and kept.

  A build that was killed goes on where it was: vectors are kept in blocks as they are made. What `output` held stays
  usable until the new one is whole. With several hosts each embeds its share; the folder must be one that all see.

  Args:
    documents: files or folders that `source_files` takes.
    output: a local folder.
    retriever_type, settings: what `create` takes.
    chunking: how documents are cut.
    near_duplicates: similarity from which a chunk that repeats another is left out; 1: the same words.
    sync: bring a knowledge base up to date: only texts that it does not have are embedded. What was added to it by hand
      stays.
    skip_bad: leave out, and count, what cannot be understood.
    progress: show bars on standard error.

  Raises ValueError, with file and line, for what cannot be understood, and for two documents with one id;
  FileExistsError if `output` holds a knowledge base and `sync` is not set; FolderInUseError while another process
  builds there.
  """
  inputs = [documents] if isinstance(documents, (str, os.PathLike)) else list(documents)
  root = Path(output).absolute()
  exists = (root / MANIFEST).exists()
  if exists and not sync:
    raise FileExistsError(
      f"{output} holds a knowledge base already; --sync brings it up to date, or give another folder"
    )
  retriever = create(retriever_type, **settings or {})
  duplicates = Duplicates(near_duplicates)  # refuses what it cannot take before an encoder is loaded
  sources = _sources(inputs)
  with _in_blocks(retriever, root, progress) as encoders:
    old = load(root) if exists else None
    kept, counts = _read(sources, chunking, _counter(chunking, encoders), duplicates, skip_bad, progress)
    if old is not None:
      _know(encoders, old)
      taken = {document.id for document in kept}
      kept += [d for d in old.documents if FILE not in d.metadata and d.id not in taken]  # added by hand
    retriever.add_documents(kept)
    counts["embedded"] = sum(part.encoder.embedded for part in encoders)  # type: ignore[attr-defined]
    retriever.build = {
      "chunking": dataclasses.asdict(chunking),
      "near_duplicates": near_duplicates,
      "files": {name: files.digest(path) for name, path in sources.items()},
      "encoders": [part.encoder.key for part in encoders],  # type: ignore[attr-defined]
      "counts": {name: n for name, n in counts.items() if name != "embedded"},
    }
    _publish(retriever, root)
  return {"documents": len(retriever), **counts}


def merge_knowledge_bases(
  folders: Sequence[str | os.PathLike], output: str | os.PathLike, *, progress: bool = True
) -> int:
  """Put the documents of knowledge bases of one kind into a new one, and return how many; their vectors are taken over.

  A document that two of them have is taken once. Raises ValueError for other types or settings, and for one id with two
  texts; FileExistsError if `output` holds a knowledge base.
  """
  root = Path(output).absolute()
  if (root / MANIFEST).exists():
    raise FileExistsError(f"{output} holds a knowledge base already; give another folder")
  parts = [load(folder) for folder in folders]
  first = parts[0]
  documents: dict[str, Document] = {}
  for folder, part in zip(folders, parts, strict=True):
    if (part.name, part.settings) != (first.name, first.settings):
      raise ValueError(
        f"{folders[0]} is {first.name} {first.settings}, {folder} is {part.name} {part.settings}: build them alike"
      )
    for document in part.documents:
      if documents.setdefault(document.id, document) != document:
        raise ValueError(f"{folder} has another document with the id {document.id!r}; delete one of them first")
  merged = create(first.name, **first.settings)
  with _in_blocks(merged, root, progress) as encoders:
    for part in parts:
      _know(encoders, part)
    merged.add_documents(documents.values())
    keys = [part.encoder.key for part in encoders]  # type: ignore[attr-defined]
    merged.build = {"merged": [part.build for part in parts], "encoders": keys}
    _publish(merged, root)
  return len(merged)


def dense_parts(retriever: BaseRetriever) -> list[DenseRetriever]:
  """List the dense retrievers that a retriever is made of."""
  own = [retriever] if isinstance(retriever, DenseRetriever) else []
  return own + [found for part in retriever.parts for found in dense_parts(part)]


def _sources(inputs: Sequence[str | os.PathLike]) -> dict[str, Path]:
  found: dict[str, Path] = {}
  for path in inputs:
    for name, file in source_files(path).items():
      if name in found:
        raise ValueError(f"{found[name]} and {file} have the same name; give the folder that holds both")
      found[name] = file
  return found


@contextlib.contextmanager
def _in_blocks(retriever: BaseRetriever, root: Path, progress: bool) -> Iterator[list[DenseRetriever]]:
  """Let the dense parts of a retriever embed in blocks that are kept until it is published; yield those parts.

  One process at a time builds in a folder, beside the other hosts of the same build.
  """
  folder = root / UNFINISHED
  folder.mkdir(parents=True, exist_ok=True)
  advice = "wait for it to end, or give another folder"
  with files.lock_folder(folder, advice) if jax.process_index() == 0 else contextlib.nullcontext():
    for part in (encoders := dense_parts(retriever)):
      part.encoder = BlockEncoder(part.encoder, part.settings["model_name"], folder, progress=progress)
    yield encoders


def _publish(retriever: BaseRetriever, root: Path) -> None:
  """Save what was built and take the blocks away, once no other host reads them or looks for an older build."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices("knowledge base built")
  if jax.process_index() == 0:
    retriever.save(root)
    shutil.rmtree(root / UNFINISHED, ignore_errors=True)


def _counter(chunking: Chunking, encoders: Sequence[DenseRetriever]) -> Callable[[Sequence[str]], Sequence[int]]:
  """Return what says how long texts are."""
  if chunking.unit == "word" or not chunking.size:
    return count_words
  tokenizer = next(
    (part.encoder.encoder.tokenizer for part in encoders if hasattr(part.encoder.encoder, "tokenizer")), None
  )  # type: ignore[attr-defined]
  if tokenizer is None:
    raise ValueError("chunks are counted in tokens of the encoder, and this retriever has none: count words")
  return lambda texts: [len(ids) for ids in tokenizer.encode_batch(texts)]


def _read(
  sources: dict[str, Path],
  chunking: Chunking,
  count: Callable[[Sequence[str]], Sequence[int]],
  duplicates: Duplicates,
  skip_bad: bool,
  progress: bool,
) -> tuple[list[Document], Counter[str]]:
  """Read all files; return the chunks that are left, and how many files, documents and chunks there were."""
  counts = Counter({"files": len(sources), "read": 0, "chunks": 0, "duplicates": 0, "bad": 0})
  places: dict[str, str] = {}
  kept: list[Document] = []

  def failed(error: ValueError) -> None:
    if not skip_bad:
      raise error
    counts["bad"] += 1
    if counts["bad"] <= 5:
      print(f"left out: {error}", file=sys.stderr)

  with tqdm(unit="doc", desc="reading", disable=not progress, mininterval=0.5) as bar:
    for name, path in sources.items():
      for found in read_source(name, path, failed):
        if (id := found.document.id) in places:
          failed(ValueError(f"{found.place}: the id {id!r} is that of {places[id]}; ids must be unique"))
          continue
        places[id] = found.place
        counts["read"] += 1
        bar.update()
        for document in _chunks(found, name, chunking, count):
          counts["chunks"] += 1
          if duplicates.first(document.id, document.text) is None:
            kept.append(document)
          else:
            counts["duplicates"] += 1
  if not kept:
    raise ValueError(f"{', '.join(sources)}: no document is left; {counts['bad']} could not be understood")
  return kept, counts


def _chunks(
  found: Found, name: str, chunking: Chunking, count: Callable[[Sequence[str]], Sequence[int]]
) -> Iterator[Document]:
  document = found.document
  metadata = {**document.metadata, FILE: name}
  spans = []
  if chunking.size:
    spans = chunk(document.content, chunking.size, chunking.overlap, method=chunking.method, count=count)
  if len(spans) < 2:
    yield dataclasses.replace(document, metadata=metadata)
    return
  for number, span in enumerate(spans):
    yield dataclasses.replace(
      document,
      id=f"{document.id}#{number}",
      content=document.content[span.start : span.end].strip(),
      metadata={**metadata, PART: number},
    )


def _know(encoders: Sequence[DenseRetriever], old: BaseRetriever) -> None:
  """Let encoders know the vectors of an earlier knowledge base."""
  for part, before in zip(encoders, dense_parts(old), strict=False):
    encoder: Any = part.encoder
    if before.settings["model_name"] != part.settings["model_name"]:
      continue
    # what a model was standardised by may stay; the word counts of a token bag are made anew, as its vectors are
    if hasattr(encoder.encoder, "params") and (constants := getattr(before.encoder, "constants", {})):
      encoder.encoder.constants = constants
    if encoder.key in old.build.get("encoders", ()):
      rows = zip(old.documents, before.vectors, strict=True)
      encoder.known = {**encoder.known, **{document.text: row for document, row in rows}}

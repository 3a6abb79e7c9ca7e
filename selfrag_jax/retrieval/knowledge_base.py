"""Knowledge bases: files are read, cleaned, cut, freed of duplicates, embedded, and published as a whole."""

import contextlib
import dataclasses
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from tqdm import tqdm

from selfrag_jax import files
from selfrag_jax.retrieval.base import BaseRetriever, create, load
from selfrag_jax.retrieval.dense import DenseRetriever
from selfrag_jax.retrieval.document import FILE, PART, Document, without_origin
from selfrag_jax.retrieval.duplicates import Duplicates
from selfrag_jax.retrieval.embedding import BlockEncoder, is_known
from selfrag_jax.retrieval.folder import MANIFEST, FolderError, check_ours, verified
from selfrag_jax.retrieval.sources import Found, read_source, source_files
from selfrag_jax.text.chunking import Method, chunk, count_words

UNFINISHED = ".build"  # beside the published files: the blocks of a build that has not ended


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
  retriever_type: str | None = None,
  *,
  settings: dict[str, Any] | None = None,
  chunking: Chunking | Mapping[str, Any] | None = None,
  near_duplicates: float | None = None,
  sync: bool = False,
  skip_bad: bool = False,
  progress: bool = True,
) -> dict[str, Any]:
  """Build a knowledge base from files, and return what was read and kept.

  A build that was killed goes on where it was: vectors are kept in blocks as they are made. What `output` held stays
  usable until the new one is whole. With several hosts each embeds its share; the folder must be one that all see.

  Args:
    documents: files or folders that `source_files` takes.
    output: a local folder, new or empty.
    retriever_type, settings: what `create` takes; dense.
    chunking: how documents are cut, or what of `Chunking()` is to be otherwise.
    near_duplicates: similarity from which a chunk that repeats another is left out; 1, the default: the same words.
    sync: bring a knowledge base up to date: only texts that it does not have are embedded. What was added to it by hand
      stays. What is not given of the four above is as it was built.
    skip_bad: leave out, and count, what cannot be understood.
    progress: show bars on standard error.

  Raises ValueError, with file and line, for what cannot be understood, and for two documents with one id;
  FileExistsError if `output` holds a knowledge base that is not damaged and `sync` is not set; FolderError for a folder
  of other files, or if the knowledge base was changed meanwhile; FolderInUseError while another process builds there.
  """
  inputs = [documents] if isinstance(documents, (str, os.PathLike)) else list(documents)
  root = Path(output).absolute()
  _refuse_existing(root, output, sync)
  old = load(root) if sync and (root / MANIFEST).exists() else None
  retriever, chunking, near_duplicates = _plan(old, retriever_type, settings, chunking, near_duplicates)
  duplicates = Duplicates(near_duplicates)  # refuses what it cannot take before an encoder is loaded
  sources = _sources(inputs)
  retriever._read = {root: old._read[root]} if old is not None else _must_stay_free(root)
  with _in_blocks(retriever, root, progress) as encoders:
    by_hand = {} if old is None else {d.id: d for d in old.documents if FILE not in d.metadata}
    kept, counts = _read(sources, chunking, _counter(chunking, encoders), duplicates, by_hand, skip_bad, progress)
    if old is not None:
      _know(encoders, old)
    retriever.add_documents([*kept, *by_hand.values()])
    counts["embedded"] = _total(sum(part.encoder.embedded for part in encoders))  # type: ignore[attr-defined]
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
  """Put the documents of knowledge bases of one kind into a new one, and return how many.

  Vectors of one encoder are taken over; those of a token bag are made anew, since it weighs words by all documents. A
  document that two of them have is taken once; all count as added by hand when the new one is synced. Raises ValueError
  for other types or settings, and for one id with two texts; FileExistsError if `output` holds a knowledge base.
  """
  root = Path(output).absolute()
  _refuse_existing(root, output, sync=False)
  parts = [load(folder) for folder in folders]
  first = parts[0]
  documents: dict[str, Document] = {}
  for folder, part in zip(folders, parts, strict=True):
    if (part.name, part.settings) != (first.name, first.settings):
      raise ValueError(
        f"{folders[0]} is {first.name} {first.settings}, {folder} is {part.name} {part.settings}: build them alike"
      )
    for document in map(without_origin, part.documents):
      if documents.setdefault(document.id, document) != document:
        raise ValueError(f"{folder} has another document with the id {document.id!r}; delete one of them first")
  merged = create(first.name, **first.settings)
  merged._read = _must_stay_free(root)
  with _in_blocks(merged, root, progress) as encoders:
    for part in parts:
      _know(encoders, part, fitted=part is first)
    merged.add_documents(documents.values())
    keys = [part.encoder.key for part in encoders]  # type: ignore[attr-defined]
    merged.build = {"merged": [part.build for part in parts], "encoders": keys}
    _publish(merged, root)
  return len(merged)


def dense_parts(retriever: BaseRetriever) -> list[DenseRetriever]:
  """List the dense retrievers that a retriever is made of."""
  own = [retriever] if isinstance(retriever, DenseRetriever) else []
  return own + [found for part in retriever.parts for found in dense_parts(part)]


def _is_there(root: Path) -> bool:
  return (root / MANIFEST).exists()


def _must_stay_free(root: Path) -> dict[Path, int]:
  """Say that nobody else may publish in a folder before us; what is there is damaged and goes."""
  return {} if _is_there(root) else {root: 0}


def _refuse_existing(root: Path, output: str | os.PathLike, sync: bool) -> None:
  """Raise FileExistsError for a knowledge base that a build would take away, unless it is damaged."""
  check_ours(root)
  if sync or not _is_there(root):
    return
  with contextlib.suppress(FolderError):
    verified(root)
    raise FileExistsError(
      f"{output} holds a knowledge base already; --sync brings it up to date, or give another folder"
    )


def _plan(
  old: BaseRetriever | None,
  retriever_type: str | None,
  settings: dict[str, Any] | None,
  chunking: Chunking | Mapping[str, Any] | None,
  near_duplicates: float | None,
) -> tuple[BaseRetriever, Chunking, float]:
  """Make the retriever, and say how to cut and compare: as given, else as the old one was built, else the defaults."""
  build = {} if old is None else old.build
  if not isinstance(chunking, Chunking):
    chunking = Chunking(**{**build.get("chunking", {}), **(chunking or {})})
  near = float(build.get("near_duplicates", 1.0) if near_duplicates is None else near_duplicates)
  if old is None:
    return create(retriever_type or "dense", **settings or {}), chunking, near
  if retriever_type not in (None, old.name):
    raise ValueError(
      f"the knowledge base is {old.name}, not {retriever_type}: leave the type out, or build another folder"
    )
  retriever = create(old.name, **(old.settings if settings is None else settings))
  return retriever, chunking, near


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
  folder, encoders = root / UNFINISHED, dense_parts(retriever)
  folder.mkdir(parents=True, exist_ok=True)
  advice = "wait for it to end, or give another folder"
  with contextlib.ExitStack() as stack:
    with _on_host_0("could not begin to build"):
      if jax.process_index() == 0:
        stack.enter_context(files.lock_folder(folder, advice))
        if not all(is_known(part.encoder) for part in encoders):  # a function may be another one than last time
          for block in folder.glob("*.npy"):
            block.unlink()
    for part in encoders:
      part.encoder = BlockEncoder(part.encoder, part.settings["model_name"], folder, progress=progress)
    yield encoders


def _publish(retriever: BaseRetriever, root: Path) -> None:
  """Save what was built and take the blocks away, once no other host reads them; all return when it is there."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices("knowledge base built")
  with _on_host_0("could not publish"):
    if jax.process_index() == 0:
      retriever.save(root)
      shutil.rmtree(root / UNFINISHED, ignore_errors=True)


@contextlib.contextmanager
def _on_host_0(failure: str) -> Iterator[None]:
  """Let the other hosts wait for what host 0 does, and raise OSError in them when it raises."""
  error: BaseException | None = None
  try:
    yield
  except Exception as raised:
    error = raised
  if jax.process_count() > 1:
    is_done = multihost_utils.process_allgather(np.array(error is None))
    if error is None and not np.all(is_done):
      raise OSError(f"another host {failure}; its message says why")
  if error is not None:
    raise error


def _total(n: int) -> int:
  return int(np.sum(multihost_utils.process_allgather(np.array(n)))) if jax.process_count() > 1 else n


def _counter(chunking: Chunking, encoders: Sequence[DenseRetriever]) -> Callable[[Sequence[str]], Sequence[int]]:
  """Return what says how long texts are."""
  if chunking.unit == "word" or not chunking.size:
    return count_words
  tokenizer = next(
    (part.encoder.encoder.tokenizer for part in encoders if hasattr(part.encoder.encoder, "tokenizer")), None
  )  # type: ignore[attr-defined]
  if tokenizer is None:
    raise ValueError("chunks are counted in tokens of the encoder, and this retriever has none: count words")
  encode_batch = getattr(tokenizer, "encode_batch", None) or (lambda texts: [tokenizer.encode(text) for text in texts])
  return lambda texts: [len(ids) for ids in encode_batch(texts)]


def _read(
  sources: dict[str, Path],
  chunking: Chunking,
  count: Callable[[Sequence[str]], Sequence[int]],
  duplicates: Duplicates,
  by_hand: Mapping[str, Document],
  skip_bad: bool,
  progress: bool,
) -> tuple[list[Document], Counter[str]]:
  """Read all files; return the chunks that are left, and how many files, documents and chunks there were."""
  counts = Counter({"files": len(sources), "read": 0, "chunks": 0, "duplicates": 0, "bad": 0})
  places = {id: "a document that was added by hand" for id in by_hand}
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
        chunks = list(_chunks(found, name, chunking, count))
        ids = dict.fromkeys([found.document.id, *(document.id for document in chunks)])
        if taken := next((id for id in ids if id in places), None):
          failed(ValueError(f"{found.place}: the id {taken!r} is that of {places[taken]}; ids must be unique"))
          continue
        places |= dict.fromkeys(ids, found.place)
        counts["read"] += 1
        bar.update()
        for document in chunks:
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
  document = without_origin(found.document)
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


def _know(encoders: Sequence[DenseRetriever], old: BaseRetriever, *, fitted: bool = True) -> None:
  """Let encoders know the vectors of an earlier knowledge base, if they are the same; `fitted`: and what it fitted."""
  for part, before in zip(encoders, dense_parts(old), strict=False):
    encoder: Any = part.encoder
    if before.settings["model_name"] != part.settings["model_name"]:
      continue
    # what a model was standardised by may stay; the word counts of a token bag are made anew, as its vectors are
    if fitted and hasattr(encoder.encoder, "params") and (constants := getattr(before.encoder, "constants", {})):
      encoder.encoder.constants = constants
    if is_known(encoder.encoder) and encoder.key in old.build.get("encoders", ()):
      rows = zip(old.documents, before.vectors, strict=True)
      encoder.known = {**encoder.known, **{document.text: row for document, row in rows}}

"""The building and merging of knowledge bases: files are read, cut, deduplicated, embedded and published as a whole."""

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from selfrag_jax.encoders.cached import BlockEncoder
from selfrag_jax.retrieval.base import BaseRetriever, create, load, read_folder
from selfrag_jax.retrieval.document import FILE, PART, Document, by_hand, file_of, whole_id, without_origin
from selfrag_jax.retrieval.duplicates import Duplicates
from selfrag_jax.retrieval.folder import UNFINISHED, check_output, verified
from selfrag_jax.retrieval.listing import LeftOut, Source, list_sources
from selfrag_jax.retrieval.reading import Chunking, dense_parts, read_chunks
from selfrag_jax.storage.generation import DamagedError, discard_lock, version
from selfrag_jax.storage.lock import lock_folder
from selfrag_jax.storage.manifest import MANIFEST, file_digest

BY_HAND = "a document that was added by hand; delete that one (delete --id), or give this another id"


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
  """Build a knowledge base from files, and return a report with the numbers of documents read, kept and left out.

  A killed build, started again, goes on where it was: vectors are kept in blocks as they are made. The old contents of
  `output` stay usable until the new knowledge base is whole. With several hosts each embeds its share; all hosts must
  see the folder.

  Args:
    documents: files or folders that `list_sources` accepts.
    output: a local folder, new or empty.
    retriever_type, settings: the arguments of `create` (`dense`, without settings).
    chunking: how documents are cut, or a mapping of the values that differ from `Chunking()`.
    near_duplicates: least similarity at which a chunk is left out as a duplicate of another; 1, the default: the same
      words.
    sync: update the knowledge base in `output`. Only new texts are embedded (by a token bag, which weighs words by all
      documents, all texts if any document has changed). Documents that were added by hand stay; but a document that was
      added from a file is `replaced` if one of these files has a document with its id. The four arguments above default
      to their values in the last build. `removed` counts the old documents that are gone.
    skip_bad: leave out, and count, lines and files that cannot be read.
    progress: show progress bars on standard error.

  Within a folder, files that are empty, binary or not UTF-8 are left out and counted as `bad`, and files of other types
  are counted by suffix as `left_out`; `problems` describes the first bad ones. If a file cannot be read, a sync keeps
  the old documents from it.

  Raises ValueError, with file and line, for invalid contents and for two documents with one id; OSError for a file or
  folder that the system does not let us read; FileExistsError if `output` holds a knowledge base that is not damaged
  and `sync` is not set; FolderError for a folder of other files, and if the knowledge base was changed meanwhile;
  FolderInUseError while another process builds there.
  """
  inputs = [documents] if isinstance(documents, (str, os.PathLike)) else list(documents)
  root, left_out = Path(output).resolve(), LeftOut(skip_bad)
  check_output(root)
  old = read_folder(root) if sync and (root / MANIFEST).exists() else None
  known = _replaceable_version(root, output) if old is None else old._read
  retriever, chunking, near_duplicates = _resolve_settings(old, retriever_type, settings, chunking, near_duplicates)
  duplicates = Duplicates(near_duplicates)  # refuses a wrong similarity before an encoder is loaded
  sources = list_sources(inputs, left_out)
  retriever._read = dict(known)
  with _in_blocks(retriever, root, progress) as encoders:
    earlier = [] if old is None else old.documents
    places = {d.id: BY_HAND for d in earlier if FILE not in d.metadata and file_of(d) is None}
    kept, counts = read_chunks(sources, left_out, chunking, retriever, places, duplicates=duplicates, progress=progress)
    if not kept:
      raise ValueError(f"{', '.join(map(str, inputs))}: no document is left; {left_out.told()}")
    if old is not None:
      _reuse_vectors(encoders, old)
    stays, replaced = _carried_over(earlier, places, left_out)
    retriever.add_documents([*kept, *stays])
    embedded = _total(sum(encoder.embedded for encoder in encoders))
    report = {**counts, **left_out.report()}
    if old is not None:
      report |= _changes(earlier, retriever.documents, replaced)
    arguments = {"chunking": dataclasses.asdict(chunking), "near_duplicates": near_duplicates}
    files = _digests(sources, left_out, {} if old is None else old.build.get("files", {}))
    found = {"counts": {**counts, "bad": left_out.bad}, "left_out": report["left_out"]}
    retriever.build = {**arguments, "files": files, "encoders": [encoder.key for encoder in encoders], **found}
    _publish(retriever, root)
  return {"documents": len(retriever), **report, "embedded": embedded}


def _changes(earlier: Iterable[Document], now: Iterable[Document], replaced: Iterable[Document]) -> dict[str, int]:
  """Count the documents, not their chunks, that a sync has removed and replaced."""
  gone = set(map(whole_id, earlier)) - set(map(whole_id, now))
  return {"removed": len(gone), "replaced": len(set(map(whole_id, replaced)))}


def _carried_over(
  earlier: Iterable[Document], places: Mapping[str, str], left_out: LeftOut
) -> tuple[list[Document], list[Document]]:
  """Return the old documents that stay beside the new ones read at `places`, and hand-added documents to replace."""
  added, of_files, replaced = [], [], []
  for document in earlier:
    is_read = not places.keys().isdisjoint((document.id, whole_id(document)))
    if FILE in document.metadata:
      if not is_read and left_out.hides(document.metadata[FILE]):
        of_files.append(document)
    elif is_read and file_of(document) is not None:
      replaced.append(document)
    else:
      added.append(document)
  return [*added, *of_files], replaced


def _digests(sources: Mapping[str, Source], left_out: LeftOut, before: Mapping[str, Any]) -> dict[str, Any]:
  """Return the digests of the files that were read, and the earlier digests of files that could not be read."""
  read = {name: file_digest(source.path) for name, source in sources.items() if not left_out.hides(name)}
  return {**{name: digest for name, digest in before.items() if left_out.hides(name)}, **read}


def merge_knowledge_bases(
  folders: Sequence[str | os.PathLike], output: str | os.PathLike, *, progress: bool = True
) -> int:
  """Merge knowledge bases of one kind into a new one, and return its number of documents.

  Vectors of one encoder are copied; vectors of a token bag are made anew, since it weighs words by all documents. A
  document that occurs in two knowledge bases is taken once. A sync of the new one replaces documents whose ids are in
  its files and keeps the others; it cuts texts and finds duplicates as all the old ones did, if they were built alike.
  Raises ValueError for different types or settings, and for one id with two texts; FileExistsError if `output` holds a
  knowledge base.
  """
  root = Path(output).resolve()
  known = _replaceable_version(root, output)
  parts = [load(folder) for folder in folders]
  first = parts[0]
  documents: dict[str, Document] = {}
  for folder, part in zip(folders, parts, strict=True):
    if (part.name, part.settings) != (first.name, first.settings):
      raise ValueError(
        f"{folders[0]} is {first.name} {first.settings}, {folder} is {part.name} {part.settings}: build them alike"
      )
    for document in part.documents:
      if document.id not in documents:
        documents[document.id] = by_hand(document, file_of(document))
      elif without_origin(documents[document.id]) != without_origin(document):
        raise ValueError(f"{folder} has another document with the id {document.id!r}; delete one of them first")
  cut = {whole_id(document) for document in documents.values() if PART in document.metadata}
  if both := sorted(cut & documents.keys()):
    raise ValueError(f"{both[0]!r} is whole in one of them and cut into chunks in another: build them alike")
  merged = create(first.name, **first.settings)
  merged._read = known
  with _in_blocks(merged, root, progress) as encoders:
    for part in parts:
      _reuse_vectors(encoders, part, fitted=part is first)
    merged.add_documents(documents.values())
    keys = [encoder.key for encoder in encoders]
    same = {name: value for name, value in first.build.items() if all(p.build.get(name) == value for p in parts)}
    alike = {name: same[name] for name in ("chunking", "near_duplicates") if name in same}
    merged.build = {**alike, "merged": [part.build for part in parts], "encoders": keys}
    _publish(merged, root)
  return len(merged)


def _replaceable_version(root: Path, output: str | os.PathLike) -> dict[Path, str]:
  """Return the version of a folder that a new knowledge base may replace: an empty or damaged one.

  Raises FileExistsError for a folder with a whole knowledge base.
  """
  check_output(root)
  if (root / MANIFEST).exists():
    with contextlib.suppress(DamagedError):
      verified(root)
      raise FileExistsError(
        f"{output} holds a knowledge base already; --sync brings it up to date, or give another folder"
      )
  return {root: version(root)}


def _resolve_settings(
  old: BaseRetriever | None,
  retriever_type: str | None,
  settings: dict[str, Any] | None,
  chunking: Chunking | Mapping[str, Any] | None,
  near_duplicates: float | None,
) -> tuple[BaseRetriever, Chunking, float]:
  """Return a new retriever, the chunking, and the similarity of duplicates.

  Each comes from the arguments; if they are None, from the build of the old retriever; else from the defaults.
  """
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


@contextlib.contextmanager
def _in_blocks(retriever: BaseRetriever, root: Path, progress: bool) -> Iterator[list[BlockEncoder]]:
  """Let the dense parts of a retriever embed in blocks, which are kept until it is published; yield their encoders.

  Only one build at a time may use a folder; all hosts of that build share it.
  """
  folder, parts, is_new = root / UNFINISHED, dense_parts(retriever), not root.exists()
  folder.mkdir(parents=True, exist_ok=True)
  advice = "wait for it to end, or give another folder"
  with contextlib.ExitStack() as stack:
    with _on_host_0("could not begin to build"):
      if jax.process_index() == 0:
        stack.enter_context(lock_folder(folder, advice))
        stack.push(lambda kind, *_: _discard(folder, is_new) if kind else None)
        if any(part.encoder.fingerprint is None for part in parts):  # it may have changed since
          for block in folder.glob("*.npy"):
            block.unlink()
    encoders = [BlockEncoder(part.encoder, part.settings["model_name"], folder, progress=progress) for part in parts]
    for part, encoder in zip(parts, encoders, strict=True):
      part.encoder = encoder
    yield encoders


def _discard(folder: Path, is_new: bool) -> None:
  """Delete the folders and the lock of a build that failed before it had embedded anything."""
  if folder.is_dir():
    discard_lock(folder, is_new=True)
  if is_new and not any(folder.parent.iterdir()):
    folder.parent.rmdir()


def _publish(retriever: BaseRetriever, root: Path) -> None:
  """Save the retriever and delete the blocks, once no host reads them; all hosts return when the save is done."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices("knowledge base built")
  with _on_host_0("could not publish"):
    if jax.process_index() == 0:
      retriever.save(root)
      shutil.rmtree(root / UNFINISHED, ignore_errors=True)


@contextlib.contextmanager
def _on_host_0(failure: str) -> Iterator[None]:
  """Make the other hosts wait until host 0 has finished the block, and raise OSError in them if host 0 fails."""
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


def _reuse_vectors(encoders: Sequence[BlockEncoder], old: BaseRetriever, *, fitted: bool = True) -> None:
  """Give encoders the vectors of an earlier knowledge base with the same encoders and, if `fitted`, their constants."""
  keys = old.build.get("encoders", ())
  for number, (encoder, before) in enumerate(zip(encoders, dense_parts(old), strict=False)):
    if before.settings["model_name"] != encoder.model_name:
      continue
    # a model keeps what it was fitted to; a token bag counts words anew, and unless the counts come out the
    # same its vectors are made anew too
    if fitted and encoder.learned_params and (constants := before.constants):
      encoder.constants = constants
    if encoder.fingerprint is not None and number < len(keys):
      rows = zip(old.documents, before.vectors, strict=True)
      vectors = {document.text: row for document, row in rows}
      encoder.known[keys[number]] = {**encoder.known.get(keys[number], {}), **vectors}

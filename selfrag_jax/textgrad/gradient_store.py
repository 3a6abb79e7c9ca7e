"""A store of all critiques that an optimizer has received, searched by the similarity of samples and critiques."""

import collections
import io
import math
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from selfrag_jax.encoders.base import Encoder, TextFunction, as_encoder
from selfrag_jax.encoders.hashed_words import HashingEncoder
from selfrag_jax.memory.records import Chunk
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.storage.atomic import write_bytes_atomic
from selfrag_jax.storage.manifest import FormatError, Manifest, ManifestError
from selfrag_jax.textgrad.critiques import HEAD, Critique, PastCritique, parse_line, write_line

LOGGED = 1000  # changes of a small store before its log is rewritten
FEW = 32  # the mean of so few records says little of what all records share: it is shrunk towards 0
UNKNOWN = {"accepted": None, "delta": None, "uses": 0, "helped": 0}  # the outcome of a new critique
_MANIFEST = Manifest({"encoder": str, "width": int}, name="gradient_store.json", format=3)


class GradientStoreError(RuntimeError):
  """The folder holds no gradient store that can be opened with these settings."""


class GradientStore:
  """Critiques in memory or in a folder, each with two embeddings: of its sample and of its text.

  A folder's texts stay on disk, so the memory in use does not depend on their length. Texts of deleted critiques leave
  the file when they outnumber the rest. One process writes to a folder, others may read; `kill -9` loses at most the
  critique that was being written. Near duplicates of the same role are counted, not added. A full store deletes the
  critiques that helped least, were used least and are oldest.
  """

  def __init__(
    self,
    path: str | None = None,
    *,
    encoder: Encoder | TextFunction | None = None,
    encoder_name: str | None = None,
    max_records: int = 100_000,
    sample_weight: float = 0.5,
    dedupe_threshold: float | None = 0.98,
    read_only: bool = False,
  ):
    """Open the store in a folder, or make one.

    Args:
      path: local folder; None keeps everything in memory.
      encoder: an `Encoder`, or a function from texts to [N, D]; a `HashingEncoder` by default, the folder's own if it
        was made with one.
      encoder_name: name of the encoder in the folder; the encoder's `name` by default, required if it has none.
      max_records: how many critiques fit.
      sample_weight: weight of the samples' similarity in a search; the critiques' similarity has the rest. 1 searches
        by the sample alone, 0 by the critique alone. A folder has both embeddings and can be opened with any weight.
        Critiques that name their subject are the best key (precision@8 of the router's: 1.000, by both 0.983, by the
        sample 0.579: benchmarks/gradient_keys.py); both are the default because not every critic names it.
      dedupe_threshold: similarity of both embeddings from which a critique repeats an earlier one; None: never.
      read_only: open the folder as it is now, even while another process writes to it.

    Raises GradientStoreError for a folder of another encoder or version, FolderInUseError when another process writes.
    """
    if not 0 <= sample_weight <= 1:
      raise ValueError(f"sample_weight = {sample_weight} must be between 0 and 1")
    self._encoder = as_encoder(encoder) if encoder else _hashing_of(path) or HashingEncoder()
    name, width = encoder_name or self._encoder.name, self._encoder.width
    self._sample_weight, self._max_records = sample_weight, max_records
    self._recent: dict[str, collections.deque[str]] = collections.defaultdict(lambda: collections.deque(maxlen=64))
    self._lock, self._changes = threading.RLock(), 0
    self._total = np.zeros(2 * width)  # sum of the rows of all records
    self._places: dict[str, tuple[int, int]] = {}  # id -> start and length of its line
    settings = {"encoder": name, "width": width}
    options = {"backend": "numpy", "dedupe_threshold": dedupe_threshold, "dedupe_within": "role"}
    self._file, self._texts = None if path is None else pathlib.Path(path) / "critiques.jsonl", io.BytesIO()
    if self._file is None:
      self._memory = MemoryStore(2 * width, max_records, chunk_size=0, metric="dot", **options)
      return
    if not name:
      raise ValueError("a folder remembers its encoder: give encoder_name, or an encoder with a name")
    self._memory = self._open_memory(self._file.parent, settings, max_records, read_only, options)
    self._max_records = self._memory.settings["max_chunks"]
    self._open_texts(self._file, read_only)
    self._total += self._memory.embeddings.sum(axis=0, dtype=np.float64)
    known = zip(self._memory.ids, self._memory.metadata, strict=True)
    for id, facts in sorted(known, key=lambda item: int(item[0])):
      self._note_recent(facts["role"], id)

  @staticmethod
  def _open_memory(
    folder: pathlib.Path, settings: dict[str, Any], max_records: int, read_only: bool, options: dict[str, Any]
  ) -> MemoryStore:
    if (found := _settings(folder)) is not None:
      if found != settings:
        raise GradientStoreError(
          f"{folder} was written with the encoder {found['encoder']} of width {found['width']}, this one is "
          f"{settings['encoder']} of width {settings['width']}: open it with that one, or give another folder"
        )
      return MemoryStore.load(str(folder / "memory"), read_only=read_only, **options)
    if read_only or (folder.exists() and any(folder.iterdir()) and not (folder / "memory").exists()):
      raise GradientStoreError(f"{folder} holds no gradient store; give its folder, or an empty one for a new store")
    folder.mkdir(parents=True, exist_ok=True)
    begun = (folder / "memory" / "manifest.json").exists()  # a process was killed before it wrote the manifest
    make = MemoryStore.load if begun else MemoryStore
    sizes = {"d_model": 2 * settings["width"], "max_chunks": max_records, "chunk_size": 0, "metric": "dot"}
    memory = make(path=str(folder / "memory"), **({} if begun else sizes), **options)
    if (found := memory.settings["d_model"]) != sizes["d_model"]:
      memory.close()
      raise GradientStoreError(
        f"{folder} was begun with an encoder of width {found // 2}, this one has {settings['width']}, and holds no "
        "critique yet: delete it, or give another folder"
      )
    (folder / "critiques.jsonl").touch()
    _MANIFEST.write(folder, **settings)
    return memory

  def _open_texts(self, file: pathlib.Path, read_only: bool) -> None:
    self._texts = open(file, "rb" if read_only else "r+b", buffering=0)  # noqa: SIM115
    try:
      end = self._find_lines()
    except ValueError as error:
      self.close()
      raise GradientStoreError(f"{file} was damaged: {error}") from None
    if missing := len(set(self._memory.ids) - self._places.keys()):
      self.close()
      raise GradientStoreError(
        f"{file} lacks the texts of {missing} critiques: it was damaged, or has changed while it was opened"
      )
    if not read_only:
      self._texts.truncate(end)  # without a line that was not written to its end

  def __len__(self) -> int:
    return len(self._memory)

  def __enter__(self) -> "GradientStore":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Release the folder. Nothing is lost without this call."""
    self._memory.close()
    self._texts.close()

  def embed(self, critiques: Sequence[Critique]) -> np.ndarray:
    """Embed each sample and its critique side by side, f32 [N, 2D]; each half has norm 1, or 0 for an empty text.

    Neither half contains the prompt that is being optimized, which is the same for all critiques.
    """
    texts = [text for c in critiques for text in (c.sample, c.text)]
    rows = np.asarray(self._encoder([text or " " for text in texts]), np.float32)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    rows[[not text.strip() for text in texts]] = 0
    return rows.reshape(len(critiques), -1)

  def add(self, critiques: Sequence[Critique], rows: np.ndarray | None = None) -> list[str]:
    """Store critiques and return their ids; a near duplicate gets the id of the critique that it repeats.

    `rows` [N, 2D] come from `embed`. Raises OSError when the disk is full; then nothing is added.
    """
    if not critiques:
      return []
    rows = self.embed(critiques) if rows is None else rows
    with self._lock:
      self._make_room(len(critiques))
      first = int(next(reversed(self._places), "-1")) + 1
      new = [str(first + i) for i in range(len(critiques))]
      self._append(new, [write_line(id, c) for id, c in zip(new, critiques, strict=True)])
      metadata = [{"role": c.role, "run": c.run, "step": c.step, **UNKNOWN} for c in critiques]
      ids = self._memory.add_many(["critique"] * len(critiques), rows, metadata=metadata, ids=new)
      self._total += rows[[id == own for id, own in zip(ids, new, strict=True)]].sum(axis=0, dtype=np.float64)
      for id, critique in zip(ids, critiques, strict=True):
        self._note_recent(critique.role, id)
      if len(self._places) > 2 * len(self._memory) + FEW:
        self._compact()
      self._note_changes(len(ids))
    return ids

  def _append(self, ids: Sequence[str], lines: Sequence[bytes]) -> None:
    start = self._texts.seek(0, os.SEEK_END)
    try:
      _write(self._texts, b"".join(lines))
    except BaseException:
      self._texts.truncate(start)
      raise
    self._note_places(start, ids, lines)

  def _note_changes(self, n: int) -> None:
    """Rewrite the memory's log, to which each change adds its vector, when it is much longer than the memory."""
    self._changes += n
    if self._file is not None and self._changes > 2 * len(self._memory) + LOGGED:
      self._memory.save()
      self._changes = 0

  def forget(self, run: str, step: int) -> None:
    """Delete the critiques that a run added from a step on: the step was interrupted and will be repeated.

    Repetitions of older critiques were only counted, and their counts stay.
    """
    with self._lock:
      known = zip(self._memory.ids, self._memory.metadata, strict=True)
      self._give_up([id for id, facts in known if facts["run"] == run and facts["step"] >= step])

  def search(
    self, rows: np.ndarray, k: int, *, role: str | None = None, min_score: float = 0.0
  ) -> list[list[PastCritique]]:
    """Find the k past critiques most similar to each of the rows of `embed` [N, 2D], best first, of a role if given.

    The mean row of all records is subtracted first, so that two records with nothing else in common have a similarity
    of about 0, whatever the encoder. An empty store raises nothing.
    """
    queries, offsets = self._centred(rows)
    least = min_score + offsets.min(initial=0.0)
    if role is None or self._recent.keys() <= {role}:
      fitting = self._memory.search_batched(queries, k, min_score=least)
    else:  # if most records have the role, it is faster to search for more and drop the rest than to filter all
      found = self._memory.search_batched(queries, 4 * k, min_score=least)
      fitting = [[c for c in chunks if c.metadata["role"] == role][:k] for chunks in found]
      if any(len(chunks) < k <= len(all_) // 4 for chunks, all_ in zip(fitting, found, strict=True)):
        fitting = self._memory.search_batched(queries, k, where={"role": role}, min_score=least)
    past = [
      [self._past(chunk, (chunk.score or 0.0) - offset) for chunk in chunks]
      for chunks, offset in zip(fitting, offsets.tolist(), strict=True)
    ]
    return [[critique for critique in found if critique.similarity >= min_score] for found in past]

  def _centred(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return queries [N, 2D] and offsets [N]: a record's similarity is its product with the query less the offset."""
    mean = (self._total / (len(self._memory) + FEW)).astype(np.float32)
    halves = (rows - mean).reshape(len(rows), 2, -1)
    halves /= np.maximum(np.linalg.norm(halves, axis=2, keepdims=True), 1e-12)
    halves *= np.array([self._sample_weight, 1 - self._sample_weight], np.float32)[:, None]
    queries = halves.reshape(rows.shape)
    return queries, queries @ mean

  def recent(self, n: int, *, role: str) -> list[PastCritique]:
    """Return the last n critiques of a role, up to 64, newest first."""
    ids = [id for id in reversed(self._recent[role]) if id in self._memory]
    return [self._past(self._memory.get(id)) for id in ids[:n]]

  def note_outcome(self, ids: Iterable[str], accepted: bool, delta: float | None) -> None:
    """Record whether the change that followed some critiques was accepted, and how much it changed the score."""
    self._update(ids, lambda facts: {"accepted": accepted, "delta": delta})

  def note_use(self, ids: Iterable[str], helped: bool) -> None:
    """Record that critiques were shown to the optimizer again, and whether the change that followed was better."""
    self._update(ids, lambda facts: {"uses": facts["uses"] + 1, "helped": facts["helped"] + helped})

  def _update(self, ids: Iterable[str], changed: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    for id in ids:
      if id in self._memory:
        self._memory.update(id, metadata=changed(self._memory.get(id).metadata))
        self._note_changes(1)

  def read(self, id: str) -> Critique:
    """Read a critique. Raises KeyError for an unknown id."""
    with self._lock:
      start, size = self._places[id]
      self._texts.seek(start)
      line = self._texts.read(size)
    try:
      known, critique = parse_line(line)
    except ValueError as error:
      raise GradientStoreError(f"{self._file} was damaged: the line of critique {id}: {error}") from None
    if known != id:
      raise GradientStoreError(f"the text of critique {id} is not where it was; open the store again")
    return critique

  def _past(self, chunk: Chunk, similarity: float = 0.0) -> PastCritique:
    names = ("accepted", "delta", "uses", "helped", "run", "step")
    vector = self._memory.vectors([chunk.id])[0]
    return PastCritique(
      id=chunk.id,
      similarity=similarity,
      count=chunk.count,
      vector=vector[len(vector) // 2 :],
      read=lambda: self.read(chunk.id),
      **{name: chunk.metadata[name] for name in names},
    )

  def _note_recent(self, role: str, id: str) -> None:
    recent = self._recent[role]
    if id not in recent:  # a repeated critique keeps its place, as it does when the store is reopened
      recent.append(id)

  def _make_room(self, n: int) -> None:
    """Delete the least valuable critiques, at least a twentieth at a time, where n more would not fit."""
    if n > self._max_records:
      raise ValueError(f"{n} critiques at once do not fit into a store of max_records={self._max_records}")
    if len(self._memory) + n <= self._max_records:
      return
    chunks = [self._memory.get(id) for id in self._memory.ids]
    newest = max(int(chunk.id) for chunk in chunks)
    chunks.sort(key=lambda chunk: _value(chunk, newest))
    count = max(len(chunks) + n - self._max_records, len(chunks) // 20)
    self._give_up([chunk.id for chunk in chunks[:count]])

  def _give_up(self, ids: Sequence[str]) -> None:
    self._memory.delete(ids)
    self._total = self._memory.embeddings.sum(axis=0, dtype=np.float64)

  def _compact(self) -> None:
    """Rewrite the file without the texts of deleted critiques; the new file replaces the old one in one step."""
    last = next(reversed(self._places))  # it stays, so that no id is used twice
    kept = [id for id in self._places if id in self._memory or id == last]
    lines = [write_line(id, self.read(id)) for id in kept]
    if self._file is None:
      self._texts = io.BytesIO(b"".join(lines))
    else:
      try:
        write_bytes_atomic(str(self._file), b"".join(lines))
        self._texts.close()
        self._texts = open(self._file, "r+b", buffering=0)  # noqa: SIM115
      except BaseException:  # it is unknown which of the two files is open: nothing more may be written
        self.close()
        raise
    self._places = {}
    self._note_places(0, kept, lines)

  def _note_places(self, start: int, ids: Sequence[str], lines: Sequence[bytes]) -> None:
    for id, line in zip(ids, lines, strict=True):
      self._places[id] = start, len(line)
      start += len(line)

  def _find_lines(self) -> int:
    """Note where each line begins; return the end of the last whole line."""
    start = 0
    with open(os.dup(self._texts.fileno()), "rb") as file:  # the file that is open: a writer may replace the path
      for line in file:
        if not line.endswith(b"\n"):
          break
        if not line.startswith(HEAD):
          raise ValueError(f"{line[:40]!r} is no critique")
        id = line[len(HEAD) : line.index(b'"', len(HEAD))]
        if not id.isdigit():
          raise ValueError(f"{line[:40]!r} is no critique")
        self._note_places(start, [id.decode()], [line])
        start += len(line)
    return start


def _write(file: BinaryIO, data: bytes) -> None:
  view = memoryview(data)
  while view:  # a raw file may write only a part
    view = view[file.write(view) :]


def _value(chunk: Chunk, newest: int) -> float:
  """Return the value of keeping a critique: the sum of its outcome, use and recency, each between 0 and 1."""
  facts = chunk.metadata
  outcome = {True: 1.0, None: 0.5, False: 0.0}[facts["accepted"]]
  use = math.tanh((facts["uses"] + facts["helped"] + chunk.count - 1) / 4)
  age = (newest - int(chunk.id)) / max(newest, 1)  # by ids, since steps begin at 0 in every run
  return outcome + use + (1 - age)


def _hashing_of(path: str | None) -> HashingEncoder | None:
  """Return the hashing encoder that a folder was made with; None for a new folder or another encoder."""
  found = None if path is None else _settings(pathlib.Path(path))
  return None if found is None else HashingEncoder.named(found["encoder"])


def _settings(folder: pathlib.Path) -> dict[str, Any] | None:
  """Return the encoder's name and the width that a folder was made with; None where there is no store yet."""
  try:
    found = _MANIFEST.read(folder)
  except FileNotFoundError:
    return None
  except ManifestError as error:
    raise GradientStoreError(f"{folder / _MANIFEST.name} was damaged: {error}") from None
  except FormatError as error:
    raise GradientStoreError(f"{folder} has format {error.found}, this version reads {_MANIFEST.format}") from None
  return {name: found[name] for name in _MANIFEST.fields}

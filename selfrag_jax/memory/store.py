"""`MemoryStore`, a store of text chunks that are found by the similarity of embeddings and may be kept in a folder."""

import collections
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from selfrag_jax.checked import check_encoder
from selfrag_jax.memory.backends import make_backend
from selfrag_jax.memory.backends.device import DeviceBackend
from selfrag_jax.memory.backends.scann import ScannBackend
from selfrag_jax.memory.contents import Contents
from selfrag_jax.memory.dedupe import near_duplicates
from selfrag_jax.memory.filters import Where
from selfrag_jax.memory.index import VectorIndex
from selfrag_jax.memory.journal import Journal, Snapshot, StoreError
from selfrag_jax.memory.records import Chunk, Recency, check_metadata, check_rows, check_score, make_records, token_rows
from selfrag_jax.memory.scoring import Metric, check_k
from selfrag_jax.memory.store_lock import StoreLock
from selfrag_jax.memory.table import Change, Table

if TYPE_CHECKING:
  from jax.sharding import Mesh

  from selfrag_jax.memory.state import MemoryRows


SETTINGS = ("d_model", "max_chunks", "chunk_size", "metric")
OPTIONS = "backend, dtype, mesh, encoder, min_score, dedupe_threshold, dedupe_within, read_only and fsync"


class MemoryStore(Contents):
  """A memory of text chunks with embeddings and metadata, and with filters, deletions and a log on disk.

  Embeddings are float32 on the host; `backend` chooses the search: `exact` or `approx` on the devices (in `dtype`,
  sharded over `mesh`), `scann` or `numpy` on the host. A full store drops its oldest chunk for a new one.
  Only one process writes to a folder, and no fork of it; others open it with `read_only`. Threads may share a store.
  """

  def __init__(
    self,
    d_model: int,
    max_chunks: int = 10_000,
    *,
    chunk_size: int = 64,
    path: str | None = None,
    backend: str = "exact",
    metric: Metric = "cosine",
    dtype: str = "float32",
    mesh: "Mesh | None" = None,
    encoder: Callable[[Sequence[str]], Any] | None = None,
    min_score: float | None = None,
    dedupe_threshold: float | None = None,
    dedupe_within: str | None = None,
    fsync: bool = False,
  ):
    """Make an empty store, in memory or in the folder `path`, which must not hold one yet.

    Args:
      d_model: width of the embeddings.
      max_chunks: the largest number of chunks.
      chunk_size: the largest number of token ids of a chunk.
      path: a local folder; None keeps the store in memory until `save(path)`.
      backend: exact, approx, scann or numpy.
      metric: cosine or dot.
      dtype: the storage type on the devices: float32, bfloat16 or int8.
      mesh: the devices to shard over, along the mesh's `data` axis.
      encoder: a function of texts to [N, d_model], so that `add` and `search` need the text alone.
      min_score: the least score of a search result, unless the search gives its own.
      dedupe_threshold: a chunk whose cosine with an earlier chunk is at least this is only counted (None: keep all).
      dedupe_within: a metadata field that must agree too for a chunk to be only counted (None: no field).
      fsync: survive power cuts as well as `kill -9`; slower.

    Raises ValueError for settings that do not fit, StoreError if the folder already holds a store.
    """
    check_score("min_score", min_score)
    check_score("dedupe_threshold", dedupe_threshold)
    check_encoder(encoder)
    if metric not in ("cosine", "dot"):
      raise ValueError(f"unknown metric {metric!r}; use 'cosine' or 'dot'")
    index = VectorIndex(max_chunks, d_model, chunk_size, backend=make_backend(backend, dtype, mesh))
    (C, D), X = index.embeddings.shape, index.tokens.shape[1]
    self._settings = {"d_model": D, "max_chunks": C, "chunk_size": X, "metric": metric}
    self._table = Table(index)
    self._encoder, self._min_score, self._dedupe = encoder, min_score, (dedupe_threshold, dedupe_within)
    self._lock = StoreLock()
    self._journal: Journal | None = None
    self._copies: dict[str, tuple] = {}  # path -> the journal's stamp of the copy saved there
    if path is not None:
      self._journal = Journal(path, fsync=fsync)
      try:
        if self._journal.exists():
          raise StoreError(f"{path} already holds a store; open it with MemoryStore.load, or give another folder")
        self._journal.publish(self._snapshot())
      except BaseException:
        self._journal.close()
        raise
      self._lock.folder = self._journal.folder

  @classmethod
  def load(cls, path: str, *, read_only: bool = False, fsync: bool = False, **options: Any) -> "MemoryStore":
    """Open the store in a folder; further changes are logged there.

    `options` are the constructor's arguments that a folder does not hold: backend, dtype, mesh, encoder, min_score,
    dedupe_threshold and dedupe_within. With `read_only` nothing is locked or changed, and the store stays as it is at
    this moment. Raises StoreError if the folder is damaged, newer than this version, or not a store; FolderInUseError
    if another process writes to it; ValueError for an option that the folder fixes.
    """
    if fixed := [name for name in SETTINGS if name in options]:
      raise ValueError(
        f"{fixed[0]} is not chosen when a store is opened: {path} has its own; what can be chosen are {OPTIONS}. To "
        "change it, make a new store and add the chunks to it"
      )
    journal = Journal(path, read_only=read_only, fsync=fsync, create=False)
    try:
      snapshot, changes = journal.read()
      try:
        *sizes, added = (snapshot.settings[name] for name in (*SETTINGS, "added"))
      except (LookupError, TypeError) as error:
        raise StoreError(f"the manifest of {path} is damaged ({error!r}); restore the folder from a copy") from None
      store = cls(**dict(zip(SETTINGS, sizes, strict=True)), **options)
      try:
        store._table.restore(snapshot.records, snapshot.arrays, added)
        for change in changes:
          store._table.check(change.header["add"], change.arrays)
          store._table.apply(change)
      except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise StoreError(f"{path} holds what no store writes ({error!r}); restore the folder from a copy") from None
    except BaseException:
      journal.close()
      raise
    store._journal = journal
    store._lock.folder = None if read_only else journal.folder
    return store

  def add(
    self,
    text: str,
    embedding: Any = None,
    *,
    token_ids: Sequence[int] | None = None,
    metadata: Mapping[str, Any] | None = None,
    id: str | None = None,
    key: str | None = None,
  ) -> str:
    """Add one chunk and return its id; see `add_many`."""
    one = lambda value: None if value is None else [value]
    return self.add_many(
      [text], one(embedding), token_ids=one(token_ids), metadata=one(metadata), ids=one(id), keys=one(key)
    )[0]

  def add_many(
    self,
    texts: Sequence[str],
    embeddings: Any = None,
    *,
    token_ids: Sequence[Sequence[int]] | None = None,
    metadata: Sequence[Mapping[str, Any]] | None = None,
    ids: Sequence[str] | None = None,
    keys: Sequence[str | None] | None = None,
    replacing: Iterable[str] = (),
  ) -> list[str]:
    """Add chunks, all or none, and return their ids.

    embeddings [N, d_model] default to those of the store's encoder. Metadata without `position` (number of chunks added
    before), `timestamp` (seconds) or `source` ("") gets them. A chunk with a `key` replaces the earlier chunk with that
    key. A near duplicate (see `dedupe_threshold`) is only counted under the old chunk, whose id is returned; a chunk
    with a key is never a duplicate. A full store drops its oldest chunks. The chunks with the ids `replacing` are
    deleted in the same change: a killed process leaves either them or the new chunks.

    Raises:
      ValueError: an empty text, more tokens than chunk_size, an id twice, embeddings of another width or with NaN,
        metadata that JSON cannot hold. Nothing is added.
      KeyError: no chunk has one of the ids `replacing`. Nothing is added.
      OSError: the log cannot be written (a full disk). Nothing is added.
    """
    with self._lock:
      if not len(texts):
        self.delete(replacing)
        return []
      superseded = set(self._known(replacing))
      taken = self._table.records.keys() - superseded if superseded else self._table.records
      records = make_records(texts, metadata, ids, keys, taken=taken, position=self._table.added)
      tokens, lengths = token_rows(token_ids, len(texts), self._settings["chunk_size"])
      rows = self._embed(texts) if embeddings is None else check_rows(embeddings, len(texts), self._settings["d_model"])
      superseded |= {self._table.keys[record["key"]] for record in records if record["key"] in self._table.keys}
      newest = {record["key"]: i for i, record in enumerate(records)}
      same_as = near_duplicates(self._table, rows, records, superseded, *self._dedupe)
      kept = [
        i
        for i, record in enumerate(records)
        if same_as[i] is None and (record["key"] is None or newest[record["key"]] == i)
      ]
      self._commit(
        remove=sorted(superseded),
        add=[records[i] for i in kept],
        count=collections.Counter(i for i in same_as if i is not None),
        added=self._table.added + len(texts),
        arrays={"embeddings": rows[kept], "tokens": tokens[kept], "lengths": lengths[kept]},
      )
      return [same or record["id"] for same, record in zip(same_as, records, strict=True)]

  def update(
    self,
    id: str,
    text: str | None = None,
    embedding: Any = None,
    *,
    token_ids: Sequence[int] | np.ndarray | None = None,
    metadata: Mapping[str, Any] | None = None,
  ) -> None:
    """Change the given fields of a chunk, which becomes the newest chunk. Metadata is merged into the old metadata.

    A new text needs a new embedding, given or from the encoder. Raises KeyError for an unknown id, else as `add_many`.
    """
    with self._lock:
      old = self.get(id)
      is_new_text = text is not None and text != old.text
      text = old.text if text is None else text
      if embedding is not None:
        rows = check_rows([embedding], 1, self._settings["d_model"])
      elif is_new_text:
        rows = self._embed([text])
      else:
        rows = self._table.vectors([id])
      kept_tokens = [] if is_new_text else old.token_ids
      given = {} if metadata is None else check_metadata(metadata, f"chunk {id!r}")
      merged = {**old.metadata, "timestamp": time.time(), **given}
      (record,) = make_records([text], [merged], [id], [old.key], taken=(), position=0)
      tokens, lengths = token_rows([kept_tokens if token_ids is None else token_ids], 1, self._settings["chunk_size"])
      arrays = {"embeddings": rows, "tokens": tokens, "lengths": lengths}
      self._commit(remove=[id], add=[{**record, "count": old.count}], arrays=arrays)

  def delete(self, ids: str | Iterable[str] | None = None, *, where: Where | None = None) -> int:
    """Delete chunks by id, or all chunks whose metadata matches `where`, and return how many were deleted.

    Raises KeyError for an unknown id (nothing is deleted), ValueError if neither or both arguments are given.
    """
    with self._lock:
      if ids is not None and where is None:
        chosen = self._known(ids)
      elif ids is None and where:
        chosen = [self._table.ids[slot] for slot in np.flatnonzero(self._table.fitting(where)).tolist()]
      else:
        raise ValueError("delete takes ids or where, one of the two; clear() deletes everything")
      if chosen:
        self._commit(remove=chosen)
      return len(chosen)

  def clear(self) -> None:
    """Delete every chunk."""
    with self._lock:
      self.delete(self.ids)

  def search(self, query: Any, k: int = 5, **options: Any) -> list[Chunk]:
    """Find the k chunks most similar to one query, a text or an embedding [d_model]; `options` as `search_batched`."""
    return self.search_batched([query], k, **options)[0]

  def search_batched(
    self,
    queries: Any,
    k: int = 5,
    *,
    where: Where | None = None,
    min_score: float | None = None,
    recency: Recency | None = None,
  ) -> list[list[Chunk]]:
    """Find the k best chunks for each query, best first; fewer if fewer chunks qualify.

    queries are embeddings [B, d_model], or texts if the store has an encoder. `where` is a filter on the metadata (see
    `memory.filters`); it is applied inside the search, so k chunks come back if k match. Raises ValueError for queries
    of another width or with NaN, for a `k` that is not a whole number of at least 1, for a `recency` of another type,
    and for a filter that is invalid or names metadata that no chunk has.
    """
    check_k(k)
    check_score("min_score", min_score)
    with self._lock:
      is_text = isinstance(queries, (list, tuple)) and all(isinstance(query, str) for query in queries)
      vectors = self._embed(queries) if is_text else check_rows(queries, None, self._settings["d_model"])
      table, metric = self._table, self._settings["metric"]
      allowed = None if where is None else table.fitting(where)
      bias = table.bonus(recency) if recency is not None and len(vectors) else None
      found = table.index.search(vectors, k, allowed=allowed, bias=bias, metric=metric)
      least = self._min_score if min_score is None else min_score
      return [
        [
          table.chunk(table.ids[slot], score)
          for score, slot in zip(scores, slots, strict=True)
          if slot >= 0 and (least is None or score >= least)
        ]
        for scores, slots in zip(found.scores.tolist(), found.slots.tolist(), strict=True)
      ]

  def wait_for_index(self) -> None:
    """Wait for the ScaNN index of the backend `scann`, if a build is due; do nothing with other backends.

    Raises the error of a failed build.
    """
    index = self._table.index
    if isinstance(index.backend, ScannBackend):
      with self._lock:
        index.backend.update(index, self._settings["metric"], wait=True)

  def state(self) -> "MemoryRows":
    """Return the rows on the devices, for compiled search; the next change to the store may donate their buffers.

    `memory.state.write` does not accept the rows, as they have no cursor: only the store knows where the next row goes.
    Raises ValueError for a backend on the host.
    """
    index = self._table.index
    if not isinstance(index.backend, DeviceBackend):
      raise ValueError("this backend keeps nothing on the devices; make the store with backend='exact' or 'approx'")
    with self._lock:
      return index.backend.rows(index)

  def save(self, path: str | None = None, *, overwrite: bool = False) -> None:
    """Write a snapshot to the store's own folder, which empties its log, or as a copy to another folder.

    Another store in that folder is replaced only if this object has saved it there, or if `overwrite` is set. If the
    process is killed, the folder holds the old store or the new one. Raises ValueError if there is no folder,
    StoreError if the folder holds another store.
    """
    with self._lock:
      own = self._journal
      if own is not None and (path is None or os.path.realpath(path) == os.path.realpath(own.folder)):
        own.publish(self._snapshot())
        return
      if path is None:
        raise ValueError("this store has no folder; give save() one")
      with contextlib.closing(Journal(path)) as journal:
        place = os.path.realpath(journal.folder)
        if journal.exists() and not overwrite and self._copies.get(place) != journal.stamp():
          raise StoreError(f"{path} holds another store; give another folder, or overwrite=True to lose what is there")
        journal.publish(self._snapshot())
        self._copies[place] = journal.stamp()

  def close(self) -> None:
    """Close the log and release the folder's lock. Nothing is lost if it is never called."""
    if self._journal is not None:
      with self._lock.for_closing:
        self._journal.close()

  def __enter__(self) -> "MemoryStore":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  @property
  def settings(self) -> dict[str, Any]:
    """The settings that the folder keeps: d_model, max_chunks, chunk_size and metric."""
    return dict(self._settings)

  def _known(self, ids: str | Iterable[str]) -> list[str]:
    """Return the ids without repetitions, in order. Raises KeyError for an unknown id."""
    known = [ids] if isinstance(ids, str) else list(dict.fromkeys(ids))
    if missing := [i for i in known if i not in self._table.records]:
      raise KeyError(f"no chunk has the id {missing[0]!r}")
    return known

  def _embed(self, texts: Sequence[str]) -> np.ndarray:
    if not len(texts):  # an empty list of queries, which needs no encoder
      return np.zeros((0, self._settings["d_model"]), np.float32)
    if self._encoder is None:
      raise ValueError("this store has no encoder: give embeddings, or make the store with encoder=")
    return check_rows(self._encoder(texts), len(texts), self._settings["d_model"])

  def _commit(
    self,
    *,
    remove: Sequence[str] = (),
    add: Sequence[dict[str, Any]] = (),
    count: Mapping[str, int] | None = None,
    added: int | None = None,
    arrays: dict[str, np.ndarray] | None = None,
  ) -> None:
    """Log a change, then make it. Reopening a folder makes the same changes again."""
    header = {"remove": list(remove), "add": list(add), "count": dict(count or {})}
    change = Change({**header, "added": self._table.added if added is None else added}, arrays or {})
    self._lock.is_changing, is_logged = True, False
    try:
      if self._journal is not None:
        self._journal.append(change)
      is_logged = True
      self._table.apply(change)
    except BaseException as error:
      if isinstance(error, Exception) and not is_logged:  # a full disk: the log is as it was
        self._lock.is_changing = False
      else:  # Ctrl-C: the log may have the whole change and the memory a part; nothing more may be logged on top
        self.close()
      raise
    self._lock.is_changing = False

  def _snapshot(self) -> Snapshot:
    return Snapshot({**self._settings, "added": self._table.added}, *self._table.contents())

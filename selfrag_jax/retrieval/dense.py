"""`DenseRetriever`: documents and queries as vectors, searched by the memory's exact or approximate top-k search."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from selfrag_jax.checked import check_encoder
from selfrag_jax.encoders.base import MINILM, Encoder, TextFunction, as_encoder
from selfrag_jax.encoders.load import load_encoder
from selfrag_jax.memory.backends import make_backend
from selfrag_jax.memory.filters import Where
from selfrag_jax.memory.index import VectorIndex
from selfrag_jax.memory.records import check_rows
from selfrag_jax.retrieval.base import BaseRetriever, Hits, register
from selfrag_jax.retrieval.document import SHARD, Document
from selfrag_jax.storage.arrays import read_npz

CONSTANTS = "encoder.npz"
FUNCTION = "function"  # the name in a folder of an encoder that was given as a function
GIVE_AGAIN = (
  "its vectors were made by a function, which no file can hold: give it again, load(folder, encoder=...), in a hybrid "
  "load(folder, retrievers=[..., DenseRetriever(encoder=...)]), to build settings={'encoder': ...}"
)
PROBED = 16  # documents that are embedded again to check that an encoder is the one that made the vectors
SAME = 0.05  # largest distance of two vectors of one text, as a share of their length: precisions may differ
SMALLEST = 1024  # rows of a new index, which grows by doubling, so that few programs are compiled


@register("dense")
class DenseRetriever(BaseRetriever):
  """A retriever by the cosine similarity of embeddings, with exact or approximate search.

  Unless the encoder is already fitted, it is fitted to the first documents that are added, and never again: add many of
  them at once, or fit it before.
  """

  def __init__(
    self,
    model_name: str = MINILM,
    *,
    encoder: Encoder | TextFunction | None = None,
    query_model: str = "",
    backend: str = "exact",
  ):
    """Make a retriever without documents.

    Args:
      model_name: `token-bag`, `all-MiniLM-L6-v2`, or another source of `load_encoder`.
      encoder: any function of texts to [N, D], or an `Encoder`, in place of `model_name`. No file can hold it: it must
        be given to `load` again, which refuses an encoder that embeds the documents otherwise.
      query_model: a source of `load_encoder` that embeds the queries, as one that was trained for these documents'
        vectors does. Empty: the encoder of the documents.
      backend: `exact` or `approx` on the devices, `scann` or `numpy` on the host.
    """
    own_queries = {"query_model": query_model} if query_model else {}
    super().__init__(model_name=model_name if encoder is None else FUNCTION, backend=backend, **own_queries)
    make_backend(backend)  # refuse an unknown one now
    check_encoder(encoder, "a name as model_name")
    self._given = None if encoder is None else as_encoder(encoder)
    self._asking: Encoder | None = None
    self._constants = {}
    self._index: VectorIndex | None = None  # None until the width of the vectors is known
    self._slots: dict[str, int] = {}  # id of a document -> slot of the index
    self._ids: dict[int, str] = {}  # slot -> id
    self._terms: set[int] | None = None  # the terms of all documents, collected at first need

  @property
  def encoder(self) -> Encoder:
    """The encoder; an encoder by name is loaded at first need. Raises ValueError if a function is missing."""
    if self._given is None:
      if self.settings["model_name"] == FUNCTION:
        raise ValueError(GIVE_AGAIN)
      self._given = load_encoder(self.settings["model_name"])
    if self._constants:
      self._given.constants, self._constants = self._constants, {}
    return self._given

  @encoder.setter
  def encoder(self, encoder: Encoder | TextFunction) -> None:
    self._given = as_encoder(encoder)

  @property
  def query_encoder(self) -> Encoder:
    """The encoder of the queries: `query_model`, loaded at first need, or else the encoder of the documents."""
    if self._asking is None and "query_model" in self.settings:
      self._asking = load_encoder(self.settings["query_model"])
    return self._asking or self.encoder.for_queries

  @query_encoder.setter
  def query_encoder(self, encoder: Encoder) -> None:
    self._asking = encoder
    self.settings.pop("query_model", None)

  @property
  def constants(self) -> Mapping[str, Any]:
    """The encoder's fitted arrays by name; empty if it is not fitted."""
    return self._constants or self.encoder.constants

  @property
  def vectors(self) -> np.ndarray:
    """The embeddings of the documents in their order, f32 [N, D]."""
    if self._index is None:
      return np.zeros((0, 0), np.float32)
    return self._index.embeddings[[self._slots[id] for id in self._documents]]

  def _add(self, documents: Sequence[Document]) -> None:
    if self._index is None and not self.encoder.constants:
      self.encoder.fit([document.text for document in documents])
    self._prepare(documents)()

  def _prepare(self, documents: Sequence[Document]) -> Callable[[], None]:
    _ = self.query_encoder  # one that cannot be loaded is said before the documents are embedded
    ids, vectors = [document.id for document in documents], self._embed([document.text for document in documents])
    return lambda: self._add_embedded(ids, vectors)

  def _add_embedded(self, ids: Sequence[str], vectors: np.ndarray) -> None:
    self._terms = None
    if self._index is None:
      self._index = VectorIndex(SMALLEST, vectors.shape[1], backend=make_backend(self.settings["backend"]))
    self._index.reserve(len(ids))
    slots = self._index.add(vectors)
    self._slots.update(zip(ids, slots, strict=True))
    self._ids.update(zip(slots, ids, strict=True))

  def _delete(self, ids: Sequence[str]) -> None:
    assert self._index is not None  # there are documents
    self._terms = None
    slots = [self._slots.pop(id) for id in ids]
    for slot in slots:
      del self._ids[slot]
    self._index.delete(slots)

  def _search(self, queries: Sequence[str], top_k: int, where: Where | None) -> Hits:
    index = self._index
    assert index is not None
    allowed = None
    if where is not None:
      allowed = self._allowed([self._ids.get(slot) for slot in range(len(index.valid))], where)
    found = index.search(self._embed(queries, self.query_encoder), top_k, allowed=allowed)
    slots, scores = np.asarray(found.slots), np.asarray(found.scores)
    slots = np.where(np.array([self._has_terms_of(query) for query in queries])[:, None], slots, -1)
    return Hits(
      [[self._ids[slot] for slot in row if slot >= 0] for row in slots.tolist()],
      [values[row >= 0].tolist() for row, values in zip(slots, scores, strict=True)],
    )

  def _has_terms_of(self, query: str) -> bool:
    """Tell whether a query may find documents: not if its vector is similar to theirs only by chance."""
    if self.encoder.is_familiar(query):
      return True
    if self._terms is None:  # this takes seconds for many documents
      self._terms = set().union(*(self.encoder.terms(document.text) for document in self._documents.values()))
    return not self._terms.isdisjoint(self.encoder.terms(query))

  def _embed(self, texts: Sequence[str], encoder: Encoder | None = None) -> np.ndarray:
    vectors = as_rows((encoder or self.encoder)(texts), len(texts))
    return vectors if self._index is None else check_rows(vectors, len(texts), self._index.embeddings.shape[1])

  def changed(self, sample: int = PROBED) -> list[str]:
    """Embed `sample` documents again, and return the ids of documents whose new vector differs from the stored vector.

    Raises ValueError for an encoder of another width.
    """
    if not self._documents:
      return []
    chosen = np.unique(np.linspace(0, len(self) - 1, min(sample, len(self))).astype(int))
    documents, kept = self.documents, self.vectors[chosen]
    rows = self._embed([documents[i].text for i in chosen])
    lengths = np.maximum(np.linalg.norm(rows, axis=1), np.linalg.norm(kept, axis=1))
    far = np.linalg.norm(rows - kept, axis=1) > SAME * lengths
    return [documents[i].id for i in chosen[far]]

  def _check_encoders(self, replaced: bool) -> None:
    if self.settings["model_name"] != FUNCTION and not replaced:
      return
    _ = self.encoder  # raises if it is missing
    if others := self.changed():
      raise ValueError(
        f"the encoder that is given is not the one that made these vectors: it embeds {len(others)} of "
        f"{min(PROBED, len(self))} documents otherwise, such as {others[0]!r}; give that one, or build it again"
      )

  def _save(self, folder: Path) -> None:
    if self._asking is not None and "query_model" not in self.settings:
      raise ValueError("no file can hold this encoder of queries; save the encoder, and name it as query_model")
    rows = self.vectors
    for number, start in enumerate(range(0, len(rows), SHARD)):
      np.save(folder / f"embeddings-{number:05}.npy", rows[start : start + SHARD], allow_pickle=False)
    if constants := self.constants:
      np.savez(folder / CONSTANTS, **constants)

  def _load(self, folder: Path) -> None:
    if (folder / CONSTANTS).exists():
      self._constants = read_npz(folder / CONSTANTS)  # the encoder gets the constants when it is loaded
    if self._documents:
      shards = [np.load(file, allow_pickle=False) for file in sorted(folder.glob("embeddings-*.npy"))]
      rows = np.concatenate(shards)
      self._add_embedded(list(self._documents), check_rows(rows, len(self._documents), rows.shape[1]))


def as_rows(vectors: Any, count: int) -> np.ndarray:
  """Return the result of an encoder as f32 [count, D]. Raises ValueError for other shapes, NaN and infinity."""
  try:
    rows = np.asarray(vectors, np.float32)
  except (TypeError, ValueError) as error:
    raise ValueError(f"the encoder gave no array of numbers: {error}") from None
  if rows.ndim != 2 or len(rows) != count or not rows.shape[1]:
    raise ValueError(f"the encoder gave shape {rows.shape} for {count} texts; it must be [{count}, D], a row for each")
  return check_rows(rows, *rows.shape)

"""The memory of chat models: texts in a folder, which an encoder finds. The terminal and the server share it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from selfrag_jax.memory.journal import is_free
from selfrag_jax.memory.store import MemoryStore
from selfrag_jax.text.chunking import chunk

MAX_CHUNKS = 10_000  # the oldest go when it is full
RELATED = 0.1  # the least score of a text that has to do with a query; hashed words that differ reach a little less
LONGEST = 128  # words of a chunk
SAME = 0.999  # the least cosine of two embeddings of one text by the same encoder


class NamedEncoder(Protocol):
  """The protocol of an encoder: a function of texts to vectors of a width."""

  @property
  def name(self) -> str: ...
  @property
  def width(self) -> int: ...
  def __call__(self, texts: Sequence[str]) -> Any: ...


def open_store(folder: str | None, encoder: NamedEncoder, *, min_score: float | None = None) -> MemoryStore:
  """Open the memory in a folder, which is made if it is missing; None: a memory that is not kept.

  Raises FolderInUseError if another process writes to it, StoreError for a folder that holds something else, and
  ValueError for texts that were embedded by another encoder.
  """
  # a store on the host: a search of so few texts takes less than a call to a device
  options: dict[str, Any] = {"backend": "numpy", "encoder": encoder, "min_score": min_score}
  if folder is None or is_free(folder):
    return MemoryStore(encoder.width, MAX_CHUNKS, path=folder, fsync=folder is not None, **options)
  store = MemoryStore.load(folder, fsync=True, **options)
  try:
    if store.settings["d_model"] != encoder.width or not _is_same(store, encoder):
      raise ValueError(f"{folder} was not written with the encoder {encoder.name}; name the one that wrote it")
  except BaseException:
    store.close()  # gives the folder back
    raise
  return store


def write_texts(
  store: MemoryStore, texts: Sequence[str], metadata: Sequence[Mapping[str, Any]], replacing: Sequence[str] = ()
) -> list[str]:
  """Write texts, long ones in chunks, in place of the chunks with the ids `replacing`; return the new ids."""
  chunks, each = [], []
  for text, of_text in zip(texts, metadata, strict=True):
    parts = [text[span.new : span.end].strip() for span in chunk(text, LONGEST)]
    chunks += filter(None, parts)
    each += [of_text] * len([*filter(None, parts)])
  return store.add_many(chunks, metadata=each, replacing=replacing)


def _is_same(store: MemoryStore, encoder: NamedEncoder) -> bool:
  """Tell whether an encoder embeds the newest text of a store as the store holds it."""
  if not len(store):
    return True
  newest = store.ids[-1]
  return holds(store, newest, np.asarray(encoder([store.get(newest).text]))[0])


def holds(store: MemoryStore, id: str, now: np.ndarray) -> bool:
  """Tell whether a store holds a text as it is embedded now: the direction of the vectors is the same."""
  then = store.vectors([id])[0]
  return bool(now @ then >= SAME * np.linalg.norm(now) * np.linalg.norm(then))

"""The memory of the server: a store in a folder, whose changes are on the disk when they are acknowledged."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from selfrag_jax.apps.memory import RELATED, open_store
from selfrag_jax.apps.serve.embedder import Embedder
from selfrag_jax.apps.serve.errors import APIError, invalid
from selfrag_jax.memory.journal import StoreError
from selfrag_jax.memory.records import Chunk
from selfrag_jax.memory.store import MemoryStore

T = TypeVar("T")


class Memory:
  """A `MemoryStore` behind a thread of its own."""

  def __init__(self, store: MemoryStore):
    self.store = store
    self._worker = ThreadPoolExecutor(1, thread_name_prefix="memory")

  async def do(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call a function of the store in its thread. Raises APIError in place of the store's errors."""
    call = lambda: function(*args, **options)
    try:
      return await asyncio.get_running_loop().run_in_executor(self._worker, call)
    except KeyError as error:
      raise APIError(404, str(error.args[0]), param="id", code="memory_not_found") from None
    except ValueError as error:
      raise invalid(error) from None
    except OSError as error:
      raise APIError(507, f"the memory could not be written, and is as it was: {error.strerror}") from None
    except StoreError as error:
      raise APIError(503, f"the memory is closed: {error}") from None

  # what is stored is read back in the same call: another request may replace it at once
  async def add(self, text: str, source: str, key: str | None) -> dict[str, Any]:
    """Remember a text, and return it as it is stored."""
    store = lambda: self.store.add(text, metadata={"source": source}, key=key)
    return await self.do(lambda: self._read(store()))

  async def change(self, id: str, text: str) -> dict[str, Any]:
    """Change a text, and return it as it is stored."""

    def changed() -> dict[str, Any]:
      self.store.update(id, text)
      return self._read(id)

    return await self.do(changed)

  async def get(self, id: str) -> dict[str, Any]:
    """Return a text."""
    return await self.do(self._read, id)

  async def search(self, query: str, top_k: int, where: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the texts that are most similar to a query, best first."""
    return [*map(as_result, await self.do(self.store.search, query, top_k, where=where))]

  async def page(self, query: str, limit: int, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return some of the texts, the newest first, or those like a query, the closest first; and how many there are."""
    if query.strip():
      found = await self.do(self.store.search, query, max(len(self.store), 1), min_score=RELATED)
      return [*map(as_result, found[offset : offset + limit])], len(found)
    return await self.do(self._newest, limit, offset)

  def _read(self, id: str) -> dict[str, Any]:
    return as_result(self.store.get(id))

  def _newest(self, limit: int, offset: int) -> tuple[list[dict[str, Any]], int]:
    ids = self.store.ids[::-1]
    return [self._read(id) for id in ids[offset : offset + limit]], len(ids)

  def close(self) -> None:
    """Finish what is being changed, and give the folder back."""
    self._worker.shutdown()
    self.store.close()


def as_result(chunk: Chunk) -> dict[str, Any]:
  """Return a text of the memory as it is written to clients."""
  metadata = dict(chunk.metadata)
  return {
    "id": chunk.id,
    "title": "",
    "text": chunk.text,
    "source": str(metadata["source"]),
    "score": chunk.score,
    "key": chunk.key,
    "metadata": metadata,
  }


def open_memory(folder: str, embedder: Embedder) -> Memory:
  """Open the memory in a folder, which is made if it is missing. Raises like `open_store`."""
  return Memory(open_store(folder, embedder))

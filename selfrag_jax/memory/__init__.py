"""The memory: a ring of embeddings, the top-k over it, and a store of text with metadata and a log."""

from typing import TYPE_CHECKING

from selfrag_jax.lazy import lazy_names

if TYPE_CHECKING:
  from selfrag_jax.memory.journal import StoreError as StoreError
  from selfrag_jax.memory.records import Chunk as Chunk
  from selfrag_jax.memory.records import Recency as Recency
  from selfrag_jax.memory.scoring import SearchResult as SearchResult
  from selfrag_jax.memory.state import MemoryState as MemoryState
  from selfrag_jax.memory.state import clear as clear
  from selfrag_jax.memory.state import delete as delete
  from selfrag_jax.memory.state import init_memory as init_memory
  from selfrag_jax.memory.state import put as put
  from selfrag_jax.memory.state import write as write
  from selfrag_jax.memory.store import MemoryStore as MemoryStore
  from selfrag_jax.memory.topk import search as search
  from selfrag_jax.memory.topk_numpy import search_numpy as search_numpy
else:
  __getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
      "journal": ["StoreError"],
      "records": ["Chunk", "Recency"],
      "scoring": ["SearchResult"],
      "state": ["MemoryState", "clear", "delete", "init_memory", "put", "write"],
      "store": ["MemoryStore"],
      "topk": ["search"],
      "topk_numpy": ["search_numpy"],
    },
  )

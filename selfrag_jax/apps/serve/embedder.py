"""The encoder of the server: one thread at a time embeds texts with it."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from selfrag_jax.encoders.hashed_words import HashingEncoder
from selfrag_jax.encoders.load import load_encoder


class Embedder:
  """An encoder by its name, for the memory and for `/v1/embeddings`."""

  def __init__(self, source: str | None = None):
    """Load an encoder by its name or folder, as `load_encoder` does; None: hashed words, which need no weights."""
    self._encoder = HashingEncoder() if source is None else load_encoder(source)
    self.name = self._encoder.name or Path(source or "").name
    self.width = self._encoder.width
    self._lock = threading.Lock()
    self._worker = ThreadPoolExecutor(1, thread_name_prefix="encoder")

  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    """Embed texts, f32 [N, width], in this thread."""
    with self._lock:
      return np.asarray(self._encoder(texts), np.float32)

  async def embed(self, texts: Sequence[str]) -> np.ndarray:
    """Embed texts in the encoder's thread."""
    return await asyncio.get_running_loop().run_in_executor(self._worker, self, texts)

  def count(self, texts: Sequence[str]) -> int:
    """Return the number of tokens, or of words for an encoder without a tokenizer."""
    count = self._encoder.count_tokens or (lambda texts: [len(text.split()) for text in texts])
    return sum(count(texts))

  def close(self) -> None:
    """End the thread."""
    self._worker.shutdown(cancel_futures=True)

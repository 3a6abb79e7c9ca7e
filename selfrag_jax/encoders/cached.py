"""Embedding many texts: in blocks that are kept as they are made, so that a build which was killed goes on."""

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from tqdm import tqdm

from selfrag_jax.encoders.batches import reporting
from selfrag_jax.storage.atomic import write_bytes_atomic

Encoder = Callable[[Sequence[str]], Any]  # texts -> f32 [N, D]
BLOCK = 1024  # texts: seconds of work, which is what a kill can lose


def encoder_key(encoder: Encoder, name: str) -> str:
  """Return a digest of what the vectors of an encoder depend on: its name, parameters, fit, and `fingerprint`."""
  key = hashlib.sha256(f"{name}\n{getattr(encoder, 'fingerprint', '')}".encode())
  for part in (getattr(encoder, "params", {}), getattr(encoder, "constants", {})):
    for path, leaf in jax.tree.leaves_with_path(part):
      key.update(jax.tree_util.keystr(path).encode())
      key.update(np.ascontiguousarray(leaf).tobytes())
  return key.hexdigest()


def is_known(encoder: Encoder) -> bool:
  """Tell whether `encoder_key` tells this encoder from others; of a bare function it has the name alone."""
  return any(hasattr(encoder, name) for name in ("params", "constants", "fingerprint"))


class BlockEncoder:
  """An encoder whose blocks of vectors are files named by what they hold: made once, by one of the hosts.

  `known` maps the keys of encoders to texts and their vectors: those of this one, as it is fitted, are not made again.
  """

  def __init__(self, encoder: Encoder, name: str, folder: Path, *, progress: bool = True):
    self.encoder, self._name, self._folder, self._progress = encoder, name, folder, progress
    self.known: dict[str, Mapping[str, np.ndarray]] = {}
    self.embedded = 0  # texts that this process has embedded

  def __getattr__(self, name: str) -> Any:
    if name in ("fit", "constants", "tokenizer"):  # which not all encoders have
      return getattr(self.encoder, name)
    raise AttributeError(name)

  @property
  def key(self) -> str:
    """Say what the vectors depend on; an encoder that is fitted has its key behind that."""
    return encoder_key(self.encoder, self._name)

  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    """Embed texts; with several hosts each embeds its share of the blocks, and all return once all are there."""
    key, blocks = self.key, [texts[start : start + BLOCK] for start in range(0, len(texts), BLOCK)]
    paths = [self._folder / f"{_digest(key, block)}.npy" for block in blocks]
    with tqdm(total=len(texts), unit="doc", desc="embedding", disable=not self._progress, mininterval=0.5) as bar:
      for number, (path, block) in enumerate(zip(paths, blocks, strict=True)):
        if number % jax.process_count() == jax.process_index() and not path.exists():
          with reporting(bar.update):
            _write(path, self._embed(block, key))
        bar.update(min((number + 1) * BLOCK, len(texts)) - bar.n)  # what was there, or came from no `embed_by_length`
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices("knowledge base embedded")
    return np.concatenate([np.load(path, allow_pickle=False) for path in paths]) if paths else self._embed([], key)

  def _embed(self, texts: Sequence[str], key: str) -> np.ndarray:
    known = self.known.get(key, {})
    new = [text for text in texts if text not in known]
    self.embedded += len(new)
    vectors = np.asarray(self.encoder(new), np.float32)
    made = iter(vectors)
    return np.stack([known[text] if text in known else next(made) for text in texts]) if known else vectors


def _digest(key: str, texts: Sequence[str]) -> str:
  digest = hashlib.sha256(key.encode())
  for text in texts:
    data = text.encode()
    digest.update(len(data).to_bytes(8, "little") + data)
  return digest.hexdigest()[:32]


def _write(path: Path, rows: np.ndarray) -> None:
  data = io.BytesIO()
  np.save(data, rows, allow_pickle=False)
  write_bytes_atomic(path, data.getvalue())

"""Encoders that keep their vectors: the vectors of a corpus in memory, those of a build in blocks on the disk."""

import hashlib
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from tqdm import tqdm

from selfrag_jax.encoders.base import Encoder
from selfrag_jax.encoders.batches import reporting
from selfrag_jax.storage.atomic import write_bytes_atomic
from selfrag_jax.typing import Params

BLOCK = 1024  # texts: a few seconds of work, the most that a killed build loses


def encoder_key(encoder: Encoder, name: str) -> str:
  """Return a digest of all that an encoder's vectors depend on: name, fingerprint, learned parameters, constants."""
  key = hashlib.sha256(f"{name}\n{encoder.fingerprint or ''}".encode())
  for part in (encoder.learned_params, encoder.constants):
    for path, leaf in jax.tree.leaves_with_path(part):
      key.update(jax.tree_util.keystr(path).encode())
      key.update(np.ascontiguousarray(leaf).tobytes())
  return key.hexdigest()


class CachedEncoder(Encoder):
  """A base class for encoders that keep the vectors of another encoder, to which they pass all other calls."""

  def __init__(self, encoder: Encoder):
    self._encoder, self.name = encoder, encoder.name

  @property
  def width(self) -> int:
    return self._encoder.width

  def fit(self, texts: Sequence[str]) -> None:
    self._encoder.fit(texts)

  @property
  def constants(self) -> dict[str, np.ndarray]:
    return self._encoder.constants

  @constants.setter
  def constants(self, arrays: Mapping[str, np.ndarray]) -> None:
    self._encoder.constants = arrays

  @property
  def learned_params(self) -> Params:
    return self._encoder.learned_params

  @property
  def fingerprint(self) -> str | None:
    return self._encoder.fingerprint

  @property
  def for_queries(self) -> Encoder:
    return self._encoder.for_queries

  @property
  def count_tokens(self) -> Callable[[Sequence[str]], list[int]] | None:
    return self._encoder.count_tokens

  def terms(self, text: str) -> AbstractSet[int]:
    return self._encoder.terms(text)

  def is_familiar(self, text: str) -> bool:
    return self._encoder.is_familiar(text)


class CorpusEncoder(CachedEncoder):
  """An encoder that embeds each text of a corpus once, for all retrievers of an evaluation, and queries every time."""

  def __init__(self, encoder: Encoder, corpus: Collection[str]):
    super().__init__(encoder)
    self._corpus, self._known = frozenset(corpus), dict[str, np.ndarray]()

  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    if not texts or not self._corpus.issuperset(texts):
      return self._encoder(texts)
    if new := [text for text in dict.fromkeys(texts) if text not in self._known]:
      self._known.update(zip(new, np.asarray(self._encoder(new), np.float32), strict=True))
    return np.stack([self._known[text] for text in texts])


class BlockEncoder(CachedEncoder):
  """An encoder that keeps blocks of vectors as files, named by a digest of the texts; one host embeds each block, once.

  A killed build finds its finished blocks when it is started again. `known` maps encoder keys to vectors by text: texts
  that are known under this encoder's key are not embedded again.
  """

  def __init__(self, encoder: Encoder, name: str, folder: Path, *, progress: bool = True):
    super().__init__(encoder)
    self.model_name, self._folder, self._progress = name, folder, progress
    self.known: dict[str, Mapping[str, np.ndarray]] = {}
    self.embedded = 0  # number of texts that this process has embedded

  @property
  def key(self) -> str:
    """The `encoder_key`, a digest of all that the vectors depend on; fitting the encoder changes it."""
    return encoder_key(self._encoder, self.model_name)

  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    """Embed texts; with several hosts each embeds its share of the blocks, and all return when all blocks exist."""
    key, blocks = self.key, [texts[start : start + BLOCK] for start in range(0, len(texts), BLOCK)]
    paths = [self._folder / f"{_digest(key, block)}.npy" for block in blocks]
    with tqdm(total=len(texts), unit="doc", desc="embedding", disable=not self._progress, mininterval=0.5) as bar:
      for number, (path, block) in enumerate(zip(paths, blocks, strict=True)):
        if number % jax.process_count() == jax.process_index() and not path.exists():
          with reporting(bar.update):
            _write(path, self._embed(block, key))
        bar.update(min((number + 1) * BLOCK, len(texts)) - bar.n)  # blocks found, or not counted by `reporting`
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices("knowledge base embedded")
    return np.concatenate([np.load(path, allow_pickle=False) for path in paths]) if paths else self._embed([], key)

  def _embed(self, texts: Sequence[str], key: str) -> np.ndarray:
    known = self.known.get(key, {})
    new = [text for text in texts if text not in known]
    self.embedded += len(new)
    vectors = np.asarray(self._encoder(new), np.float32)
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

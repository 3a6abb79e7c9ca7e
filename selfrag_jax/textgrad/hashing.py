"""The default encoder of critiques: words and pairs of words, hashed (Weinberger et al. 2009, arXiv 0902.2206)."""

import itertools
import re
import zlib
from collections.abc import Sequence

import numpy as np

_COPIES = 4  # places of each word: two words that share all of them are rare


class HashingEncoder:
  """Texts as vectors of norm 1 without weights, files or JAX; texts with words in common are similar.

  A word of many letters says more than a short one, and weighs so: there is no corpus to count frequencies in.
  """

  def __init__(self, width: int = 256):
    """Make an encoder into `width` numbers."""
    self.width, self.name = width, f"hashing-{width}"
    self._known: dict[str, tuple[np.ndarray, np.ndarray]] = {}

  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    """Embed texts, f32 [N, width]; a text without words is 0."""
    rows = np.zeros((len(texts), self.width), np.float32)
    for row, text in zip(rows, texts, strict=True):
      words = re.findall(r"\w+", text.lower())
      counts: dict[str, int] = {}
      for feature in [*words, *map(" ".join, itertools.pairwise(words))]:
        counts[feature] = counts.get(feature, 0) + 1
      if counts:
        places, signs = zip(*map(self._places, counts), strict=True)
        weights = 1 + np.log(np.array([*counts.values()], np.float32))
        np.add.at(row, np.stack(places), np.stack(signs) * weights[:, None])
      row /= np.linalg.norm(row) or 1
    return rows

  def _places(self, feature: str) -> tuple[np.ndarray, np.ndarray]:
    if feature not in self._known:
      if len(self._known) > 100_000:
        self._known.clear()
      hashes = np.array([zlib.crc32(f"{copy} {feature}".encode()) for copy in range(_COPIES)], np.int64)
      weight = min(len(feature), 8) / 8
      self._known[feature] = hashes % self.width, np.where(hashes >> 16 & 1, weight, -weight).astype(np.float32)
    return self._known[feature]

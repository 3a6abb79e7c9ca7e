"""The detection of duplicate texts: equal word for word, or nearly equal by MinHash (Broder 1997) with datasketch."""

import hashlib
import re
from typing import Any

SHINGLE = 3  # words in a shingle
PERMUTATIONS = 128  # of a MinHash


class Duplicates:
  """Finds texts that repeat an earlier text: the Jaccard similarity of their word triples is at least `threshold`.

  A threshold of 1 finds only texts of the same words; case and spacing are ignored.
  """

  def __init__(self, threshold: float = 1.0):
    """Raises ValueError for a threshold outside (0, 1]."""
    if not 0 < threshold <= 1:
      raise ValueError(f"the similarity of near duplicates is {threshold}; it must be in (0, 1]")
    self._threshold, self._seen = threshold, {}
    self._shingles: dict[str, tuple[int, frozenset[str]]] = {}  # id -> the text's place in order, and its triples
    self._index = None
    if threshold < 1:
      from datasketch import MinHashLSH

      # a lower threshold for candidates: LSH overlooks half of the texts that lie just above its own threshold
      self._index = MinHashLSH(threshold=0.7 * threshold, num_perm=PERMUTATIONS)

  def first(self, id: str, text: str) -> str | None:
    """Return the id of the earlier text that this text repeats; if there is none, keep this text and return None."""
    key = hashlib.sha256(" ".join(text.split()).casefold().encode()).digest()
    if key in self._seen:
      return self._seen[key]
    if self._index is not None and (shingles := _shingles(text)):  # a text without words repeats only the same text
      from datasketch import MinHash

      minhash = MinHash(num_perm=PERMUTATIONS)
      minhash.update_batch([shingle.encode() for shingle in shingles])
      # hash buckets give candidates; the sets of triples decide
      candidates: list[Any] = self._index.query(minhash)
      alike = [other for other in candidates if self._jaccard(shingles, other) >= self._threshold]
      if alike:
        return min(alike, key=lambda other: self._shingles[other][0])
      self._index.insert(id, minhash)
      self._shingles[id] = len(self._shingles), shingles
    self._seen[key] = id
    return None

  def _jaccard(self, shingles: frozenset[str], other: str) -> float:
    _, theirs = self._shingles[other]
    return len(shingles & theirs) / len(shingles | theirs)


def _shingles(text: str) -> frozenset[str]:
  """Return the word triples of a text, or all its words as one item if it has fewer than three."""
  found = re.findall(r"\w+", text.casefold())  # includes words of one letter: `step 1` is not `step 2`
  return frozenset(" ".join(found[i : i + SHINGLE]) for i in range(max(len(found) - SHINGLE + 1, bool(found))))

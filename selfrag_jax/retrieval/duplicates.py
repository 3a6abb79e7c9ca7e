"""Texts that say the same: word for word, or nearly, by MinHash (Broder 1997) through datasketch."""

import hashlib
import re
from typing import Any

SHINGLE = 3  # words
PERMUTATIONS = 128


class Duplicates:
  """Finds what repeats an earlier text; `threshold` is the Jaccard similarity of word triples from which one does.

  1 finds only texts of the same words, in whatever case and spacing.
  """

  def __init__(self, threshold: float = 1.0):
    """Raises ValueError for a threshold outside (0, 1]."""
    if not 0 < threshold <= 1:
      raise ValueError(f"the similarity of near duplicates is {threshold}; it must be in (0, 1]")
    self._threshold, self._seen = threshold, {}
    self._shingles: dict[str, tuple[int, frozenset[str]]] = {}  # id -> its place among them, and its triples
    self._index = None
    if threshold < 1:
      from datasketch import MinHashLSH

      # below the threshold, where half of what lies just above it would be overlooked
      self._index = MinHashLSH(threshold=0.7 * threshold, num_perm=PERMUTATIONS)

  def first(self, id: str, text: str) -> str | None:
    """Return the id of the text that this one repeats; None if it is new, and is remembered under its id."""
    key = hashlib.sha256(" ".join(text.split()).casefold().encode()).digest()
    if key in self._seen:
      return self._seen[key]
    shingles = _shingles(text) if self._index is not None else frozenset()
    if self._index is not None and shingles:  # a text without words repeats only the same text
      from datasketch import MinHash

      minhash = MinHash(num_perm=PERMUTATIONS)
      minhash.update_batch([shingle.encode() for shingle in shingles])
      # buckets give candidates; the sets themselves decide
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
  """Return the word triples of a text, or all its words as one where there are fewer."""
  found = re.findall(r"\w+", text.casefold())  # words of one letter too: `step 1` is not `step 2`
  return frozenset(" ".join(found[i : i + SHINGLE]) for i in range(max(len(found) - SHINGLE + 1, bool(found))))

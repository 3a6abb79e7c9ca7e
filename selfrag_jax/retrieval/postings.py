"""Postings: for each term the documents that contain it, and how often."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Postings(NamedTuple):
  """The occurrences of all terms; `rows` and `counts` of term t lie from starts[t] to starts[t + 1]."""

  starts: np.ndarray  # int64 [V + 1]
  rows: np.ndarray  # int64 [P], the document's row, ascending within a term
  counts: np.ndarray  # int64 [P], how often the term occurs there

  @property
  def document_frequency(self) -> np.ndarray:
    """The number of documents that contain each term, int64 [V]."""
    return np.diff(self.starts)

  def of(self, term: int) -> slice:
    """Return the slice of `rows` and `counts` for a term."""
    return slice(self.starts[term], self.starts[term + 1])


def build_postings(documents: Sequence[Sequence[int]], vocabulary_size: int) -> Postings:
  """Count the term ids of documents; the row of a document is its place in the list."""
  counted = [Counter(document) for document in documents]
  rows = np.repeat(np.arange(len(counted)), [len(counter) for counter in counted])
  terms = np.fromiter((term for counter in counted for term in counter), np.int64, len(rows))
  counts = np.fromiter((count for counter in counted for count in counter.values()), np.int64, len(rows))
  order = np.argsort(terms, kind="stable")
  starts = np.concatenate([[0], np.cumsum(np.bincount(terms, minlength=vocabulary_size))])
  return Postings(starts, rows[order], counts[order])


def best(scores: np.ndarray, top_k: int, allowed: np.ndarray | None = None) -> np.ndarray:
  """Return the rows of the best positive scores [N] among the `allowed` bool [N], best first, ties by lowest row."""
  rows = np.flatnonzero(scores > 0 if allowed is None else (scores > 0) & allowed)
  if len(rows) > top_k:
    least = np.partition(scores[rows], len(rows) - top_k)[len(rows) - top_k]
    rows = rows[scores[rows] >= least]
  return rows[np.argsort(-scores[rows], kind="stable")][:top_k]

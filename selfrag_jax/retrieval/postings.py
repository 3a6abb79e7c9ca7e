"""Sparse matrices of documents and terms, and the best of their scores."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
from scipy.sparse import coo_array, csc_array


def count_terms(documents: Sequence[Sequence[int]], vocabulary_size: int) -> csc_array:
  """Count the term ids of N documents, f64 [N, V]; the row of a document is its place in the list."""
  terms = np.fromiter(chain.from_iterable(documents), np.int64)
  rows = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
  return coo_array((np.ones(len(terms)), (rows, terms)), (len(documents), vocabulary_size)).tocsc()


def document_frequency(counts: csc_array) -> np.ndarray:
  """Return the number of documents that contain each term, int [V]."""
  return np.diff(counts.indptr)


def best(scores: np.ndarray, top_k: int, allowed: np.ndarray | None = None) -> np.ndarray:
  """Return the rows of the best positive scores [N] among the `allowed` bool [N], best first, ties by lowest row."""
  rows = np.flatnonzero(scores > 0 if allowed is None else (scores > 0) & allowed)
  if len(rows) > top_k:
    least = np.partition(scores[rows], len(rows) - top_k)[len(rows) - top_k]
    rows = rows[scores[rows] >= least]
  return rows[np.argsort(-scores[rows], kind="stable")][:top_k]

"""Top-k in numpy, without JAX: the slow twin of `topk.search`, and the fast path of small stores."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from selfrag_jax.memory.scoring import Metric, SearchResult, cosine, mask_scores, ordered_dot, pad, validate_search

if TYPE_CHECKING:  # importing them imports JAX
  from selfrag_jax.memory.state import MemoryRows
  from selfrag_jax.typing import ArrayLike


def search_numpy(
  state: "MemoryRows | Mapping[str, Any]",
  queries: "ArrayLike",
  k: int,
  *,
  group_ids: "ArrayLike | None" = None,
  bias: "ArrayLike | None" = None,
  metric: Metric = "cosine",
) -> SearchResult:
  """Search like `topk.search`, in NumPy: score every row with `ordered_dot`, then sort.

  `state` is `MemoryRows`, or a mapping with `embeddings` [C, D] and, if needed, `scales`, `valid` and `group_ids`, each
  [C]. Runs no JAX operation.
  """
  fields = state if isinstance(state, Mapping) else vars(state)
  rows, queries = np.asarray(fields["embeddings"]), np.asarray(queries)
  validate_search(rows, queries, k, group_ids, bias, metric)
  C, dtype = rows.shape[0], np.promote_types(rows.dtype, np.float32)
  rows, queries = rows.astype(dtype), queries.astype(dtype)
  if "scales" in fields:
    rows *= np.asarray(fields["scales"])[:, None]
  allowed = np.asarray(fields.get("valid", np.ones(C, bool)))[None, :]
  if group_ids is not None:
    allowed = allowed & (np.asarray(fields["group_ids"])[None, :] == np.asarray(group_ids)[:, None])

  scores = np.empty((len(queries), C), dtype)
  for b, query in enumerate(queries):  # one query at a time: all products take B times the memory
    scores[b] = ordered_dot(rows, query[None, :], np)
  if metric == "cosine":
    query_norms, norms = (np.sqrt(ordered_dot(x, x, np)) for x in (queries, rows))
    scores = cosine(scores, query_norms[:, None] * norms[None, :], np)
  if bias is not None:
    scores += np.asarray(bias, dtype)[None, :]
  scores = mask_scores(scores, allowed, np)
  best = np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int32)
  return pad(SearchResult(np.take_along_axis(scores, best, 1), best), k, np)

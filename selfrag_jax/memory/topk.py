"""Top-k by similarity over the memory: one pass in the storage's precision, then exact scores for the best 4k.

The second pass (`ordered_dot`) is there for two reasons: it repairs the rounding of bf16 and int8 storage, and its bits
do not depend on how many rows a device holds, so a sharded memory answers exactly as one device does. That holds while
the true top k are among the 4k candidates of the first pass.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from selfrag_jax.memory.state import MemoryState, dequantize, ordered_dot, partition_specs, quantize
from selfrag_jax.typing import Array, ArrayLike

OVERSAMPLING = 4

Metric = Literal["cosine", "dot"]
Method = Literal["exact", "approx"]


class SearchResult(NamedTuple):
  """The k best slots of each query, best first, lowest slot first among equals; (-inf, -1) where there is nothing."""

  scores: ArrayLike  # f32[B, k], similarity: higher is better
  slots: ArrayLike  # int32[B, k]


def search(
  state: MemoryState,
  queries: ArrayLike,
  k: int,
  *,
  group_ids: ArrayLike | None = None,
  metric: Metric = "cosine",
  method: Method = "exact",
  mesh: Mesh | None = None,
  axis: str | tuple[str, ...] = "data",
) -> SearchResult:
  """Find the k rows of the memory that are most similar to each query.

  queries [B, D]; group_ids int32[B] restricts query b to the slots of its group. Returns scores f32[B, k] (float64 if
  the memory is) and slots int32[B, k]. A zero vector has cosine 0. `approx` takes the candidates by
  `jax.lax.approx_max_k` (Chern et al. 2022). With a `mesh`, rows are split contiguously over `axis`: slot s is physical
  row s on any number of devices, and only k (score, slot) pairs of each shard are sent.
  Raises ValueError for shapes, metrics and meshes that do not fit.
  """
  queries = jnp.asarray(queries)
  _check(state.embeddings, queries, k, group_ids, metric)
  if method not in ("exact", "approx"):
    raise ValueError(f"unknown method {method!r}; use 'exact' or 'approx'")
  if mesh is None:
    return _pad(SearchResult(*_local_top_k(state, queries, k, group_ids, metric, method)), k)

  names = (axis,) if isinstance(axis, str) else tuple(axis)
  if missing := set(names) - set(mesh.axis_names):
    raise ValueError(f"mesh {dict(mesh.shape)} has no axis {sorted(missing)}; give axis= one or more of its names")
  shards = math.prod(mesh.shape[name] for name in names)
  C = state.embeddings.shape[0]
  if C % shards:
    raise ValueError(
      f"max_chunks = {C} is not divisible by the {shards} shards of axis {axis!r}; use {-(-C // shards) * shards}"
    )

  def shard_top_k(shard, queries, group_ids):
    scores, slots = _local_top_k(shard, queries, k, group_ids, metric, method)
    slots += lax.axis_index(names) * (C // shards)
    # shards lie in slot order, so a stable top-k over their concatenation keeps the lowest slot among equals
    scores, slots = (lax.all_gather(x, names, axis=1, tiled=True, to="invarying") for x in (scores, slots))
    scores, best = lax.top_k(scores, min(k, C))
    return scores, jnp.take_along_axis(slots, best, axis=1)

  sharded = jax.shard_map(
    shard_top_k, mesh=mesh, in_specs=(partition_specs(state, names), P(), P()), out_specs=(P(), P())
  )
  return _pad(SearchResult(*sharded(state, queries, group_ids)), k)


def search_numpy(
  state: MemoryState | Mapping[str, Any],
  queries: ArrayLike,
  k: int,
  *,
  group_ids: ArrayLike | None = None,
  metric: Metric = "cosine",
) -> SearchResult:
  """Do what `search` does, in numpy: score every row with `ordered_dot`, sort. The twin, and the path of small stores.

  `state` is a MemoryState or a mapping with `embeddings` [C, D] and, if they are needed, `scales`, `valid` and
  `group_ids` [C]. Runs no JAX operation.
  """
  fields = state if isinstance(state, Mapping) else vars(state)
  rows, queries = np.asarray(fields["embeddings"]), np.asarray(queries)
  _check(rows, queries, k, group_ids, metric)
  C, dtype = rows.shape[0], np.promote_types(rows.dtype, np.float32)
  rows, queries = rows.astype(dtype), queries.astype(dtype)
  if "scales" in fields:
    rows *= np.asarray(fields["scales"])[:, None]
  allowed = np.asarray(fields.get("valid", np.ones(C, bool)))[None, :]
  if group_ids is not None:
    allowed = allowed & (np.asarray(fields["group_ids"])[None, :] == np.asarray(group_ids)[:, None])

  scores = np.empty((len(queries), C), dtype)
  for b, query in enumerate(queries):  # one query at a time: the products of all of them are B times the memory
    scores[b] = ordered_dot(rows, query[None, :], np)
  if metric == "cosine":
    query_norms, norms = (np.sqrt(ordered_dot(x, x, np)) for x in (queries, rows))
    scores = _cosine(scores, query_norms[:, None] * norms[None, :], np)
  scores = _only(scores, allowed, np)
  best = np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int32)
  return _pad(SearchResult(np.take_along_axis(scores, best, 1), best), k, np)


def _local_top_k(state, queries, k, group_ids, metric, method) -> tuple[Array, Array]:
  """Return scores and slots [B, min(k, C)] over the rows of this device."""
  C = state.embeddings.shape[0]
  queries = queries.astype(state.norms.dtype)
  allowed = state.valid[None, :]
  if group_ids is not None:
    allowed &= state.group_ids[None, :] == jnp.asarray(group_ids)[:, None]
  with jax.named_scope("first_pass"):
    first = _only(_first_pass(state, queries, metric), allowed)
    top_k = lax.top_k if method == "exact" else lax.approx_max_k
    first, slots = top_k(first, min(OVERSAMPLING * k, C))

  with jax.named_scope("rescore"):
    scores = ordered_dot(dequantize(state.embeddings[slots], state.scales[slots]), queries[:, None])
    if metric == "cosine":
      query_norms = jnp.sqrt(ordered_dot(queries, queries))
      scores = _cosine(scores, query_norms[:, None] * state.norms[slots])
    scores = _only(scores, first > -jnp.inf)
    # Candidates come in the order of the first pass, so ties need the slot. Counting who is ahead takes
    # (4k)^2 comparisons that fuse into one reduction; a sort by two keys is slow on accelerators.
    ahead = scores[:, None, :] > scores[:, :, None]
    ahead |= (scores[:, None, :] == scores[:, :, None]) & (slots[:, None, :] < slots[:, :, None])
    # float32, because XLA:CPU has a fast top-k for it and sorts everything else
    _, best = lax.top_k(-ahead.sum(-1, dtype=jnp.float32), min(k, C))
    return jnp.take_along_axis(scores, best, axis=1), jnp.take_along_axis(slots, best, axis=1)


def _first_pass(state, queries, metric) -> Array:
  """Score every row in the storage's precision, up to a factor per query. Returns [B, C] in the scores' dtype."""
  dtype = state.embeddings.dtype
  is_int8 = dtype == jnp.int8
  dots = jnp.einsum(
    "bd,cd->bc",
    quantize(queries)[0] if is_int8 else queries.astype(dtype),
    state.embeddings,
    precision=lax.Precision.HIGHEST,
    preferred_element_type=jnp.int32 if is_int8 else queries.dtype,
  )
  scores = dots.astype(queries.dtype) * state.scales[None, :]
  return _cosine(scores, state.norms[None, :]) if metric == "cosine" else scores


def _cosine(dots, norms, xp=jnp):
  """Divide by the product of the norms; a zero vector is similar to nothing."""
  return xp.where(norms == 0, 0, dots / xp.where(norms == 0, 1, norms))


def _only(scores, allowed, xp=jnp):
  """Turn what is not allowed and what is not a number (top-k would rank it first) into -inf, and -0.0 into 0.0."""
  return xp.where(allowed & ~xp.isnan(scores), xp.where(scores == 0, 0, scores), -xp.inf)


def _pad(result: SearchResult, k: int, xp=jnp) -> SearchResult:
  """Widen [B, n] to [B, k] and put slot -1 wherever the score is -inf."""
  widen = [(0, 0), (0, k - result.slots.shape[1])]
  scores = xp.pad(result.scores, widen, constant_values=-xp.inf)
  return SearchResult(scores, xp.where(scores > -xp.inf, xp.pad(result.slots, widen), -1))


def _check(rows, queries, k, group_ids, metric) -> None:
  if queries.ndim != 2 or queries.shape[1] != rows.shape[1]:
    raise ValueError(f"queries {queries.shape} must be [B, {rows.shape[1]}]: embed them with the memory's encoder")
  if k < 1:
    raise ValueError(f"k = {k} must be at least 1")
  if group_ids is not None and np.shape(group_ids) != queries.shape[:1]:
    raise ValueError(f"group_ids has shape {np.shape(group_ids)}, expected {queries.shape[:1]}: give one per query")
  if metric not in ("cosine", "dot"):
    raise ValueError(f"unknown metric {metric!r}; use 'cosine' or 'dot' (project the queries first for a learned one)")

"""Top-k search by similarity over the memory: one pass in the storage's precision, then exact scores for the best 4k.

The second pass (`ordered_dot`) has two purposes: it repairs the rounding of bf16 and int8 storage, and its bits do not
depend on how many rows a device holds, so a sharded memory answers exactly as one device does. This holds while the
true top k are among the 4k candidates of the first pass.
"""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from selfrag_jax.memory import topk_tpu
from selfrag_jax.memory.scoring import (
  OVERSAMPLING,
  Metric,
  SearchResult,
  cosine,
  mask_scores,
  ordered_dot,
  pad,
  validate_search,
)
from selfrag_jax.memory.state import MemoryRows, dequantize, partition_specs, quantize
from selfrag_jax.typing import Array, ArrayLike

Method = Literal["exact", "approx"]
BLOCK = 32  # queries that a CPU searches at a time
COUNTED = 1024  # up to this many candidates are ordered by counting, more by sorting
LARGEST = 1 << 26  # numbers in the candidate rows of all queries that are searched at a time: 256 MiB


def search(
  state: MemoryRows,
  queries: ArrayLike,
  k: int,
  *,
  group_ids: ArrayLike | None = None,
  bias: ArrayLike | None = None,
  metric: Metric = "cosine",
  method: Method = "exact",
  mesh: Mesh | None = None,
  axis: str | tuple[str, ...] = "data",
) -> SearchResult:
  """Find the k rows of the memory that are most similar to each query.

  queries [B, D]; group_ids int32[B] restricts query b to the slots of its group; bias f32[C] is added to the similarity
  of each slot. Returns scores f32[B, k] (float64 if the memory is) and slots int32[B, k]. A zero vector has cosine 0.
  `approx` takes the candidates by `jax.lax.approx_max_k` (Chern et al. 2022). With a `mesh`, rows are split
  contiguously over `axis`: slot s is physical row s on any number of devices, and only k (score, slot) pairs of each
  shard are sent.
  A k above C costs nothing but the size of the result, whose rest is (-inf, -1).
  Raises ValueError for shapes, metrics and meshes that do not fit.
  """
  queries = jnp.asarray(queries)
  validate_search(state.embeddings, queries, k, group_ids, bias, metric)
  if method not in ("exact", "approx"):
    raise ValueError(f"unknown method {method!r}; use 'exact' or 'approx'")
  if mesh is None:
    return pad(SearchResult(*_local_top_k(state, queries, k, group_ids, bias, metric, method)), k, jnp)

  names = (axis,) if isinstance(axis, str) else tuple(axis)
  if missing := set(names) - set(mesh.axis_names):
    raise ValueError(f"mesh {dict(mesh.shape)} has no axis {sorted(missing)}; give axis= one or more of its names")
  shards = math.prod(mesh.shape[name] for name in names)
  C = state.embeddings.shape[0]
  if C % shards:
    raise ValueError(
      f"max_chunks = {C} is not divisible by the {shards} shards of axis {axis!r}; use {-(-C // shards) * shards}"
    )

  def shard_top_k(shard, queries, group_ids, bias):
    scores, slots = _local_top_k(shard, queries, k, group_ids, bias, metric, method)
    slots += lax.axis_index(names) * (C // shards)
    # shards lie in slot order, so a stable top-k over their concatenation keeps the lowest slot among equals
    scores, slots = (lax.all_gather(x, names, axis=1, tiled=True, to="invarying") for x in (scores, slots))
    scores, best = lax.top_k(scores, min(k, C))
    return scores, jnp.take_along_axis(slots, best, axis=1)

  sharded = jax.shard_map(
    shard_top_k, mesh=mesh, in_specs=(partition_specs(state, names), P(), P(), P(names)), out_specs=(P(), P())
  )
  return pad(SearchResult(*sharded(state, queries, group_ids, bias)), k, jnp)


def _local_top_k(state, queries, k, group_ids, bias, metric, method) -> tuple[Array, Array]:
  """Return scores and slots [B, min(k, C)] over the rows of this device."""
  C, D = state.embeddings.shape
  n = min(OVERSAMPLING * k, C)
  fitting = max(LARGEST // (n * D), 1)
  score = functools.partial(_first_pass, metric=metric, product=_products)
  whole = functools.partial(_candidates, score, n, lax.top_k if method == "exact" else lax.approx_max_k)
  blocks = functools.partial(_in_blocks, functools.partial(_top_k, k, metric, whole), fitting)
  # the scores of 256 queries do not fit into a CPU's cache
  on_cpu = functools.partial(_candidates, functools.partial(score, product=_rows_first), n, whole.args[2])
  on_cpu = functools.partial(_in_blocks, functools.partial(_top_k, k, metric, on_cpu), min(fitting, BLOCK))
  platforms = {"cpu": on_cpu, "default": blocks}
  if method == "exact" and topk_tpu.fits(state):
    binned = functools.partial(_binned_candidates, score, n)
    size = min(max(fitting // topk_tpu.BIN, 1), topk_tpu.QUERIES)
    platforms["tpu"] = functools.partial(_in_blocks, functools.partial(_top_k, k, metric, binned), size)
  return lax.platform_dependent(state, queries, group_ids, bias, **platforms)


def _in_blocks(find, size, state, queries, group_ids, bias) -> tuple[Array, Array]:
  """Search for `size` queries at a time."""
  B = len(queries)
  if size >= B:
    return find(state, queries, group_ids, bias)
  block = lambda x: jnp.pad(x, [(0, -B % size)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, size, *x.shape[1:])
  blocks = jax.tree.map(block, (queries, None if group_ids is None else jnp.asarray(group_ids)))
  found = lax.map(lambda block: find(state, *block, bias), blocks)
  return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1])[:B], found)


def _top_k(k, metric, candidates, state, queries, group_ids, bias) -> tuple[Array, Array]:
  """Order the candidates that `candidates(state, queries, group_ids, bias)` finds by their exact scores."""
  queries = queries.astype(state.norms.dtype)
  group_ids = None if group_ids is None else jnp.asarray(group_ids)
  with jax.named_scope("first_pass"):
    first, slots = candidates(state, queries, group_ids, bias)

  with jax.named_scope("rescore"):
    scores = ordered_dot(dequantize(state.embeddings[slots], state.scales[slots]), queries[:, None], jnp)
    if metric == "cosine":
      scores = cosine(scores, _norms(queries)[:, None] * state.norms[slots], jnp)
    if bias is not None:
      scores += jnp.asarray(bias, scores.dtype)[slots]
    scores = mask_scores(scores, first > -jnp.inf, jnp)
    # Candidates come in the order of the first pass, so ties are broken by slot.
    if scores.shape[1] > COUNTED:
      lost, slots = lax.sort((-scores, slots), num_keys=2)
      return -lost[:, :k], slots[:, :k]
    # Counting the candidates ahead of each one takes (4k)^2 comparisons, which fuse into one reduction; a sort by two
    # keys is slow on accelerators.
    ahead = scores[:, None, :] > scores[:, :, None]
    ahead |= (scores[:, None, :] == scores[:, :, None]) & (slots[:, None, :] < slots[:, :, None])
    # float32, because XLA:CPU has a fast top-k for it and sorts everything else
    _, best = lax.top_k(-ahead.sum(-1, dtype=jnp.float32), min(k, scores.shape[1]))
    return jnp.take_along_axis(scores, best, axis=1), jnp.take_along_axis(slots, best, axis=1)


def _candidates(score, n, top_k, state, queries, group_ids, bias) -> tuple[Array, Array]:
  """Return scores and slots [B, n] of the best rows by the scores of the first pass."""
  return top_k(score(state, queries, group_ids, bias), n)


def _binned_candidates(score, n, state, queries, group_ids, bias, interpret=False) -> tuple[Array, Array]:
  """Return what `_candidates` does, by the kernel of a TPU; see `topk_tpu`."""
  slots = topk_tpu.candidates(score, state, queries, group_ids, bias, n, interpret)
  fields = {
    field.name: getattr(state, field.name) for field in dataclasses.fields(MemoryRows)
  }  # without a ring's cursor
  rows = jax.tree.map(lambda x: x[slots], MemoryRows(**(fields | {"tokens": state.tokens[:, :0]})))
  one = lambda rows, query, group, bias: score(rows, query[None], None if group is None else group[None], bias)[0]
  bias = None if bias is None else jnp.asarray(bias)[slots]
  scores = jnp.where(slots < len(state.norms), jax.vmap(one)(rows, queries, group_ids, bias), -jnp.inf)
  first, best = lax.top_k(scores, n)
  return first, jnp.take_along_axis(slots, best, axis=1)


def _first_pass(state, queries, group_ids, bias, *, metric, product) -> Array:
  """Score every row in the storage's precision; without a bias, scores lack a factor per query. Returns [B, C].

  What is not valid, or of another group than a query's, is -inf.
  """
  allowed = state.valid[None, :]
  if group_ids is not None:
    allowed &= state.group_ids[None, :] == group_ids[:, None]
  return mask_scores(_similarity(state, queries, bias, metric, product), allowed, jnp)


def _similarity(state, queries, bias, metric, product) -> Array:
  dtype = state.embeddings.dtype
  is_int8 = dtype == jnp.int8
  stored, scales = quantize(queries) if is_int8 else (queries.astype(dtype), None)
  dots = product(stored, state.embeddings, jnp.int32 if is_int8 else queries.dtype)
  scores = dots.astype(queries.dtype) * state.scales[None, :]
  if metric == "cosine":
    scores = cosine(scores, state.norms[None, :], jnp)
  if bias is None:
    return scores
  # the bias is on the scale of full scores, so the factor of the query must be applied first
  factors = jnp.ones(len(queries), queries.dtype) if scales is None else scales
  if metric == "cosine":
    factors = cosine(factors, _norms(queries), jnp)
  return scores * factors[:, None] + jnp.asarray(bias, scores.dtype)[None, :]


def _products(queries, rows, dtype) -> Array:
  """Multiply each query with each row: [B, C]."""
  # others are exact, and a TPU's kernel takes no precision for them
  precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
  return jnp.einsum("bd,cd->bc", queries, rows, precision=precision, preferred_element_type=dtype)


def _rows_first(queries, rows, dtype) -> Array:
  """Multiply like `_products` on XLA:CPU, which is up to 13 times slower if the many rows are the result's columns.

  The barrier keeps XLA from moving the transpose into the product.
  """
  return lax.optimization_barrier(_products(rows, queries, dtype)).T


def _norms(queries) -> Array:
  return jnp.sqrt(ordered_dot(queries, queries, jnp))

"""The similarity of a query to the rows of a memory, defined once for NumPy and for JAX."""

from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from selfrag_jax.ragged import power_of_two

if TYPE_CHECKING:  # importing it imports JAX
  from selfrag_jax.typing import ArrayLike

Metric = Literal["cosine", "dot"]

OVERSAMPLING = 4  # candidates that a first pass finds for each result
TINY = np.finfo(np.float32).tiny  # the smallest number that float32 holds with all its digits


class SearchResult(NamedTuple):
  """The k best slots of each query, best first, ties by lowest slot; missing results are (-inf, -1)."""

  scores: "ArrayLike"  # f32[B, k], similarity: higher is better
  slots: "ArrayLike"  # int32[B, k]


def ordered_dot(x: "ArrayLike", y: "ArrayLike", xp: ModuleType) -> "ArrayLike":
  """Return the dot product over the last axis as a fixed tree of additions, with `xp` jax.numpy or numpy.

  The summation order of a matrix product depends on the shapes of its operands, so a shard of the memory and the whole
  memory give different last bits. This function gives the same bits in any batch, on any shard, and in NumPy.
  """
  products = x * y
  # XLA would contract a bare product and the addition below into a fused multiply-add, which rounds once where NumPy
  # rounds twice; the select between them prevents that. (It also drops the sign of zero, and what only some devices
  # hold: numbers below TINY.)
  products = xp.where(abs(products) < TINY, 0, products)
  width = products.shape[-1]
  padding = power_of_two(width) - width
  total = xp.pad(products, [(0, 0)] * (products.ndim - 1) + [(0, padding)])
  while total.shape[-1] > 1:
    half = total.shape[-1] // 2
    total = total[..., :half] + total[..., half:]
  return total[..., 0]


def norm(squares: np.ndarray) -> np.ndarray:
  """Return norms from squared norms that were not added by `ordered_dot`: 0 below TINY."""
  return np.sqrt(np.where(squares < TINY, 0, squares))


def cosine(dots, norms, xp: ModuleType):
  """Divide dot products by the product of the norms; where that is 0, return 0."""
  return xp.where(norms == 0, 0, dots / xp.where(norms == 0, 1, norms))


def mask_scores(scores, allowed, xp: ModuleType):
  """Set scores that are not allowed, and NaN (which top-k would rank first), to -inf, and -0.0 to 0.0."""
  return xp.where(allowed & ~xp.isnan(scores), xp.where(scores == 0, 0, scores), -xp.inf)


def pad(result: SearchResult, k: int, xp: ModuleType) -> SearchResult:
  """Widen results [B, n] to [B, k] with scores of -inf, and set the slot to -1 wherever the score is -inf."""
  widen = [(0, 0), (0, k - result.slots.shape[1])]
  scores = xp.pad(result.scores, widen, constant_values=-xp.inf)
  return SearchResult(scores, xp.where(scores > -xp.inf, xp.pad(result.slots, widen), -1))


def check_k(k: Any, name: str = "k") -> int:
  """Return k as an int. Raises ValueError, with its name, unless k is a whole number of at least 1."""
  if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
    raise ValueError(f"{name} = {k!r} must be at least 1, and a whole number")
  return int(k)


def validate_search(rows, queries, k, group_ids, bias, metric) -> None:
  """Raise ValueError, with the fix, for arguments of a search that do not fit the memory."""
  if queries.ndim != 2 or queries.shape[1] != rows.shape[1]:
    raise ValueError(f"queries {queries.shape} must be [B, {rows.shape[1]}]: embed them with the memory's encoder")
  check_k(k)
  if group_ids is not None and np.shape(group_ids) != queries.shape[:1]:
    raise ValueError(f"group_ids has shape {np.shape(group_ids)}, expected {queries.shape[:1]}: give one per query")
  if bias is not None and np.shape(bias) != rows.shape[:1]:
    raise ValueError(f"bias has shape {np.shape(bias)}, expected {rows.shape[:1]}: give one per slot of the memory")
  if metric not in ("cosine", "dot"):
    raise ValueError(f"unknown metric {metric!r}; use 'cosine' or 'dot' (project the queries first for a learned one)")

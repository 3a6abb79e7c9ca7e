"""The memory as a pure ring buffer of fixed shapes, so that filling it never recompiles and its buffers can be donated.

Slots are physical rows 0..C-1. A write takes consecutive slots from the cursor and overwrites the oldest rows first.
`MemoryRows` have no cursor: they can be searched and set, not written. The host's index, which has a free list, makes
them.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from selfrag_jax.memory.scoring import ordered_dot
from selfrag_jax.typing import Array, ArrayLike


@struct.dataclass
class MemoryRows:
  """The arrays that a search reads. A row counts only where `valid` is True."""

  embeddings: Array  # [C, D] f32 | bf16 | int8
  scales: Array  # f32[C], the factor of an int8 row; ones for float rows
  norms: Array  # f32[C], L2 norm of the stored row, so that a cosine search reads the embeddings once
  valid: Array  # bool[C]
  group_ids: Array  # int32[C]
  tokens: Array  # int32[C, X], the chunk's token ids; X may be 0
  lengths: Array  # int32[C], how many of the X tokens are real


@struct.dataclass
class MemoryState(MemoryRows):
  """A ring buffer: rows, and the position of the ring."""

  cursor: Array  # int32[], the next slot
  written: Array  # int32[], rows ever written


Rows = TypeVar("Rows", bound=MemoryRows)


def init_memory(max_chunks: int, d_model: int, *, chunk_tokens: int = 0, dtype: DTypeLike = jnp.float32) -> MemoryState:
  """Make an empty memory of `max_chunks` rows, as `init_rows` does, with the cursor at slot 0."""
  rows = init_rows(max_chunks, d_model, chunk_tokens=chunk_tokens, dtype=dtype)
  return MemoryState(**vars(rows), cursor=jnp.zeros((), jnp.int32), written=jnp.zeros((), jnp.int32))


def init_rows(max_chunks: int, d_model: int, *, chunk_tokens: int = 0, dtype: DTypeLike = jnp.float32) -> MemoryRows:
  """Make `max_chunks` empty rows.

  `dtype` is that of the stored embeddings: a float type, or int8 with one scale per row (a quarter of the bytes).
  `chunk_tokens` is the number of token ids kept beside each row. Raises ValueError for sizes below 1 and other dtypes.
  """
  if max_chunks < 1 or d_model < 1 or chunk_tokens < 0:
    raise ValueError(
      f"max_chunks = {max_chunks} and d_model = {d_model} must be at least 1, chunk_tokens = {chunk_tokens} at least 0"
    )
  dtype = jnp.dtype(dtype)  # a config gives the name of a dtype
  if dtype != jnp.int8 and not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(f"memory dtype {dtype.name} is not supported; use float32, bfloat16 or int8")
  score_dtype = jnp.promote_types(dtype, jnp.float32)
  return MemoryRows(
    embeddings=jnp.zeros((max_chunks, d_model), dtype),
    scales=jnp.ones(max_chunks, score_dtype),
    norms=jnp.zeros(max_chunks, score_dtype),
    valid=jnp.zeros(max_chunks, bool),
    group_ids=jnp.zeros(max_chunks, jnp.int32),
    tokens=jnp.zeros((max_chunks, chunk_tokens), jnp.int32),
    lengths=jnp.zeros(max_chunks, jnp.int32),
  )


def write(
  state: MemoryState,
  embeddings: ArrayLike,
  *,
  mask: ArrayLike | None = None,
  group_ids: ArrayLike | None = None,
  tokens: ArrayLike | None = None,
  lengths: ArrayLike | None = None,
) -> MemoryState:
  """Write the rows of a batch where `mask` is True into the next slots, oldest first, and return the new memory.

  Shapes, defaults in brackets: embeddings [B, D], mask bool[B] (all True), group_ids int32[B] (0), tokens int32[B, X],
  lengths int32[B] (X with tokens, else 0). Masked-out rows take no slot; of more than C valid rows the last C stay.
  The function is pure: jit it with the state donated. Raises ValueError if a shape does not fit.
  """
  C, B = state.embeddings.shape[0], len(embeddings)
  if mask is not None and jnp.shape(mask) != (B,):
    raise ValueError(f"mask has shape {jnp.shape(mask)}, expected {(B,)}: give one per row of embeddings")
  keep = jnp.ones(B, bool) if mask is None else jnp.asarray(mask, bool)
  order = jnp.cumsum(keep, dtype=jnp.int32)  # 1, 2, ... over the valid rows
  count = jnp.sum(keep, dtype=jnp.int32)
  # More than C rows would share slots, and a scatter does not define which row stays. So the indices are unique;
  # indices from C on are out of bounds and dropped.
  keep &= order > count - C
  slots = jnp.where(keep, (state.cursor + order - 1) % C, C + jnp.arange(B, dtype=jnp.int32))

  state = put(state, slots, embeddings, group_ids=group_ids, tokens=tokens, lengths=lengths)
  return state.replace(cursor=(state.cursor + count) % C, written=state.written + count)


def put(
  state: Rows,
  slots: ArrayLike,
  embeddings: ArrayLike,
  *,
  valid: ArrayLike | None = None,
  group_ids: ArrayLike | None = None,
  tokens: ArrayLike | None = None,
  lengths: ArrayLike | None = None,
) -> Rows:
  """Set the given slots, wherever the cursor is, and return the new memory.

  slots int32[B] are all different, and slots outside 0..C-1 are ignored; valid bool[B] (all True); the other arguments
  are those of `write`. The function is pure: jit it with the state donated. Raises ValueError if a shape does not fit.
  """
  D, X = state.embeddings.shape[1], state.tokens.shape[1]
  rows = jnp.asarray(embeddings)
  if rows.ndim != 2 or rows.shape[1] != D:
    raise ValueError(f"embeddings {rows.shape} must be [B, {D}]: project them, or init_memory with their width")
  B = rows.shape[0]
  given = {"slots": slots, "valid": valid, "group_ids": group_ids, "tokens": tokens, "lengths": lengths}
  for name, value in given.items():
    want = (B, X) if name == "tokens" else (B,)
    if value is not None and jnp.shape(value) != want:
      fix = f"pad tokens to the memory's chunk_tokens = {X}" if name == "tokens" else "give one per row of embeddings"
      raise ValueError(f"{name} has shape {jnp.shape(value)}, expected {want}: {fix}")

  stored, scales = _store(rows, state.embeddings.dtype)
  dequantized = dequantize(stored, scales)
  new_rows = {
    "embeddings": stored,
    "scales": scales,
    "norms": jnp.sqrt(ordered_dot(dequantized, dequantized, jnp)),
    "valid": jnp.ones(B, bool) if valid is None else jnp.asarray(valid, bool),
    "group_ids": jnp.zeros(B, jnp.int32) if group_ids is None else group_ids,
    "tokens": jnp.zeros((B, X), jnp.int32) if tokens is None else tokens,
    "lengths": jnp.full(B, 0 if tokens is None else X, jnp.int32) if lengths is None else lengths,
  }
  old_rows = {name: getattr(state, name) for name in new_rows}
  return state.replace(
    **jax.tree.map(lambda old, new: old.at[slots].set(new, mode="drop", unique_indices=True), old_rows, new_rows)
  )


def filled(embeddings: ArrayLike, dtype: DTypeLike) -> MemoryRows:
  """Return valid rows of group 0 that store the embeddings [C, D] in a dtype, without tokens; see `init_rows`."""
  stored, scales = _store(jnp.asarray(embeddings), jnp.dtype(dtype))
  dequantized, zeros = dequantize(stored, scales), jnp.zeros(len(stored), jnp.int32)
  norms = jnp.sqrt(ordered_dot(dequantized, dequantized, jnp))
  return MemoryRows(stored, scales, norms, jnp.ones(len(stored), bool), zeros, zeros[:, None][:, :0], zeros)


def delete(state: Rows, mask: ArrayLike) -> Rows:
  """Forget the slots where `mask` bool[C] is True; they are written again when the cursor comes round.

  Raises ValueError for a mask of another shape.
  """
  if jnp.shape(mask) != state.valid.shape:
    raise ValueError(f"mask has shape {jnp.shape(mask)}, expected {state.valid.shape}: give one per slot of the memory")
  return state.replace(valid=state.valid & ~jnp.asarray(mask, bool))


def clear(state: Rows) -> Rows:
  """Return an empty memory of the same shapes, dtypes and sharding, as `init_memory` made it."""
  return jax.tree.map(jnp.zeros_like, state).replace(scales=jnp.ones_like(state.scales))


def partition_specs(state: Rows, axis: str | tuple[str, ...] = "data") -> Rows:
  """Return the PartitionSpec of each field: rows split contiguously over `axis`, the ring's position replicated."""
  return jax.tree.map(lambda field: P(axis) if field.ndim else P(), state)


def quantize(x: Array) -> tuple[Array, Array]:
  """Quantise rows [B, D] symmetrically: x ~ int8[B, D] * scales f32[B]. A zero row gets scale 1."""
  largest = jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32)
  scales = jnp.where(largest > 0, largest / 127, 1)
  return jnp.round(x / scales[:, None]).astype(jnp.int8), scales


def dequantize(rows: Array, scales: Array) -> Array:
  """Return rows [..., D] times their scales [...], in at least float32."""
  return rows.astype(jnp.promote_types(rows.dtype, jnp.float32)) * scales[..., None]


def _store(rows: Array, dtype: DTypeLike) -> tuple[Array, Array]:
  """Convert rows [B, D] to the storage dtype; return them and their scales [B]."""
  if dtype == jnp.int8:
    return quantize(rows)
  # a cast to bfloat16 and back is no rounding to XLA, which leaves both out on GPUs: the norms were those of other rows
  kept, exact = jnp.finfo(dtype), rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
  if kept.bits < jnp.finfo(exact.dtype).bits:
    rows = lax.reduce_precision(exact, exponent_bits=kept.nexp, mantissa_bits=kept.nmant)
  return rows.astype(dtype), jnp.ones(rows.shape[0], jnp.promote_types(dtype, jnp.float32))

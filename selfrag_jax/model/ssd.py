"""State-space duality of Mamba-2 (arXiv 2405.21060): the recurrence, its chunked form and one decode step.

All three compute, for every head, h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T and y_t = C_t h_t. `A` is negative and
`dt` positive already: the caller applies -exp(A_log) and softplus, and adds the skip D x. Where the segment id changes,
the state starts again from zero; `dt == 0` leaves it untouched.

Letters of this file: J heads of a group (H = G * J; group g serves the heads g*J to g*J + J - 1), Z chunks (of one row
in BxZ, otherwise of all rows). Merged axes are easier to read, and necessary: jaxlib 0.10.2 crashes on the CPU in sums
over arrays of seven axes (jax issue 40412), and a vmap or a layer axis adds another.
"""

import jax
import jax.numpy as jnp

from selfrag_jax.typing import Array

BLOCK_CHUNKS = 8  # of a row: the most chunks that are solved in parallel


def ssd_step(
  state_BxHxPxN: Array, x_BxHxP: Array, dt_BxH: Array, A_H: Array, B_BxGxN: Array, C_BxGxN: Array
) -> tuple[Array, Array]:
  """Advance the state by one token.

  Returns y [B, H, P] in x's dtype and the new state [B, H, P, N] in promote_types(x.dtype, float32).
  """
  dtype = jnp.promote_types(x_BxHxP.dtype, jnp.float32)
  heads_per_group = _heads_per_group(x_BxHxP.shape[1], B_BxGxN.shape[1])
  B_BxHxN, C_BxHxN = (jnp.repeat(a.astype(dtype), heads_per_group, axis=1) for a in (B_BxGxN, C_BxGxN))
  dt_BxH = dt_BxH.astype(dtype)
  decay_BxH = jnp.exp(dt_BxH * A_H.astype(dtype)[None])
  dtx_BxHxP = dt_BxH[..., None] * x_BxHxP.astype(dtype)
  state_BxHxPxN = decay_BxH[..., None, None] * state_BxHxPxN.astype(dtype) + dtx_BxHxP[..., None] * B_BxHxN[:, :, None]
  # A sum, not a dot: a TPU's dot would round the float32 state to bfloat16, and reading the state is all the cost.
  y_BxHxP = jnp.sum(state_BxHxPxN * C_BxHxN[:, :, None], axis=-1)
  return y_BxHxP.astype(x_BxHxP.dtype), state_BxHxPxN


def ssd_reference(
  x_BxTxHxP: Array,
  dt_BxTxH: Array,
  A_H: Array,
  B_BxTxGxN: Array,
  C_BxTxGxN: Array,
  *,
  segment_ids_BxT: Array | None = None,
  initial_state_BxHxPxN: Array | None = None,
) -> tuple[Array, Array]:
  """Run the recurrence token by token: the slow twin of `ssd_chunked`, with the same arguments and results."""
  runs_BxT = number_runs(segment_ids_BxT, x_BxTxHxP.shape)
  starts_BxT = jnp.diff(runs_BxT, axis=1, prepend=0) > 0

  def step(state_BxHxPxN, token):
    start_B, x_BxHxP, dt_BxH, B_BxGxN, C_BxGxN = token
    state_BxHxPxN = jnp.where(start_B[:, None, None, None], 0, state_BxHxPxN)
    y_BxHxP, state_BxHxPxN = ssd_step(state_BxHxPxN, x_BxHxP, dt_BxH, A_H, B_BxGxN, C_BxGxN)
    return state_BxHxPxN, y_BxHxP

  tokens = [jnp.moveaxis(a, 1, 0) for a in (starts_BxT, x_BxTxHxP, dt_BxTxH, B_BxTxGxN, C_BxTxGxN)]
  initial_state_BxHxPxN = initial_state(initial_state_BxHxPxN, x_BxTxHxP, B_BxTxGxN)
  state_BxHxPxN, y_TxBxHxP = jax.lax.scan(step, initial_state_BxHxPxN, tokens)
  return jnp.moveaxis(y_TxBxHxP, 0, 1), state_BxHxPxN


def ssd_chunked(
  x_BxTxHxP: Array,
  dt_BxTxH: Array,
  A_H: Array,
  B_BxTxGxN: Array,
  C_BxTxGxN: Array,
  *,
  segment_ids_BxT: Array | None = None,
  initial_state_BxHxPxN: Array | None = None,
  chunk_size: int = 128,
) -> tuple[Array, Array]:
  """Run the recurrence as matrix products inside chunks, whose states follow from one another.

  Section 6 of arXiv 2405.21060, with documents packed in a row. The large products run in x's dtype and accumulate in
  promote_types(x.dtype, float32); the decay stays in that wider type, because bfloat16 decay costs 3e-2 and more.
  Longer rows run in equal blocks of at most BLOCK_CHUNKS chunks, whose activations the backward pass computes again:
  each block adds only one state to the memory that is kept, not the intermediate arrays of its chunks.

  Args:
    x_BxTxHxP: inputs.
    dt_BxTxH: step sizes >= 0; zero for pads.
    A_H: decay rates < 0.
    B_BxTxGxN: input projections; G divides H.
    C_BxTxGxN: output projections.
    segment_ids_BxT: the document of each token; None means one document per row.
    initial_state_BxHxPxN: the state before the first token, part of the first token's document; None means zero.
    chunk_size: tokens of a chunk (L); the last chunk is padded.

  Returns:
    y [B, T, H, P] in x's dtype and the state after the last token [B, H, P, N] in the wider type.

  Raises:
    ValueError: G does not divide H.
  """
  n_tokens = x_BxTxHxP.shape[1]
  L = min(chunk_size, -(-n_tokens // 8) * 8)  # a short row gets one short chunk, of whole TPU sublanes
  n_chunks = -(-n_tokens // L)
  size = -(-n_chunks // -(-n_chunks // BLOCK_CHUNKS)) * L  # equal blocks: 9 chunks are 5 + 5 and not 8 + 8

  def blocks(a_BxTx, mode="constant"):  # pads have dt = 0 and the last document's id
    pads = ((0, 0), (0, -n_tokens % size), *[(0, 0)] * (a_BxTx.ndim - 2))
    padded = jnp.pad(a_BxTx, pads, mode=mode)
    return jnp.moveaxis(padded.reshape(len(padded), -1, size, *padded.shape[2:]), 1, 0)

  rows = (
    *map(blocks, (x_BxTxHxP, dt_BxTxH, B_BxTxGxN, C_BxTxGxN)),
    blocks(number_runs(segment_ids_BxT, x_BxTxHxP.shape), "edge"),
  )

  def step(carry, block):
    (state_BxHxPxN, run_B), (*inputs, run_BxT) = carry, block
    y_BxTxHxP, state_BxHxPxN = _block(inputs, run_BxT, A_H, state_BxHxPxN, run_B, L)
    return (state_BxHxPxN, run_BxT[:, -1]), y_BxTxHxP

  initial_BxHxPxN = initial_state(initial_state_BxHxPxN, x_BxTxHxP, B_BxTxGxN)
  # the initial state belongs to run 0
  carry = initial_BxHxPxN, jnp.zeros(len(x_BxTxHxP), jnp.int32)
  if len(rows[0]) == 1:
    (state_BxHxPxN, _), y_BxTxHxP = step(carry, [row[0] for row in rows])
  else:
    (state_BxHxPxN, _), y_KxBxTxHxP = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), carry, rows)
    y_BxTxHxP = jnp.moveaxis(y_KxBxTxHxP, 0, 1).reshape(len(x_BxTxHxP), -1, *x_BxTxHxP.shape[2:])
  return y_BxTxHxP[:, :n_tokens], state_BxHxPxN


def _block(inputs, run_BxT, A_H, initial_BxHxPxN, initial_run_B, L):
  """Solve whole chunks of rows in parallel. Returns y in x's dtype and the state after the last token."""
  x_BxTxHxP, dt_BxTxH, B_BxTxGxN, C_BxTxGxN = inputs
  n_batch, _, n_heads, n_width = x_BxTxHxP.shape
  n_groups, n_states = B_BxTxGxN.shape[2:]
  heads = (n_groups, _heads_per_group(n_heads, n_groups))
  chunked = lambda a_BxTx, *shape: a_BxTx.reshape(-1, L, *shape)
  x_ZxLxGxJxP = chunked(x_BxTxHxP, *heads, n_width)
  dt_ZxLxGxJ = chunked(dt_BxTxH, *heads)
  B_ZxLxGxN, C_ZxLxGxN = (chunked(a, n_groups, n_states) for a in (B_BxTxGxN, C_BxTxGxN))
  run_ZxL = chunked(run_BxT)
  last_run_BxZ = run_ZxL[:, -1].reshape(n_batch, -1)
  previous_run_Z = jnp.concatenate([initial_run_B[:, None], last_run_BxZ[:, :-1]], axis=1).reshape(-1)

  y_ZxLxGxJxP, state_ZxGxJxPxN, to_token_ZxLxGxJ, to_end_ZxGxJ = jax.vmap(_chunk, (0, 0, None, 0, 0, 0, 0))(
    x_ZxLxGxJxP, dt_ZxLxGxJ, A_H.reshape(heads), B_ZxLxGxN, C_ZxLxGxN, run_ZxL, previous_run_Z
  )

  # One chunk after the other: at most BLOCK_CHUNKS, each a product and a sum. At an associative scan over an odd number
  # of them, the TPU compiler of libtpu 0.0.42 stops with a failed check ("Loop will not make progress").
  states_BxZxHxPxN = state_ZxGxJxPxN.reshape(n_batch, -1, *initial_BxHxPxN.shape[1:])
  decays_BxZxH = to_end_ZxGxJ.reshape(n_batch, -1, n_heads)
  entering = [initial_BxHxPxN]
  for z in range(states_BxZxHxPxN.shape[1]):
    entering.append(decays_BxZxH[:, z, :, None, None] * entering[-1] + states_BxZxHxPxN[:, z])
  *entering, last_BxHxPxN = entering
  entering_ZxGxJxPxN = jnp.stack(entering, 1).reshape(state_ZxGxJxPxN.shape).astype(x_BxTxHxP.dtype)
  carried_ZxLxGxJxP = jnp.einsum(
    "zlgn,zgjpn->zlgjp", C_ZxLxGxN, entering_ZxGxJxPxN, preferred_element_type=initial_BxHxPxN.dtype
  )
  y_ZxLxGxJxP += to_token_ZxLxGxJ[..., None] * carried_ZxLxGxJxP
  y_BxTxHxP = y_ZxLxGxJxP.reshape(x_BxTxHxP.shape)
  return y_BxTxHxP.astype(x_BxTxHxP.dtype), last_BxHxPxN


def _chunk(x_LxGxJxP, dt_LxGxJ, A_GxJ, B_LxGxN, C_LxGxN, run_L, previous_run):
  """Solve one chunk as if no state entered it, and compute the decay of an entering state.

  Returns the outputs [L, G, J, P], the state of the last document [G, J, P, N], and the factor by which an entering
  state has decayed at each token [L, G, J] and at the end [G, J]: 0 where another document has begun.
  """
  dtype, wide = x_LxGxJxP.dtype, jnp.promote_types(x_LxGxJxP.dtype, jnp.float32)
  dt_LxGxJ = dt_LxGxJ.astype(wide)
  sees_LxL = jnp.tril(run_L[:, None] == run_L[None, :])

  # Log decay since the document's first token in this chunk. A sum that included earlier documents would cancel in the
  # differences below only up to rounding, and so would its gradient. HIGHEST: a TPU would round dt A to bfloat16.
  sums_GxJxL = jnp.einsum(
    "ls,sgj->gjl", sees_LxL.astype(wide), dt_LxGxJ * A_GxJ.astype(wide)[None], precision=jax.lax.Precision.HIGHEST
  )

  def decay(mask, log_decay):  # masked before exp, which overflows above the diagonal: 0 * inf is NaN in the gradient
    return jnp.exp(jnp.where(mask, log_decay, -jnp.inf))

  # attention with decay in place of the softmax
  dtx_LxGxJxP = dt_LxGxJ[..., None] * x_LxGxJxP.astype(wide)
  scores_GxLxL = jnp.einsum("lgn,sgn->gls", C_LxGxN, B_LxGxN, preferred_element_type=wide)
  decay_GxJxLxL = decay(sees_LxL[None, None], sums_GxJxL[..., :, None] - sums_GxJxL[..., None, :])
  weights_GxJxLxL = (scores_GxLxL[:, None] * decay_GxJxLxL).astype(dtype)
  y_LxGxJxP = jnp.einsum("gjls,sgjp->lgjp", weights_GxJxLxL, dtx_LxGxJxP.astype(dtype), preferred_element_type=wide)

  left_LxGxJ = jnp.moveaxis(decay((run_L == run_L[-1])[None, None], sums_GxJxL[..., -1:] - sums_GxJxL), -1, 0)
  inputs_LxGxJxP = (left_LxGxJ[..., None] * dtx_LxGxJxP).astype(dtype)
  state_GxJxPxN = jnp.einsum("lgjp,lgn->gjpn", inputs_LxGxJxP, B_LxGxN, preferred_element_type=wide)

  to_token_GxJxL = decay((run_L == previous_run)[None, None], sums_GxJxL)
  return y_LxGxJxP, state_GxJxPxN, jnp.moveaxis(to_token_GxJxL, -1, 0), to_token_GxJxL[..., -1]


def decay_of_first_run(dt_BxTxH: Array, A_H: Array, segment_ids_BxT: Array) -> Array:
  """Return what is left of an initial state at each token, [B, T, H]: 0 where another document has begun."""
  is_first = number_runs(segment_ids_BxT, dt_BxTxH.shape) == 0
  log_decay = jnp.cumsum(jnp.where(is_first[:, :, None], dt_BxTxH * A_H[None, None], 0), axis=1)
  return jnp.where(is_first[:, :, None], jnp.exp(log_decay), 0)


def read_state(state_BxHxPxN: Array, left_BxTxH: Array, C_BxTxGxN: Array) -> Array:
  """Return what an initial state adds to y, [B, T, H, P] in the dtype of the state, where `left` of it is left."""
  n_batch, n_heads, n_width, n_states = state_BxHxPxN.shape
  n_groups = C_BxTxGxN.shape[2]
  state = state_BxHxPxN.reshape(n_batch, n_groups, -1, n_states).astype(C_BxTxGxN.dtype)
  read = jnp.einsum("btgn,bgxn->btgx", C_BxTxGxN, state, preferred_element_type=state_BxHxPxN.dtype)
  return read.reshape(*read.shape[:2], n_heads, n_width) * left_BxTxH[..., None]


def number_runs(segment_ids_BxT, shape):
  """Number the documents of each row from 0 on, so that an id that comes again later is another document."""
  if segment_ids_BxT is None:
    return jnp.zeros(shape[:2], jnp.int32)
  starts_BxT = segment_ids_BxT[:, 1:] != segment_ids_BxT[:, :-1]
  return jnp.pad(jnp.cumsum(starts_BxT, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def initial_state(state_BxHxPxN, x_BxTxHxP, B_BxTxGxN):
  """Return a state in the wider type, zero for None."""
  n_batch, _, n_heads, n_width = x_BxTxHxP.shape
  dtype = jnp.promote_types(x_BxTxHxP.dtype, jnp.float32)
  if state_BxHxPxN is None:
    return jnp.zeros((n_batch, n_heads, n_width, B_BxTxGxN.shape[3]), dtype)
  return state_BxHxPxN.astype(dtype)


def _heads_per_group(n_heads, n_groups):
  if n_heads % n_groups:
    raise ValueError(f"{n_heads} SSD heads do not divide into {n_groups} groups: make n_heads a multiple of n_groups")
  return n_heads // n_groups

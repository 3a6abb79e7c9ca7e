"""Attention on a GPU by cuDNN's flash kernel, for rows of one document: no array grows with T squared."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from selfrag_jax.mesh import BATCH_AXES, compute_capability, on_each_device, splits_evenly
from selfrag_jax.model import sequence
from selfrag_jax.ragged import length_mask
from selfrag_jax.typing import Array

LEAST = 128  # tokens of a row: the scores of a shorter one are small
WIDEST = 128  # numbers of a head that the kernel takes on every generation of GPUs
AMPERE = 8.0  # the generation from which on there is the kernel


def fits(q_BxHxTxE: Array, k_BxKxSxE: Array, softcap: float | None) -> bool:
  """Tell whether the GPU has the kernel, the kernel these heads, and the mesh splits rows and heads evenly."""
  batch, heads, time, width = q_BxHxTxE.shape
  has_heads = q_BxHxTxE.dtype in (jnp.bfloat16, jnp.float16) and width % 8 == 0 and width <= WIDEST
  whole = sequence.n_parts() == 1 and time >= LEAST and splits_evenly(batch, heads, k_BxKxSxE.shape[1])
  return compute_capability() >= AMPERE and has_heads and softcap is None and whole


def attend(
  q_BxHxTxE: Array,
  k_BxKxSxE: Array,
  v_BxKxSxE: Array,
  lengths_B: Array,
  window: int | None,
  scale: float | None = None,
  implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Array:
  """Attend as `attention.attend` does in right-padded rows of one document each; pads get 0.

  `implementation="xla"` computes the same on any device.
  """

  def of_device(q: Array, k: Array, v: Array, lengths_B: Array) -> Array:
    real = length_mask(lengths_B, q.shape[2], jnp)[:, :, None, None]
    # nothing says what the kernel leaves at pads, in its result and in the gradients of its arguments
    by_time = [jnp.where(real, jnp.swapaxes(x, 1, 2), 0) for x in (q, k, v)]
    seen = jnp.maximum(lengths_B, 1)  # nor what it does with a row of nothing
    attended = jax.nn.dot_product_attention(
      *by_time,
      scale=scale,
      is_causal=True,
      query_seq_lengths=seen,
      key_value_seq_lengths=seen,
      local_window_size=None if window is None else (window - 1, 0),
      implementation=implementation,
    )
    return jnp.swapaxes(jnp.where(real, attended, 0), 1, 2)

  by_heads = P(BATCH_AXES, "tensor")
  kernel = on_each_device(of_device, (by_heads, by_heads, by_heads, P(BATCH_AXES)), by_heads)
  return kernel(q_BxHxTxE, k_BxKxSxE, v_BxKxSxE, lengths_B)

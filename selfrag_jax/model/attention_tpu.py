"""Attention on a TPU by the splash kernel of JAX, which keeps the scores in the core: no array grows with T squared."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec as P

from selfrag_jax.mesh import BATCH_AXES, on_each_device, platform, splits_evenly
from selfrag_jax.model import sequence
from selfrag_jax.model.layers import MIXED
from selfrag_jax.typing import Array

LARGEST, SMALLEST = 512, 128  # tokens of a block


def block_size(time: int) -> int:
  """Return the largest power of two that divides the tokens of a row, at most LARGEST."""
  return min(time & -time, LARGEST)


def fits(q_BxHxTxE: Array, k_BxKxSxE: Array) -> bool:
  """Tell whether the program is for TPUs, rows are whole blocks, and the mesh splits rows and heads evenly."""
  batch, heads, time, _ = q_BxHxTxE.shape
  whole = block_size(time) >= SMALLEST and q_BxHxTxE.dtype in (jnp.float32, jnp.bfloat16)
  return platform() == "tpu" and whole and splits_evenly(batch, heads, k_BxKxSxE.shape[1])


def attend(
  q_BxHxTxE: Array,
  k_BxKxSxE: Array,
  v_BxKxSxE: Array,
  segment_ids_BxT: Array,
  segment_ids_BxS: Array,
  window: int | None,
  softcap: float | None,
  scale: float | None = None,
  interpret: bool = False,
) -> Array:
  """Attend as `attention.attend` does, each token to those before it in its segment and its window, and to itself.

  The queries are those of this device's part of the rows, see `sequence`. `interpret` runs the kernel on any device.
  """
  (time, width), n_parts = q_BxHxTxE.shape[2:], sequence.n_parts()
  sizes = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
  blocks = splash.BlockSizes(**dict.fromkeys(sizes, block_size(time)))

  def mask(first: int) -> Any:
    size = time, n_parts * time
    return masks.CausalMask(size, first) if window is None else masks.LocalMask(size, (window - 1, 0), first)

  def of_part(part: int, q, k, v, segment_ids_BxT, segment_ids_BxS) -> Any:
    kernel = splash.make_splash_mha(
      masks.MultiHeadMask([mask(part * time)] * q.shape[1]),
      block_sizes=blocks,
      head_shards=1,
      q_seq_shards=1,
      attn_logits_soft_cap=softcap,
      residual_checkpoint_name=MIXED,
      interpret=interpret,
    )
    return jax.vmap(kernel)(
      q * (width**-0.5 if scale is None else scale), k, v, splash.SegmentIds(segment_ids_BxT, segment_ids_BxS)
    )

  def of_device(part: Array, *arrays: Array) -> Any:
    # a kernel is made for its mask: each part has its own, which skips the blocks behind it
    return jax.lax.switch(part, [partial(of_part, i) for i in range(n_parts)], *arrays)

  by_heads, rows = P(BATCH_AXES, "tensor"), P(BATCH_AXES)
  kernel = on_each_device(of_device, (P(), by_heads, by_heads, by_heads, rows, rows), by_heads)
  return kernel(sequence.part(), q_BxHxTxE, k_BxKxSxE, v_BxKxSxE, segment_ids_BxT, segment_ids_BxS)

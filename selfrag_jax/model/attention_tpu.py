"""Attention on a TPU by the splash kernel of JAX, which keeps the scores in the core: no array grows with T squared."""

from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec as P

from selfrag_jax.mesh import AXES, BATCH_AXES, platform
from selfrag_jax.typing import Array

LARGEST, SMALLEST = 512, 128  # tokens of a block


def block_size(time: int) -> int:
  """Return the largest power of two that divides the tokens of a row, at most LARGEST."""
  return min(time & -time, LARGEST)


def fits(q_BxHxTxE: Array, k_BxKxSxE: Array) -> bool:
  """Tell whether the program is for TPUs, rows are whole blocks, and the mesh splits rows and heads evenly."""
  batch, heads, time, _ = q_BxHxTxE.shape
  shards = dict(jax.sharding.get_abstract_mesh().shape)
  rows, columns = 1, shards.get("tensor", 1)
  for axis in BATCH_AXES:
    rows *= shards.get(axis, 1)
  whole = batch % rows == heads % columns == k_BxKxSxE.shape[1] % columns == 0
  return platform() == "tpu" and block_size(time) >= SMALLEST and q_BxHxTxE.dtype.itemsize <= 4 and whole


def attend(
  q_BxHxTxE: Array,
  k_BxKxTxE: Array,
  v_BxKxTxE: Array,
  segment_ids_BxT: Array,
  window: int | None,
  softcap: float | None,
  interpret: bool = False,
) -> Array:
  """Attend as `attention.attend` does, each token to those before it in its segment and its window, and to itself.

  `interpret` runs the kernel on any device.
  """
  time, width = q_BxHxTxE.shape[2:]
  sizes = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
  blocks = splash.BlockSizes(**dict.fromkeys(sizes, block_size(time)))
  mask = masks.CausalMask((time, time)) if window is None else masks.LocalMask((time, time), (window - 1, 0), 0)

  def of_device(q, k, v, segment_ids) -> Any:
    kernel = splash.make_splash_mha(
      masks.MultiHeadMask([mask] * q.shape[1]),
      block_sizes=blocks,
      head_shards=1,
      q_seq_shards=1,
      attn_logits_soft_cap=softcap,
      interpret=interpret,
    )
    return jax.vmap(kernel)(q * width**-0.5, k, v, splash.SegmentIds(segment_ids, segment_ids))

  arrays = q_BxHxTxE, k_BxKxTxE, v_BxKxTxE, segment_ids_BxT
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return of_device(*arrays)
  by_heads = P(BATCH_AXES, "tensor")
  specs = (by_heads, by_heads, by_heads, P(BATCH_AXES))
  # the kernel's results do not say along which axes they vary, so that cannot be checked
  return jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=by_heads, axis_names=set(AXES), check_vma=False)(
    *arrays
  )

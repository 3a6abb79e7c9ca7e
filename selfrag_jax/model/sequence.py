"""Rows whose tokens are split over devices: the part that each computes, and what it needs of the others.

Within `on_parts` the mesh axis `sequence` is manual: the code of a block sees the tokens of one device, as if these
were the row, and asks here for those of others. Elsewhere there is one part, and nothing is sent.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from selfrag_jax.mesh import BATCH_AXES, on_each_device, splits_evenly, summable
from selfrag_jax.typing import Array, Params

AXIS = "sequence"


def is_split() -> bool:
  """Tell whether the mesh in use splits the tokens of rows."""
  return _size() > 1


def _size() -> int:
  return dict(jax.sharding.get_abstract_mesh().shape).get(AXIS, 1)


def on_parts(of_rows: Callable[..., Array], params: Params, *rows_BxTx: Array, multiple: int = 1) -> Array:
  """Compute `of_rows(params, *rows)`, [B, T, D], with the tokens of each row split over the mesh in use.

  Rows are padded with 0 to equal parts of a multiple of tokens. The parameters are gathered along the axis once before,
  and their gradient is added up once after. Raises ValueError within itself, where rows are parts already.
  """
  if not is_split():
    return of_rows(params, *rows_BxTx)
  if n_parts() > 1:
    raise ValueError(f"the mesh axis {AXIS} is manual already: these may be parts of rows")
  time = rows_BxTx[0].shape[1]
  pads = 0, -time % (_size() * multiple)
  padded = [jnp.pad(x, [(0, 0), pads, *[(0, 0)] * (x.ndim - 2)]) for x in rows_BxTx]
  dtypes = jax.tree.map(lambda x: x.dtype, params)

  def of_part(params: Params, *parts_BxTx: Array) -> Array:
    return of_rows(jax.tree.map(jnp.astype, params, dtypes), *parts_BxTx)

  part = P(None, AXIS)
  # results of kernels do not say along which axes they vary, so that cannot be checked
  split = jax.shard_map(
    of_part, in_specs=(P(), *[part] * len(padded)), out_specs=part, axis_names={AXIS}, check_vma=False
  )
  return split(jax.tree.map(summable, params), *padded)[:, :time]


def n_parts() -> int:
  """Return the number of parts of a row: 1 where no code sees parts."""
  mesh = jax.sharding.get_abstract_mesh()
  return mesh.shape[AXIS] if AXIS in mesh.manual_axes else 1


def part() -> Array | int:
  """Return the number of this device's part of a row, from 0."""
  return jax.lax.axis_index(AXIS) if n_parts() > 1 else 0


def every(x: Array, axis: int, heads: int | None = None) -> Array:
  """Gather the tokens of all parts along an axis; `heads` is the axis of x that the mesh splits by `tensor`."""
  if n_parts() == 1:
    return x
  gather = lambda x: jax.lax.all_gather(x, AXIS, axis=axis, tiled=True)
  return _by_rows(gather, [summable(x)], [heads]).astype(x.dtype)


def _by_rows(gather: Callable[..., Array], arrays: list[Array], heads: list[int | None]) -> Array:
  """Gather arrays [B, ...] on each device for its rows and heads: the compiler would gather the rows of all before.

  The result has rows and heads in the axes that the first array has them in.
  """
  specs = [P(BATCH_AXES, *[None] * (at - 1), "tensor") if at else P(BATCH_AXES) for at in heads]
  sizes = [x.shape[at] for x, at in zip(arrays, heads, strict=True) if at]
  on_devices = on_each_device(gather, tuple(specs), specs[0]) if splits_evenly(len(arrays[0]), *sizes) else gather
  return on_devices(*arrays)


def shifted(x_BxTx: Array, back: int, fill: int = 0) -> Array:
  """Return for each token what stands `back` tokens before it in its row, and `fill` where nothing does."""
  time = x_BxTx.shape[1]
  moved = jnp.pad(x_BxTx, ((0, 0), (back, 0), *[(0, 0)] * (x_BxTx.ndim - 2)), constant_values=fill)[:, :time]
  if (parts := n_parts()) == 1:
    return moved
  sent = jax.lax.ppermute(x_BxTx[:, time - back :], AXIS, [(i, i + 1) for i in range(parts - 1)])
  return jnp.where(part() == 0, moved, jnp.concatenate([sent, moved[:, back:]], axis=1))


def entering_state(end_BxHxPxN: Array, kept_BxH: Array, segment_ids_BxT: Array) -> Array:
  """Return the SSM state before this part, [B, H, P, N]; zero if another document begins with it.

  Each part tells its state at its end, `end`, had none entered, and the factor `kept` that is left of an entering one.
  """

  def of_device(end_BxHxPxN: Array, kept_BxH: Array, segment_ids_BxT: Array) -> Array:
    gather = lambda x: jax.lax.all_gather(x, AXIS)
    ends, kept, firsts, lasts = map(gather, (end_BxHxPxN, kept_BxH, segment_ids_BxT[:, 0], segment_ids_BxT[:, -1]))
    entering = own = jnp.zeros_like(end_BxHxPxN)
    for i in range(1, n_parts()):
      leaving = kept[i - 1][:, :, None, None] * entering + ends[i - 1]
      entering = jnp.where((lasts[i - 1] == firsts[i])[:, None, None, None], leaving, 0)
      own = jnp.where(part() == i, entering, own)
    return own

  return _by_rows(of_device, [end_BxHxPxN, kept_BxH, segment_ids_BxT], [1, 1, None])

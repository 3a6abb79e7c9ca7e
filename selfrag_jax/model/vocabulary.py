"""Weights with a row for each token id, on a mesh: the two largest of a model, and what they send.

Left to the compiler, their gradients [V, D] were added up whole on every device. Here each device gets the sum of the
columns that it holds.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from selfrag_jax.mesh import BATCH_AXES
from selfrag_jax.typing import Array, Params

EMBEDDING, HEAD = VOCABULARY = ("embed", "unembed")  # the weights [V, D]; a model that ties them has the first alone
COLUMNS = P(None, "fsdp")  # how they lie
# within `with whole(True)`, weights lie whole on every device, as `for_decoding` puts them, and are not sent at all;
# JAX traces nothing for one layout and runs it in the other
whole = jax.make_user_context(False)


def look_up(table_VxD: Array, tokens_BxT: Array, dtype: DTypeLike) -> Array:
  """Return the rows of tokens in a dtype, [B, T, D]; the gradient of the table is summed up in the table's own.

  A device looks up the columns that it holds, for the rows of all devices that hold others; then they swap. So
  activations are sent, and neither the table nor its gradient but along `data`: if a device has more tokens than the
  table, these would be less.
  """
  shards = _shards()
  few = shards.fsdp > 1 and tokens_BxT.size <= shards.batch * len(table_VxD)
  if whole.value or not few or not _splits(table_VxD, len(tokens_BxT)):
    return jnp.take(table_VxD, tokens_BxT, axis=0).astype(dtype)

  def of_device(table: Array, tokens: Array) -> Array:
    every = jax.lax.all_gather(tokens, "fsdp", tiled=True)
    found = jnp.take(jax.lax.pcast(table, "data", to="varying"), every, axis=0).astype(dtype)
    return jax.lax.all_to_all(found, "fsdp", split_axis=0, concat_axis=2, tiled=True)

  return _on_devices(of_device, (COLUMNS, P(BATCH_AXES)))(table_VxD, tokens_BxT)


def on_own_rows(of_rows: Callable[..., Array], params: Params, *arrays: Array) -> Array:
  """Compute `of_rows(head, *arrays)` on every device for its own rows; the result begins with the axis of the batch.

  `head` is the part of the parameters that logits need. It is gathered once before, and each device gets its part of
  the gradient once after: a loop over chunks of rows that lie on several devices would do both for every chunk.
  """
  inner = ("segments_", "layers_")
  head = {name: leaf for name, leaf in params["params"].items() if not name.startswith(inner)}
  table = HEAD if HEAD in head else EMBEDDING
  if not _splits(head[table], *map(len, arrays)):
    return of_rows({"params": head}, *arrays)
  # logits do not read an embedding of its own, which the model declares all the same
  unread = {EMBEDDING: head.pop(EMBEDDING)} if table == HEAD else {}
  specs = {name: COLUMNS if name == table and not whole.value else P() for name in head}
  kept = {name: BATCH_AXES if spec == P() else "data" for name, spec in specs.items()}

  def of_device(head: Params, *arrays: Array) -> Array:
    # here, and not where it is used: the transpose adds up the gradient over devices
    head = {name: jax.lax.pcast(leaf, kept[name], to="varying") for name, leaf in head.items()}
    if specs[table] == COLUMNS:
      head[table] = jax.lax.all_gather(head[table], "fsdp", axis=1, tiled=True)
    head |= {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in unread.items()}
    return of_rows({"params": head}, *arrays)

  return _on_devices(of_device, (specs, *[P(BATCH_AXES)] * len(arrays)))(head, *arrays)


class _Shards(NamedTuple):
  """The parts of a batch, and of columns, on the mesh in use."""

  batch: int
  fsdp: int


def _shards() -> _Shards:
  sizes = dict(jax.sharding.get_abstract_mesh().shape)
  return _Shards(math.prod(sizes.get(axis, 1) for axis in BATCH_AXES), sizes.get("fsdp", 1))


def _splits(table: Array, *rows: int) -> bool:
  """Tell whether the mesh in use has several shards of a batch, and splits the rows and the columns evenly."""
  manual, shards = jax.sharding.get_abstract_mesh().manual_axes, _shards()
  evenly = not any(n % shards.batch for n in rows) and table.shape[1] % shards.fsdp == 0
  return shards.batch > 1 and evenly and not set(manual) & set(BATCH_AXES)


def _on_devices(of_device: Callable[..., Array], in_specs: tuple) -> Callable[..., Array]:
  mesh, rows = jax.sharding.get_abstract_mesh(), P(BATCH_AXES)
  return jax.shard_map(of_device, mesh=mesh, in_specs=in_specs, out_specs=rows, axis_names=set(BATCH_AXES))

"""Weights with a row for each token id, on a mesh: the two largest of a model, and what they send.

Left to the compiler, their gradients [V, D] were added up whole on every device. Here each device gets the sum of the
columns that it holds.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from selfrag_jax.mesh import BATCH_AXES, SPLIT_AXES, constrain, summable
from selfrag_jax.model.sequence import n_parts
from selfrag_jax.typing import Array, Params

EMBEDDING, HEAD = VOCABULARY = ("embed", "unembed")  # the weights [V, D]; a model that ties them has the first alone
COLUMNS, ROWS, TOKENS = P(None, SPLIT_AXES), P(BATCH_AXES), P(BATCH_AXES, "sequence")  # how they and arrays [B, T] lie
TOKEN_AXES = (*BATCH_AXES, "sequence")
# within `with whole(True)`, weights lie whole on every device, as `for_decoding` puts them, and are not sent at all;
# JAX traces nothing for one layout and runs it in the other
whole = jax.make_user_context(False)


def look_up(table_VxD: Array, tokens_BxT: Array, dtype: DTypeLike) -> Array:
  """Return the rows of tokens in a dtype, [B, T, D]; the gradient of the table is summed up in the table's own.

  A device looks up the columns that it holds, for the rows of all devices that hold others; then they swap. So
  activations are sent, and neither the table nor its gradient but along `data`: if a device has more tokens than the
  table, these would be less.
  """
  few = _n_shards("fsdp") > 1 and tokens_BxT.size <= _n_shards(*BATCH_AXES) * len(table_VxD)
  if whole.value or not (few or n_parts() > 1) or not _splits(table_VxD, ("fsdp",), len(tokens_BxT)):
    # XLA aborts where it splits a look-up of parts of rows (jaxlib 0.10.2)
    table_VxD = constrain(table_VxD, None, None) if n_parts() > 1 else table_VxD
    return jnp.take(table_VxD, tokens_BxT, axis=0).astype(dtype)

  def of_device(table: Array, tokens: Array) -> Array:
    every = jax.lax.all_gather(tokens, "fsdp", tiled=True)
    found = jnp.take(jax.lax.pcast(table, "data", to="varying"), every, axis=0).astype(dtype)
    return jax.lax.all_to_all(found, "fsdp", split_axis=0, concat_axis=2, tiled=True)

  return _on_devices(of_device, BATCH_AXES, (P(None, "fsdp"), ROWS), ROWS)(summable(table_VxD), tokens_BxT)


def on_own_tokens(of_tokens: Callable[..., Array], params: Params, *arrays: Array) -> Array:
  """Compute `of_tokens(head, *arrays)`, [B, T], on every device for its own tokens; arrays begin with [B, T].

  Or [B, 1], of the tokens of a row; the result is then to be added up along the second axis. `head` is the part of the
  parameters that logits need. It is gathered once before, and each device gets its part of the gradient once after: a
  loop over chunks of rows that lie on several devices would do both for every chunk.
  """
  inner = ("segments_", "layers_")
  head = {name: leaf for name, leaf in params["params"].items() if not name.startswith(inner)}
  table = HEAD if HEAD in head else EMBEDDING
  if not _splits(head[table], SPLIT_AXES, *map(len, arrays)):
    return of_tokens({"params": head}, *arrays)
  # logits do not read an embedding of its own, which the model declares all the same
  unread = {EMBEDDING: head.pop(EMBEDDING)} if table == HEAD else {}
  specs = {name: COLUMNS if name == table and not whole.value else P() for name in head}
  kept = {name: TOKEN_AXES if spec == P() else "data" for name, spec in specs.items()}

  def of_device(head: Params, *arrays: Array) -> Array:
    # here, and not where it is used: the transpose adds up the gradient over devices
    head = {name: jax.lax.pcast(leaf, kept[name], to="varying") for name, leaf in head.items()}
    if specs[table] == COLUMNS:
      head[table] = jax.lax.all_gather(head[table], SPLIT_AXES, axis=1, tiled=True)
    head |= {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in unread.items()}
    return of_tokens({"params": head}, *arrays)

  time = arrays[0].shape[1]
  padded = [jnp.pad(x, [(0, 0), (0, -time % _n_shards("sequence")), *[(0, 0)] * (x.ndim - 2)]) for x in arrays]
  return _on_devices(of_device, TOKEN_AXES, (specs, *[TOKENS] * len(arrays)), TOKENS)(
    jax.tree.map(summable, head), *padded
  )[:, :time]


def _n_shards(*axes: str) -> int:
  sizes = dict(jax.sharding.get_abstract_mesh().shape)
  return math.prod(sizes.get(axis, 1) for axis in axes)


def _splits(table: Array, column_axes: tuple[str, ...], *rows: int) -> bool:
  """Tell whether the mesh in use has several shards of tokens, and splits the rows and the columns evenly."""
  axes = {*BATCH_AXES, *column_axes}
  evenly = not any(n % _n_shards(*BATCH_AXES) for n in rows) and table.shape[1] % _n_shards(*column_axes) == 0
  return _n_shards(*axes) > 1 and evenly and not axes & set(jax.sharding.get_abstract_mesh().manual_axes)


def _on_devices(
  of_device: Callable[..., Array], axes: tuple[str, ...], in_specs: tuple, out: P
) -> Callable[..., Array]:
  mesh = jax.sharding.get_abstract_mesh()
  return jax.shard_map(of_device, mesh=mesh, in_specs=in_specs, out_specs=out, axis_names=set(axes))

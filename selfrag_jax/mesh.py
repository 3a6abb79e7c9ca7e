"""The device mesh, and the rules that map logical axes to its axes.

Four mesh axes: `data` (replicas of the parameters), `fsdp` (parameters and batch split), `sequence` (parameters and the
tokens of a row split), `tensor` (heads, MLP and vocabulary split). Axes are Auto on purpose: the compiler propagates
shardings, and logical constraints guide it. Only the blocks on parts of rows are written by hand: see `model/sequence`.
"""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from importlib import metadata
from typing import Annotated, Any

import flax.linen as nn
import jax
import numpy as np
from flax.linen import spmd
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from selfrag_jax.checked import LARGEST_SIZE, Checked, Range

AXES = ("data", "fsdp", "sequence", "tensor")
BATCH_AXES = ("data", "fsdp")
SPLIT_AXES = ("fsdp", "sequence")  # of the parameters, beside `tensor`

# logical axis -> mesh axes. Parameters: embed over fsdp and sequence, the other axis over tensor.
LOGICAL_RULES = (
  ("batch", BATCH_AXES),
  ("embed", SPLIT_AXES),
  ("vocab", "tensor"),
  ("heads", "tensor"),
  ("kv_heads", "tensor"),
  ("mlp", "tensor"),
  ("ssm_inner", "tensor"),
  ("time", None),
  ("width", None),
  ("head_width", None),
  ("layers", None),
)
# A decode loop reads every weight for every token: split over fsdp, all would be gathered each time.
DECODING_RULES = tuple((name, None if axes == SPLIT_AXES else axes) for name, axes in LOGICAL_RULES)


_ABSENT: ContextVar[Sequence[Any] | None] = ContextVar("absent", default=None)


@contextlib.contextmanager
def absent(devices: Sequence[Any]) -> Iterator[None]:
  """Make meshes of devices that are not there: programs can be compiled for them, and `place` moves nothing."""
  token = _ABSENT.set(devices)
  try:
    yield
  finally:
    _ABSENT.reset(token)


def planning() -> bool:
  """Tell whether the devices are not there: programs are compiled and not run, and need the shapes of arrays alone."""
  return _ABSENT.get() is not None


def platform() -> str:
  """Return the platform that programs are traced for: that of absent devices, or of those that are there."""
  devices = _ABSENT.get()
  return devices[0].platform if devices else jax.default_backend()


def local_devices() -> list[Any]:
  """List the devices of this host, or of the first host of absent ones."""
  absent = _ABSENT.get()
  return (
    [device for device in absent if device.process_index == absent[0].process_index] if absent else jax.local_devices()
  )


def compute_capability() -> float:
  """Return the compute capability of the NVIDIA GPUs that programs are traced for, such as 9.0; 0 of other devices."""
  found = str(getattr((_ABSENT.get() or jax.devices())[0], "compute_capability", ""))  # of a GPU by AMD a name
  return float(found) if re.fullmatch(r"\d+(\.\d+)?", found) else 0.0


AxisSize = Annotated[int, Range(-1, LARGEST_SIZE)]


@dataclasses.dataclass(frozen=True)
class MeshConfig(Checked):
  """The size of each axis of the mesh; one may be -1, for all remaining devices."""

  data: AxisSize = -1
  fsdp: AxisSize = 1
  tensor: AxisSize = 1
  sequence: AxisSize = 1


# good sizes for known machines; -1: all devices that are left. `slices` are several v5e-256, over which `data` goes on
PRESETS = {
  "host": MeshConfig(1, fsdp=-1),
  "v5e-16": MeshConfig(1, fsdp=16),
  "v5e-256": MeshConfig(16, fsdp=16),
  "v5p-256": MeshConfig(8, fsdp=32),
  "v6e-256": MeshConfig(16, fsdp=16),
  "h100-4": MeshConfig(1, fsdp=4),
  "h100-8": MeshConfig(1, fsdp=8),
  "slices": MeshConfig(-1, fsdp=16),
}


def make_mesh(
  data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None, *, sequence: int = 1
) -> Mesh:
  """Make the mesh of the devices (None: all); one size may be -1, for all remaining devices.

  Slices of TPUs, between which only a slow network lies, share the axis `data`. Raises ValueError if the sizes do not
  fit the devices.
  """
  devices = list(devices or _ABSENT.get() or jax.devices())
  sizes = {"data": data, "fsdp": fsdp, "sequence": sequence, "tensor": tensor}
  left = [axis for axis, size in sizes.items() if size == -1]
  if len(left) > 1 or any(size < 1 for axis, size in sizes.items() if axis not in left):
    raise ValueError(f"mesh {sizes} needs sizes of at least 1; one of them may be -1")
  if left:
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(devices) % known:
      raise ValueError(f"mesh {sizes}: {len(devices)} devices are not divisible by {known}")
    sizes[left[0]] = len(devices) // known
  if math.prod(sizes.values()) != len(devices):
    raise ValueError(f"mesh {sizes} has {math.prod(sizes.values())} places for {len(devices)} devices")
  is_tpu = devices[0].platform == "tpu"  # of GPUs, XLA calls every host a slice
  n_slices = len({getattr(device, "slice_index", 0) for device in devices}) if is_tpu else 1
  if sizes["data"] % n_slices:
    raise ValueError(f"mesh {sizes} on {n_slices} slices: data = {sizes['data']} is not divisible by their number")
  of_slice = (sizes["data"] // n_slices, *(sizes[axis] for axis in AXES[1:]))
  split = {"allow_split_physical_axes": True}  # an axis need not follow the axes of the hardware, such as 8 x 8 x 4
  if n_slices > 1:
    placed = mesh_utils.create_hybrid_device_mesh(of_slice, (n_slices, 1, 1, 1), devices, **split)
  else:
    placed = mesh_utils.create_device_mesh(of_slice, devices, **split)
  return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_shards(mesh: Mesh) -> int:
  """Return the number of parts that the batch is split into."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def splits_evenly(batch: int, *heads: int) -> bool:
  """Tell whether the mesh in use splits the rows of a batch and numbers of heads evenly, as kernels need it."""
  shards = dict(jax.sharding.get_abstract_mesh().shape)
  rows = math.prod(shards.get(axis, 1) for axis in BATCH_AXES)
  return batch % rows == 0 and all(n % shards.get("tensor", 1) == 0 for n in heads)


def on_each_device(kernel: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
  """Return a function that runs a kernel, which the compiler cannot split, on each device's part of its arguments."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return kernel
  # a kernel's results do not say along which axes they vary, so that cannot be checked
  axes = set(AXES) - set(mesh.manual_axes)
  return jax.shard_map(kernel, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def summable(x: jax.Array) -> jax.Array:
  """Return an array whose gradient can be added up over devices: XLA's CPU backend aborts at sums of bfloat16."""
  return x.astype("float32") if platform() == "cpu" and x.dtype == "bfloat16" else x  # jaxlib 0.10.2


def check_batch(mesh: Mesh, size: int, name: str) -> None:
  """Raise ValueError, with both numbers, if a batch of `size` rows cannot be split over the mesh."""
  if size % batch_shards(mesh):
    raise ValueError(
      f"{name} = {size} is not divisible by the {batch_shards(mesh)} batch shards of mesh {dict(mesh.shape)}"
    )


def check_shards(tree: Any) -> None:
  """Raise ValueError, with both numbers, for an array (or ShapeDtypeStruct) that its sharding cannot split evenly."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    mesh, spec = leaf.sharding.mesh, leaf.sharding.spec
    for size, axes in zip(leaf.shape, spec, strict=False):
      shards = math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))
      if size % shards:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        raise ValueError(
          f"{name} has the shape {leaf.shape}: {size} is not divisible by the {shards} shards of {axes} in mesh "
          f"{dict(mesh.shape)}; choose another mesh"
        )


def abstract(tree: Any, shardings: Any) -> Any:
  """Return arrays as ShapeDtypeStructs with a sharding each, or one for all, for lowering without data."""
  spec = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  return jax.tree.map(spec, tree, jax.tree.broadcast(shardings, tree))


def place(tree: Any, shardings: Any) -> Any:
  """Put arrays on the devices of their shardings; for devices that are not there, describe them."""
  return abstract(tree, shardings) if planning() else jax.device_put(tree, shardings)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Return the sharding of arrays whose first axis is the batch."""
  return NamedSharding(mesh, P(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
  """Return the sharding of arrays that every device holds whole."""
  return NamedSharding(mesh, P())


def own_rows(mesh: Mesh, n: int) -> np.ndarray:
  """Return which of the n rows of a batch are on the devices of this process, int [rows]: it alone makes them."""
  rows, every = batch_sharding(mesh), np.arange(n)
  if rows.is_fully_addressable or planning():
    return every
  return np.unique(np.concatenate([every[index] for index in rows.addressable_devices_indices_map((n,)).values()]))


def spread(tree: Any, mesh: Mesh) -> Any:
  """Make arrays whose rows are split over the mesh from the rows of each process, see `own_rows`.

  Arrays that are on devices already are moved; for devices that are not there, all are described.
  """
  rows = batch_sharding(mesh)
  here = planning() or rows.is_fully_addressable

  def put(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
      return abstract(x, rows)
    whole = here or isinstance(x, jax.Array)
    return place(x, rows) if whole else jax.make_array_from_process_local_data(rows, np.asarray(x))

  return jax.tree.map(put, tree)


def own_part(tree: Any) -> Any:
  """Copy the rows that `own_rows` names to numpy, of arrays whose first axis alone is split."""

  def part(x: jax.Array) -> np.ndarray:
    if x.is_fully_addressable:
      return jax.device_get(x)
    pieces = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([jax.device_get(pieces[start]) for start in sorted(pieces)])

  return jax.tree.map(part, tree)


def gathered(tree: Any, mesh: Mesh) -> Any:
  """Return the rows of all processes on each of them, from the rows of each; arrays of numpy."""
  return tree if batch_sharding(mesh).is_fully_addressable else fetch(spread(tree, mesh))


def shardings_of(boxed: Any, mesh: Mesh, rules: Sequence[tuple[str, Any]] = LOGICAL_RULES) -> Any:
  """Return the NamedShardings of a tree of (abstract) variables that Linen has boxed with logical axis names."""
  is_box = lambda x: isinstance(x, nn.meta.AxisMetadata)
  # an optimizer for a part of the parameters keeps empty boxes for the other parameters
  boxed = jax.tree.map(lambda x: x.unbox() if is_box(x) and not jax.tree.leaves(x) else x, boxed, is_leaf=is_box)
  return spmd.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)


def fetch(tree: Any) -> Any:
  """Copy arrays to numpy on every host, whole even where other hosts hold shards of them."""
  if jax.process_count() == 1:
    return jax.device_get(tree)
  is_here = lambda x: not isinstance(x, jax.Array) or x.is_fully_addressable
  whole = lambda x: jax.device_get(x) if is_here(x) else multihost_utils.process_allgather(x, tiled=True)
  return jax.tree.map(whole, tree)


def constrain(x: jax.Array, *logical_axes: str | None) -> jax.Array:
  """Constrain the sharding of an activation by logical axis names; does nothing outside `jax.set_mesh`."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or not set(AXES) <= set(mesh.axis_names):
    return x
  return jax.lax.with_sharding_constraint(x, spmd.logical_to_mesh_axes(logical_axes, LOGICAL_RULES))


def configure_xla() -> None:
  """Set the XLA flags that this project needs; call it before the first JAX operation, which reads the flags.

  jaxlib 0.10.2 fuses CPU reductions through YNNPACK: training is slower by half with it, and some programs with arrays
  of rank 7 and more crash (jax issues 40412 and 39257). Products stay with it: those of bfloat16 reach a CPU's matrix
  units in no other way. Other releases get no flag: an unknown flag is fatal.

  Where one axis of the mesh splits rows and weights alike, a TPU's compiler passes pieces of a weight from chip to chip
  within a loop of small products, which writes several times as many bytes; with this flag, which libtpu 0.0.42 and
  0.0.50 have, it gathers the weight. That ends such loops along `tensor` too, where they can hide what is sent:
  LIBTPU_INIT_ARGS may set another threshold.
  """
  flags = os.environ.get("XLA_FLAGS", "")
  if metadata.version("jaxlib") == "0.10.2" and "xla_cpu_experimental_ynn_fusion_type" not in flags:
    fusions = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_experimental_ynn_fusion_type={fusions}".strip()
  flags = os.environ.get("LIBTPU_INIT_ARGS", "")
  if (windowed := "xla_jf_spmd_threshold_for_windowed_einsum_mib") not in flags:
    os.environ["LIBTPU_INIT_ARGS"] = f"{flags} --{windowed}={10**6}".strip()

"""Topologies of accelerators that programs are compiled for without being there."""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from selfrag_jax.chips import CHIPS, Chip

_FLAT = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_CUBE = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x4 8x8x8 8x8x16 8x16x16"
SHAPES = {"v5e": _FLAT, "v5p": _CUBE, "v6e": _FLAT, "tpu7x": _CUBE, "h100": "1 2 4 8 16 32 64 128 256"}
# libtpu would look for a metadata server and its host, and allow one process at a time; the type decides nothing here
_NO_TPU = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_EXTRAS = ("tpu", "cuda12")  # of JAX
# what XLA needs to know of an H100 to compile for one that is not there
_H100 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
} platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 patch: 0 } device_description_str: "sm_90" """


def topology(name: str) -> tuple[Chip, Sequence[Any]]:
  """Return the chip and the devices of a topology such as `v5e:4x4` or `h100:8`; they need not exist.

  `v5e:16x16*2` are two slices of TPUs with a slower network between them. Raises ValueError for an unknown one, with
  those that there are, and ImportError with what to install.
  """
  kind, _, shape = name.partition(":")
  if kind not in CHIPS:
    raise ValueError(f"no topology {name!r}: it is a chip and a shape such as v5e:4x4; chips are {', '.join(CHIPS)}")
  is_gpu = kind == "h100"
  shape, several, slices = shape.partition("*")
  if shape not in SHAPES[kind].split():
    raise ValueError(f"no topology {name!r}; {kind} has the shapes {SHAPES[kind]}")
  if several and (is_gpu or slices not in map(str, range(2, 65))):
    raise ValueError(f"no topology {name!r}: behind the * stands the number of slices of TPUs, from 2 to 64")
  plugins = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13") if is_gpu else ("libtpu",)
  if not any(_is_installed(plugin) for plugin in plugins):
    raise ImportError(f"{plugins[0]}, the compiler for {kind}, is not installed: pip install 'jax[{_EXTRAS[is_gpu]}]'")
  from jax.experimental import topologies

  if is_gpu:
    grid = f"1x1x{shape}"
    return CHIPS[kind], topologies.get_topology_desc(grid, platform="cuda", topology=grid, target_config=_H100).devices
  for variable, value in _NO_TPU.items():
    os.environ.setdefault(variable, value)
  host = {"chips_per_host_bounds": (1, 1, 1)} if shape == "1x1" else {}  # others have four chips
  host |= {"num_slices": int(slices)} if slices else {}
  return CHIPS[kind], topologies.get_topology_desc(platform="tpu", topology_name=f"{kind}:{shape}", **host).devices


def _is_installed(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:  # of the package that it would stand in
    return False

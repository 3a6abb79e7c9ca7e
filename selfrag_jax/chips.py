"""Accelerators by name: their memory and their speed.

Numbers are the vendors' own, of one device as JAX counts it: cloud.google.com/tpu/docs, NVIDIA's H100 SXM data sheet.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Chip(NamedTuple):
  """A device: bytes of memory, dense bfloat16 FLOP/s, bytes/s of its memory, and bytes/s that it can send to others."""

  memory: float
  flops: float
  bandwidth: float
  interconnect: float


GIB = 2**30
CHIPS = {
  "v5e": Chip(16 * GIB, 197e12, 819e9, 200e9),
  "v5p": Chip(95 * GIB, 459e12, 2765e9, 600e9),
  "v6e": Chip(32 * GIB, 918e12, 1640e9, 448e9),
  "tpu7x": Chip(96 * GIB, 1153e12, 3690e9, 600e9),  # one of the two devices of a chip
  "h100": Chip(80e9, 989e12, 3350e9, 450e9),
}
# as `jax.Device.device_kind` names them; an H100 for PCIe is slower and has another name
KINDS = {
  "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU v6e": "v6e",
  "TPU7x": "tpu7x", "NVIDIA H100 80GB HBM3": "h100",
}  # fmt: skip


def peak_flops(devices: Sequence[Any]) -> float | None:
  """Return the dense bfloat16 FLOP/s of devices together; None if the speed of one is not known."""
  names = [KINDS.get(device.device_kind) for device in devices]
  return None if None in names else sum(CHIPS[name].flops for name in names if name)

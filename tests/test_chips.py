"""Accelerators by name, and the speed of the devices that are there."""

from types import SimpleNamespace

import jax
import pytest

from selfrag_jax.aot.chips import topology
from selfrag_jax.chips import CHIPS, peak_flops


@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x2", "v6e:2x2", "tpu7x:2x2x1"])
def test_a_tpu_is_known_by_the_name_that_its_compiler_gives_it(name):
  chip, devices = topology(name)
  assert peak_flops(devices) == len(devices) * chip.flops


def test_a_gpu_is_known_by_its_whole_name():
  gpus = lambda *kinds: [SimpleNamespace(device_kind=kind) for kind in kinds]
  assert peak_flops(gpus("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3")) == 2 * CHIPS["h100"].flops
  assert peak_flops(gpus("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe")) is None


def test_the_speed_of_a_cpu_is_not_known():
  assert peak_flops(jax.devices()) is None

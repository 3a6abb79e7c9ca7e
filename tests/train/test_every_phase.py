"""Every phase learns the same on one device, on meshes, in micro-batches and in two processes."""

import json
import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import pytest

from selfrag_jax.mesh import make_mesh
from tests.train.every_phase import results

ROOT = Path(__file__).resolve().parents[2]
ONE = make_mesh(1, 1, 1, jax.devices()[:1])
MESHES = {
  "8x1": make_mesh(8, 1, 1), "1x8": make_mesh(1, 8, 1), "2x2x2": make_mesh(2, 2, 2),
  "sequence": make_mesh(2, 1, 2, sequence=2),
}  # fmt: skip
EVERY = ("pretrain", "sft", "lora", "memory", "reward_model", "rerank", "encoder", "rl")
QUICK = ("sft", "rl")  # the others compile for minutes


def names(*quick: str) -> list:
  return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in EVERY]


@cache
def on_one_device(name: str) -> list[dict[str, float]]:
  with jax.enable_x64(True):
    return results(ONE, [name])[name]


def same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
  """Compare each metric of each step, relative to its size: those of 0 have rounding errors of sums of ones."""
  assert len(found) == len(expected)
  for step, (one, other) in enumerate(zip(found, expected, strict=True)):
    assert one == pytest.approx(other, rel=1e-9, abs=1e-9), step


# the loss and its gradient reach the next step through every parameter: what holds for 20 steps holds for the weights
@pytest.mark.parametrize("name", names(*QUICK))
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_a_mesh_learns_what_one_device_learns(name, mesh):
  with jax.enable_x64(True):
    found = results(mesh, [name])
  same(found[name], on_one_device(name))


@pytest.mark.parametrize("name", names(*QUICK, "memory"))
def test_micro_batches_learn_what_a_batch_learns(name):
  with jax.enable_x64(True):
    found = results(ONE, [name], accumulate=4)
  same(found[name], on_one_device(name))


def test_micro_batches_on_a_mesh_leave_out_the_same_rows():
  """Reinforcement alone has micro-batches that may be empty, on the rows of every device."""
  with jax.enable_x64(True):
    found = results(MESHES["2x2x2"], ["rl"], accumulate=4)
  same(found["rl"], on_one_device("rl"))


def train_in_processes(folder: Path, n: int, names: list[str] | tuple[str, ...]) -> dict[str, list[dict[str, float]]]:
  """Train phases in `n` processes of two devices each, that talk to each other."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  command = [sys.executable, "tests/train/every_phase.py", str(folder / "found.json"), *names]
  host = os.environ | {
    "PYTHONPATH": str(ROOT),
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
    "JAX_COORDINATOR_ADDRESS": address,
    "JAX_NUM_PROCESSES": str(n),
  }
  started = [
    subprocess.Popen(command, cwd=ROOT, env=host | {"JAX_PROCESS_ID": str(i)}, stderr=subprocess.PIPE, text=True)
    for i in range(n)
  ]
  for process in started:
    said = process.communicate(timeout=900)[1]
    assert process.returncode == 0, said[-2000:]
  return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("names", [QUICK, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["quick", "every"])
def test_two_processes_learn_what_one_learns(names, tmp_path):
  found = train_in_processes(tmp_path, 2, names)
  for name in names:
    same(found[name], on_one_device(name))

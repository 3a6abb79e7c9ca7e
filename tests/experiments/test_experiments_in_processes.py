"""Every experiment that trains ends in two processes with the files and the metrics of one."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.experiments.every_experiment import EVERY
from tests.experiments.test_ranking_experiments import write_collection
from tests.launch.test_train_cli import ROOT, metrics
from tests.test_hosts import free_port


def start(folder: Path, name: str, workdir: Path, devices: int, **place: str) -> subprocess.Popen[str]:
  environment = os.environ | place | {
    "PYTHONPATH": str(ROOT),
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
    "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
  }  # fmt: skip
  command = [sys.executable, "tests/experiments/every_experiment.py", str(folder), name, str(workdir)]
  pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
  return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


def end(process: subprocess.Popen[str]) -> None:
  said = process.communicate(timeout=600)[1]
  assert process.returncode == 0, said[-2000:]


def files(folder: Path) -> set[str]:
  """Return the names of the files, those of checkpoints and event files left out: these have other names each time."""
  found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
  return {str(path) for path in found if path.parts[0] not in ("checkpoints", "tensorboard")}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_two_processes_end_as_one(tmp_path, name):
  write_collection(tmp_path)
  end(start(tmp_path, name, tmp_path / "one", 4))
  place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
  for process in [start(tmp_path, name, tmp_path / "two", 2, **place, JAX_PROCESS_ID=str(i)) for i in range(2)]:
    end(process)
  assert files(tmp_path / "two") == files(tmp_path / "one")
  for row, expected in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
    assert row.pop("phase") == expected.pop("phase")
    assert row == pytest.approx(expected, rel=1e-3, abs=1e-4)  # float32

"""`launch/train.py` in two processes of two devices: killed, preempted, refused, and gone on with elsewhere."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from selfrag_jax.train.loop import checkpoints
from selfrag_jax.train.workdir import open_workdir
from tests.launch.test_train_cli import ROOT, finish, metrics
from tests.test_hosts import HERE, free_port

STEPS, PREEMPTED = 40, 75
TINY = {
  "data": {"row_tokens": 32},
  "model": {"d_model": 16, "n_layers": 2, "n_heads": 2, "block_pattern": "TM", "mlp_dim": 16, "ssm_state": 8},
  "pretrain": {"steps": STEPS, "batch_size": 4, "valid_rows": 4},
  "loop": {"checkpoint_every": 4, "eval_every": 20, "log_every": 1, "preempted_exit_code": PREEMPTED},
}

WIDE = """
from configs.pretrain import get_config as narrow

def get_config():
  config = narrow("text")
  with config.unlocked():
    config.model.dtype = config.model.param_dtype = "float64"
  return config
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
  path = tmp_path_factory.mktemp("text") / "text.txt"
  path.write_text("\n\n".join(f"The number {i} comes before the number {i + 1}." for i in range(500)))
  return path


def process(workdir: Path, text: Path, *flags: str, devices: int = 2) -> subprocess.Popen[str]:
  """Start one process."""
  overrides = [f"--config.{section}.{key}={value}" for section, keys in TINY.items() for key, value in keys.items()]
  config = next((flag for flag in flags if flag.startswith("--config=")), "--config=configs/pretrain.py:text")
  command = ["launch/train.py", config, f"--config.data.path={text}", *overrides, f"--workdir={workdir}"]
  environment = os.environ | {
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
    "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  return subprocess.Popen(
    [sys.executable, *command, f"--config.mesh.fsdp={min(devices, 2)}", *(flag for flag in flags if flag != config)],
    cwd=ROOT, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
  )  # fmt: skip


def start(workdir: Path, text: Path, *flags: str) -> list[subprocess.Popen[str]]:
  """Start both processes."""
  place = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2", *flags]
  return [process(workdir, text, *place, f"--process_id={i}") for i in range(2)]


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, list[str]]]:
  """Return the exit code of each process, and its errors."""
  found = [finish(process) for process in processes]
  return [(code, [line for line in said.splitlines() if line.startswith("error")]) for code, said in found]


def wait_for(workdir: Path, rows: int, processes: list[subprocess.Popen[str]]) -> None:
  while len(metrics(workdir)) < rows and all(process.poll() is None for process in processes):
    time.sleep(0.01)


def last_state(workdir: Path) -> dict[str, bytes]:
  """Return every array of the last checkpoint, as bytes."""
  folder, reader = checkpoints(workdir, "pretrain") / str(STEPS), ocp.PyTreeCheckpointer()
  whole = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), reader.metadata(folder).item_metadata.tree)
  tree = reader.restore(folder, restore_args=whole)
  return {jax.tree_util.keystr(k): np.asarray(x).tobytes() for k, x in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, text) -> Path:
  workdir = tmp_path_factory.mktemp("uninterrupted")
  assert ended(start(workdir, text)) == [(0, []), (0, [])]
  return workdir


def test_it_is_killed_and_preempted_and_ends_as_if_nothing_had_been(tmp_path, text, uninterrupted):
  processes = start(tmp_path, text)
  wait_for(tmp_path, 5, processes)
  processes[1].kill()
  killed = time.monotonic()
  (code, [said]), killed_one = ended(processes)
  assert time.monotonic() - killed < 60
  assert killed_one == (-signal.SIGKILL, [])
  assert (code, said.split(";")[0]) == (1, f"error: process 1 on {HERE} was lost")
  processes = start(tmp_path, text)
  wait_for(tmp_path, 12, processes)
  processes[1].terminate()  # one of them is told, and both stop at the same step
  assert ended(processes) == [(PREEMPTED, [])] * 2
  assert (checkpoints(tmp_path, "pretrain") / str(metrics(tmp_path)[-1]["step"]) / "manifest.json").exists()
  assert ended(start(tmp_path, text)) == [(0, []), (0, [])]
  assert metrics(tmp_path) == metrics(uninterrupted)
  assert last_state(tmp_path) == last_state(uninterrupted)


@pytest.mark.slow
def test_one_process_goes_on_where_two_have_stopped(tmp_path, text, monkeypatch):
  monkeypatch.setenv("JAX_ENABLE_X64", "1")
  (tmp_path / "wide.py").write_text(WIDE)
  wide = [f"--config={tmp_path}/wide.py"]
  alone, several = tmp_path / "alone", tmp_path / "several"
  assert ended([process(alone, text, *wide, devices=1)]) == [(0, [])]
  processes = start(several, text, *wide)
  wait_for(several, 7, processes)
  processes[0].terminate()
  assert ended(processes) == [(PREEMPTED, [])] * 2
  assert 7 <= len(metrics(several)) < len(metrics(alone))
  assert ended([process(several, text, *wide, devices=4)]) == [(0, [])]
  for row, expected in zip(metrics(several), metrics(alone), strict=True):
    assert row.pop("phase") == expected.pop("phase")
    assert row == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_workdir_in_use_and_a_config_that_cannot_be_end_both(tmp_path, text):
  with open_workdir(tmp_path, "self_rag"):
    (code, [said]), (other_code, other) = ended(start(tmp_path, text))
  assert code == other_code == 1
  assert "in use" in said
  assert other == [f"error: process 0 on {HERE} ended: {said.removeprefix('error: ')}"]
  for code, said in ended(start(tmp_path, text, "--config.pretrain.batch_size=3")):
    assert code == 1
    assert "= 3 is not divisible by the 4 batch shards" in said[0]

"""`launch/train.py` as a user meets it: a killed run resumes as if never stopped; mistakes are one line."""

import json
import os
import random
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
from tests.launching import launch

ROOT = Path(__file__).resolve().parents[2]
TINY = {
  "data": {"n_entities": 4, "n_relations": 2},
  "model": {"d_model": 32, "n_layers": 2, "n_heads": 2, "block_pattern": "MT", "ssm_state": 8},
  "memory": {"d_embed": 16},
  "sft": {"steps": 8, "batch_size": 4},
  "sft_gold": {"steps": 0},
  # after 8 steps of sft no rollout earns anything; a random reward gives reinforcement something to follow
  "rl": {"steps": 8, "questions_per_step": 4, "rollouts_per_question": 4, "control": "random_reward"},
  "evaluation": {"periodic": 4, "final": 4, "batch_size": 4},
  "loop": {"checkpoint_every": 3, "eval_every": 4, "log_every": 1, "preempted_exit_code": 75},
}
PHASES = ("sft", "rl")
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")
ROWS = 2 * (8 + 2)  # steps and evaluations of both phases


def flags_and_environment(flags: tuple[str, ...], devices: int) -> tuple[list[str], dict[str, str]]:
  overrides = [f"--config.{section}.{key}={value}" for section, keys in TINY.items() for key, value in keys.items()]
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
    "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  return ["launch/train.py", "--config=configs/refrag.py", *overrides, *flags], environment


def start(*flags: str, devices: int = 1) -> subprocess.Popen:
  """Start a process of its own, to be interrupted."""
  command, environment = flags_and_environment(flags, devices)
  pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
  return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, text=True, **pipes)


def ended(*flags: str, devices: int = 1) -> tuple[int, str]:
  """Run the command to its end; return the exit code, and what was said on standard error."""
  command, environment = flags_and_environment(flags, devices)
  run = launch(*command, env=environment)
  return run.returncode, run.stderr


def finish(run: subprocess.Popen) -> tuple[int, str]:
  """Return the exit code, and what was said on standard error."""
  _, said = run.communicate(timeout=300)
  return run.returncode, said


def metrics(workdir: Path) -> list[dict]:
  """Return the rows that are whole, apart from what the clock wrote."""
  path = workdir / "metrics.jsonl"
  lines = path.read_text().splitlines(keepends=True) if path.exists() else []
  rows = [json.loads(line) for line in lines if line.endswith("\n")]
  return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")} for row in rows]


def interrupt(run: subprocess.Popen, workdir: Path, rows: int, delay: float, number: int) -> tuple[int, str]:
  """Send a signal `delay` seconds after the run has logged `rows` rows."""
  while len(metrics(workdir)) < rows and run.poll() is None:
    time.sleep(0.002)
  time.sleep(delay)
  run.send_signal(number)
  return finish(run)


def state(workdir: Path, phase: str) -> dict[str, bytes]:
  """Return every array of a phase's last checkpoint, as bytes."""
  last = max(int(folder.parent.name) for folder in checkpoints(workdir, phase).glob("*/manifest.json"))
  assert last == TINY[phase]["steps"]
  tree = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(checkpoints(workdir, phase) / str(last))
  return {jax.tree_util.keystr(k): np.asarray(x).tobytes() for k, x in jax.tree_util.tree_leaves_with_path(tree)}


def report(workdir: Path) -> dict:
  return {k: v for k, v in json.loads((workdir / "report.json").read_text()).items() if k != "wall_seconds"}


def assert_same_run(workdir: Path, expected: Path) -> None:
  for phase in PHASES:
    assert state(workdir, phase) == state(expected, phase)
  assert metrics(workdir) == metrics(expected)
  assert report(workdir) == report(expected)


def assert_one_line(code: int, said: str, message: str, failed: int = 1) -> None:
  assert code == failed
  assert said.startswith("error: ")
  assert message in said
  assert len(said.splitlines()) == 1


def contents(folder: Path) -> dict[str, bytes]:
  return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
  workdir = tmp_path_factory.mktemp("uninterrupted")
  code, said = ended(f"--workdir={workdir}")
  assert code == 0, said
  rows = metrics(workdir)
  assert len(rows) == ROWS
  # a policy that learns nothing would be the same whatever happens to it
  assert any(row["phase"] == "rl" and row.get("grad_norm", 0) > 0 for row in rows)
  return workdir


def test_killed_and_preempted_ends_as_if_nothing_had_been(tmp_path, uninterrupted):
  code, _ = interrupt(start(f"--workdir={tmp_path}"), tmp_path, rows=4, delay=0.0, number=signal.SIGKILL)
  assert code == -signal.SIGKILL
  assert 4 <= len(metrics(tmp_path)) < ROWS  # it was under way
  code, said = interrupt(start(f"--workdir={tmp_path}"), tmp_path, rows=12, delay=0.0, number=signal.SIGTERM)
  assert code == TINY["loop"]["preempted_exit_code"], said
  stopped_at = metrics(tmp_path)[-1]
  assert stopped_at["phase"] == "rl"
  assert (checkpoints(tmp_path, "rl") / str(stopped_at["step"]) / "manifest.json").exists()
  code, said = ended(f"--workdir={tmp_path}")
  assert code == 0, said
  assert_same_run(tmp_path, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_five_random_moments(tmp_path, uninterrupted, seed):
  rng = random.Random(seed)
  for rows in sorted(rng.sample(range(1, ROWS), 5)):
    run = start(f"--workdir={tmp_path}")
    interrupt(run, tmp_path, rows, delay=rng.uniform(0, 0.2), number=signal.SIGKILL)
  code, said = ended(f"--workdir={tmp_path}")
  assert code == 0, said
  assert_same_run(tmp_path, uninterrupted)


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--config.rl.stepz=3"], "--config.rl.stepz=3: unknown key 'stepz'. Did you mean \"steps\""),
    (["--config.rll.steps=3"], "--config.rll.steps=3: unknown key 'rll'. Did you mean \"rl\""),
    (["--config.rl.steps=many"], "--config.rl.steps=many: invalid literal for int"),
    (["--wrokdir=x"], "Unknown command line flag 'wrokdir'. Did you mean: workdir"),
    (["configs/refrag.py"], "unexpected argument 'configs/refrag.py'; overrides are written --config.rl.steps=50"),
    (["--config.rl.advantage=ppo"], "config.rl.advantage is 'ppo'; one of mean, grpo, rloo, reinforce"),
    (["--config.model.block_pattern=MTM"], "block_pattern has 3 blocks, n_layers is 2"),
    (
      ["--config.model.block_pattern=MX"],
      "block_pattern has 'X'; the blocks are T (attention + MLP), L (the same in a",
    ),
    (["--config.model.n_heads=5"], "d_model 32 is not divisible by n_heads 5"),
  ],
)
def test_a_mistake_is_one_line_and_writes_nothing(tmp_path, flags, message):
  workdir = tmp_path / "run"
  assert_one_line(*ended(f"--workdir={workdir}", *flags), message)
  assert not workdir.exists()


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--config.mesh.data=3"], "mesh {'data': 3, 'fsdp': 1, 'sequence': 1, 'tensor': 1} has 3 places for 8 devices"),
    ([], "evaluation.batch_size = 4 is not divisible by the 8 batch shards of mesh"),
    (
      ["--config.mesh.tensor=2", "--config.rl.questions_per_step=6"],
      "rl.questions_per_step = 6 is not divisible by the 4 batch shards of mesh",
    ),
  ],
)
def test_what_does_not_fit_the_mesh_is_one_line_and_writes_nothing(tmp_path, flags, message):
  workdir = tmp_path / "run"
  assert_one_line(*ended(f"--workdir={workdir}", *flags, devices=8), message)
  assert not workdir.exists()


@pytest.mark.parametrize(
  ("config", "message"),
  [
    ("configs/refrag.py:nope", "no variant 'nope'; one of hybrid, transformer, mamba"),
    ("configs/refragg.py", "No such file or directory: 'configs/refragg.py'; the path of a config begins"),
    ("", "error: Path to config file is an empty string; the path of a config begins"),
  ],
)
@pytest.mark.parametrize("overridden", [True, False])
def test_a_config_that_is_not_there_is_one_line(config, message, overridden):
  flags = ["--config.seed=1"] if overridden else []
  run = launch("launch/train.py", f"--config={config}", *flags)
  assert_one_line(run.returncode, run.stderr, message)


@pytest.mark.parametrize(
  ("launcher", "flags", "message"),
  [
    ("train", [], "which config? --config=configs/refrag.py, or another file of configs/"),
    ("eval", ["--config=configs/refrag.py", "--workdir=runs/nowhere", "--min=em.refragg=1"], "did you mean em.refrag?"),
    ("optimize_prompt", ["--config=configs/refrag.py"], "config.experiment is 'refrag'; optimize_prompt.py runs"),
    ("eval", ["--config=configs/position_recall.py", "--data=x"], "--data: this config reads no files;"),
    (
      "eval",
      ["--config=configs/position_recall.py:documents"],
      "config.data.path is empty; give the files of questions",
    ),
  ],
)
def test_a_config_that_does_not_say_what_to_run_is_one_line(launcher, flags, message):
  run = launch(f"launch/{launcher}.py", *flags)
  # an evaluation is a gate: 1 means that it was missed
  assert_one_line(run.returncode, run.stderr, message, failed=2 if launcher == "eval" else 1)


def test_the_place_of_a_mistake_is_shown_on_request(tmp_path):
  code, said = ended(f"--workdir={tmp_path / 'run'}", "--config.model.n_heads=5", "--v=1")
  assert code == 1
  assert "Traceback" in said
  assert "model/config.py" in said


def test_a_checkpoint_of_another_shape_is_named_and_stays(uninterrupted):
  before = contents(uninterrupted)
  code, said = ended(f"--workdir={uninterrupted}", "--config.model.d_model=64")
  assert code == 1
  error = said.strip().splitlines()[-1]
  assert error.startswith("error: params/params/embed: checkpoint (128, 32), model (128, 64); use another workdir, or")
  assert contents(uninterrupted).keys() == before.keys()
  assert {name for name, data in contents(uninterrupted).items() if data != before[name]} <= {".lock"}


def test_a_workdir_in_use_names_the_process(tmp_path):
  with open_workdir(tmp_path):
    before = contents(tmp_path)
    code, said = ended(f"--workdir={tmp_path}")
    assert contents(tmp_path) == before
  assert_one_line(code, said, f"{tmp_path} is in use by pid {os.getpid()} on ")

"""Mistakes in configs, flags and workdirs: one line that says how to mend it, before any work, with the right code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from selfrag_jax.train.checkpoint import Checkpointer
from selfrag_jax.train.loop import checkpoints
from tests.launching import launch as run_launcher

ROOT = Path(__file__).resolve().parents[2]
FAILED = {"train": 1, "eval": 2, "optimize_prompt": 1}
CONFIG = """import ml_collections
def get_config():
  return ml_collections.ConfigDict({"experiment": "refrag", "workdir": "run"})
"""


def launch(launcher, *flags):
  return run_launcher(f"launch/{launcher}.py", *flags)


def assert_one_line(run, code, message):
  assert len(run.stderr.splitlines()) == 1, run.stderr
  assert re.search(message, run.stderr), run.stderr
  assert run.stderr.startswith("error: ")
  assert (run.returncode, run.stdout) == (code, "")


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("import ml_collections\ndef get_config(:\n", r"mine\.py, line 2: invalid syntax"),
    ("\x00", r"mine\.py.*null bytes"),
    ("import nowhere_at_all\n", r"mine\.py, line 1: ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ("x = 5\n", r"mine\.py: .* no attribute 'get_config'"),
    ("def get_config():\n  return {}['x']\n", r"mine\.py, line 2: KeyError: 'x'"),
    ("def get_config():\n  raise ValueError('two\\nlines')\n", r"mine\.py, line 2: two lines"),
    ("def get_config():\n  return 1 / 0\n", r"mine\.py, line 2: ZeroDivisionError: division by zero"),
    ("def get_config():\n  return [5]\n", r"mine\.py: get_config\(\) returned \[5\], it must return a ConfigDict"),
    ("def get_config():\n  pass\n", r"mine\.py: get_config\(\) returned None, it must return a ConfigDict"),
    (
      "def get_config(variant):\n  pass\n",
      r"mine\.py: get_config\(\) missing 1 required positional argument: 'variant'",
    ),
    (CONFIG.replace("experiment", "experimnt"), r"the config of .*mine\.py has no experiment; train\.py runs refrag,"),
    (CONFIG, r"the config has no 'seed'; it needs seed, mesh, init"),
    (CONFIG.replace('"run"', "5"), r"config\.workdir is 5; it must be the name of a folder"),
  ],
)
def test_a_config_that_is_no_config_is_named_with_its_line(tmp_path, text, message):
  (tmp_path / "mine.py").write_text(text)
  assert_one_line(launch("train", f"--config={tmp_path / 'mine.py'}"), 1, message)


def test_a_config_that_is_a_folder_or_takes_no_variant_is_named(tmp_path):
  assert_one_line(launch("train", f"--config={tmp_path}"), 1, f"Is a directory: '{tmp_path}'")
  assert_one_line(launch("train", "--config=configs/rerank.py:x"), 1, "takes 0 positional arguments but 1 was given")


@pytest.mark.parametrize("launcher", FAILED)
@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--workdirr=x"], r"Unknown command line flag 'workdirr'\. Did you mean: workdir"),
    (["--workdir"], r"Missing value for flag --workdir"),
    (["extra", "--config=configs/refrag.py"], r"unexpected argument 'extra'"),
    ([], r"which config\?"),
  ],
)
def test_a_mistake_in_the_flags_is_one_line(launcher, flags, message):
  assert_one_line(launch(launcher, *flags), FAILED[launcher], message)


@pytest.mark.parametrize(
  ("launcher", "flags"),
  [
    ("generate", ["--model=a\x1b]0;title\x07b"]),
    ("generate", ["--mod\x1b]0;title\x07el=b"]),
    ("train", ["--config=configs/refrag.py", "--config.seed=\x1b]0;title\x07"]),
    ("build_kb", ["--documents=a\x1b]0;title\x07b", "--output=kb"]),
  ],
)
def test_a_terminal_obeys_nothing_of_what_a_message_quotes(launcher, flags):
  run = launch(launcher, *flags)
  assert_one_line(run, 1, r"\\x1b\]0;title\\x07")
  assert run.stderr.rstrip("\n").isprintable()


@pytest.mark.parametrize("gate", ["foo", "a=b=c", "loss", "a=nan", "a=inf", "=0.5", "a=1=2", ""])
def test_a_gate_that_cannot_be_read_is_not_a_gate_that_is_missed(gate):
  run = launch("eval", "--config=configs/retrieval.py:words", f"--min={gate}")
  assert_one_line(run, 2, rf"--min={re.escape(gate)}: write NAME=VALUE")


def test_a_traceback_of_an_evaluation_is_not_a_gate_that_is_missed():
  run = launch("eval", "--config=configs/retrieval.py:words", "--min=foo", "--v=1")
  assert "Traceback" in run.stderr
  assert run.returncode == 2


@pytest.fixture
def collection(tmp_path):
  (folder := tmp_path / "data").mkdir()
  (folder / "corpus.jsonl").write_text('{"_id": "d", "title": "t", "text": "cats purr"}\n')
  (folder / "queries.jsonl").write_text('{"_id": "q", "text": "who purrs"}\n')
  (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\n")
  return folder


def test_a_gate_of_no_value_is_named_before_the_work(tmp_path, collection):
  flags = ["--config=configs/retrieval.py:words", f"--data={collection}", f"--workdir={tmp_path / 'run'}"]
  run = launch("eval", *flags, "--min=bm25.ndcg@1=0.5")
  assert_one_line(run, 2, r"the report has no bm25\.ndcg@1; did you mean bm25\.ndcg@10\?")
  assert not (tmp_path / "run").exists()
  assert launch("eval", *flags, "--min=bm25.ndcg@10=1.5").returncode == 1
  assert launch("eval", *flags, "--min=bm25.ndcg@10=0.5").returncode == 0
  assert launch("eval", *flags, "--max=bm25.ndcg@10=0.5").returncode == 1


@pytest.mark.parametrize(
  ("config", "name"),
  [
    ("position_recall", "conditions.memory.acuracy"),
    ("headlines", "position_recall_kv.values.conditions.memory.acuracy.median"),
    ("headlines", "refrag_hybrid.values.em.refrag.acuracy"),
  ],
)
def test_a_gate_of_no_value_is_named_before_anything_is_trained(tmp_path, config, name):
  flags = [f"--config=configs/{config}.py", f"--workdir={tmp_path / 'run'}", f"--min={name}=0.9"]
  run = launch("eval", *flags)
  close = re.escape(name.removesuffix("acuracy").replace("acuracy", "accuracy"))
  assert_one_line(run, 2, rf"the report has no {re.escape(name)}; did you mean {close}")
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("launcher", FAILED)
def test_a_workdir_that_cannot_be_is_said_before_the_work(tmp_path, launcher):
  config = {"train": "refrag", "eval": "retrieval", "optimize_prompt": "gradient_rag"}[launcher]
  (tmp_path / "file").write_text("mine")
  for workdir in (tmp_path / "file", tmp_path / "file" / "run"):
    run = launch(launcher, f"--config=configs/{config}.py", f"--workdir={workdir}")
    assert_one_line(run, FAILED[launcher], f"the workdir {workdir} cannot be made: {tmp_path / 'file'} is a file")
  run = launch(launcher, f"--config=configs/{config}.py", "--workdir=")
  assert_one_line(run, FAILED[launcher], "the workdir is an empty name")
  assert (tmp_path / "file").read_text() == "mine"


def test_a_workdir_of_another_experiment_is_refused_and_stays(tmp_path):
  with Checkpointer(checkpoints(tmp_path, "pretrain")) as saver:
    saver.save(1, {"x": np.zeros(1)}, metadata={"config": {"experiment": "self_rag"}})
  before = sorted(os.listdir(tmp_path))
  run = launch("train", "--config=configs/refrag.py", f"--workdir={tmp_path}")
  assert_one_line(run, 1, f"the workdir {tmp_path} is of experiment 'self_rag', this one is 'refrag': use another")
  assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--config.sft.batch_size=0", r"config\.sft\.batch_size is 0; it must be a whole number, at least 1"),
    ("--config.rl.optimizer.learning_rate=nan", r"config\.rl\.optimizer\.learning_rate is nan; it must be a finite"),
    ("--config.seed=-1", r"config\.seed is -1; it must be a whole number, at least 0"),
  ],
)
def test_a_number_that_cannot_be_is_one_line(tmp_path, flag, message):
  assert_one_line(launch("train", "--config=configs/refrag.py", flag, f"--workdir={tmp_path / 'run'}"), 1, message)
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("launcher", "own"), [("train", "dry_run"), ("eval", "min"), ("optimize_prompt", "compare")])
@pytest.mark.parametrize("flag", ["--help", "--helpshort", "-h"])
def test_help_lists_the_flags_of_the_project(launcher, own, flag):
  run = launch(launcher, flag)
  assert (run.returncode, run.stderr) == (0, "")
  assert f"launch/{launcher}.py --config=" in run.stdout
  for name in ("config", "workdir", own):
    assert re.search(rf"^  --(\[no\])?{name}:", run.stdout, re.MULTILINE), run.stdout
  assert "--v:" not in run.stdout


def test_help_may_be_read_in_part():
  gone, written = os.pipe()
  os.close(gone)
  command = [sys.executable, "launch/eval.py", "--help"]
  run = subprocess.run(command, cwd=ROOT, stdout=written, stderr=subprocess.PIPE, check=False)
  os.close(written)
  assert (run.returncode, run.stderr) == (0, b"")


@pytest.mark.parametrize(("launcher", "own"), [("generate", "prompt"), ("build_kb", "documents")])
def test_launchers_without_a_config_do_not_take_one(launcher, own):
  run = launch(launcher, "--help")
  assert run.returncode == 0
  assert f"--{own}:" in run.stdout
  assert "--config:" not in run.stdout
  assert_one_line(launch(launcher, "--workdir=x"), 1, f"{launcher}\\.py has no flag --workdir")
  assert_one_line(launch(launcher, "--dry_run"), 1, f"{launcher}\\.py has no flag --dry_run")

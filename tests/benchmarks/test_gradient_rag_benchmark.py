"""The benchmark of Gradient-RAG: its arms and scenarios run, and wrong flags are refused before any run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gradient_rag.py"


def start(*arguments):
  return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300)


def test_arms_are_compared_with_retrieval_and_with_random_replay(tmp_path):
  arms = "--arms=none,keep_best,random,retrieval"
  ended = start("--seeds=1", "--first_seed=0", "--jobs=1", "--scenarios=noise=0", arms, f"--output={tmp_path}/x.json")
  assert ended.returncode == 0, ended.stderr[-2000:]
  rows = json.loads((tmp_path / "x.json").read_text())["scenarios"]["noise=0"]
  assert [*rows] == arms.partition("=")[2].split(",")
  assert rows["keep_best"]["added_calls"] > 1  # its validation is booked
  assert rows["random"]["retrieval_minus_this"] == pytest.approx(rows["retrieval"]["this_minus_random"])
  assert rows["retrieval"]["score"] > 0.2


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("--scenarios=retrun", "'retrun'? They are return, long, router"),
    ("--scenarios=noise=7", "'noise=7'?"),
    ("--scenarios=capacity=0", "'capacity=0'?"),
    ("--scenarios=steady,router", "needs --data=FOLDER"),
    ("--arms=none,retrieval,orcale", "orcale?"),
  ],
)
def test_what_cannot_be_run_is_refused(argument, message):
  ended = start(argument)
  assert ended.returncode != 0
  assert message in ended.stdout + ended.stderr
  assert "Traceback" not in ended.stderr

"""A workdir has one run at a time."""

import os
import signal
import subprocess
import sys

import pytest

from selfrag_jax.files import FolderInUseError
from selfrag_jax.train import workdir

HOLD_LOCK = """
import sys, time
from selfrag_jax.train.workdir import open_workdir
with open_workdir(sys.argv[1]):
  print("locked", flush=True)
  time.sleep(60)
"""


def test_lock_keeps_a_second_run_out_and_dies_with_its_process(tmp_path):
  folder = tmp_path / "new" / "run"
  holder = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, str(folder)], stdout=subprocess.PIPE, text=True)
  try:
    assert holder.stdout.readline() == "locked\n"
    with (
      pytest.raises(FolderInUseError, match=rf"pid {holder.pid} on .*another workdir"),
      workdir.open_workdir(folder),
    ):
      pass
  finally:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
  with workdir.open_workdir(folder) as opened:
    assert str(opened) == str(folder)
    assert (folder / ".lock").read_text().startswith(f"pid {os.getpid()} on ")


def test_lock_is_free_after_the_block(tmp_path):
  for _ in range(2):
    with workdir.open_workdir(tmp_path):
      pass

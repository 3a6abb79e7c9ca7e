"""A workdir has one run at a time, and its files are whole or as they were."""

import os
import signal
import subprocess
import sys

import pytest

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
      pytest.raises(workdir.WorkdirInUseError, match=rf"pid {holder.pid} on .*another workdir"),
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


def test_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
  path = tmp_path / "data.json"
  workdir.write_json(path, {"step": 1})

  def full_disk(_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "fsync", full_disk)
  with pytest.raises(OSError, match="No space left"):
    workdir.write_json(path, {"step": 2})
  assert path.read_text() == '{\n  "step": 1\n}\n'


def test_bytes_are_on_disk_before_the_name(tmp_path, monkeypatch):
  calls = []
  real_fsync, real_replace = os.fsync, os.replace
  monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), real_fsync(fd)))
  monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), real_replace(a, b)))
  workdir.write_bytes_atomic(tmp_path / "file", b"\0\xff")
  assert calls == ["fsync", "rename", "fsync"]
  assert [p.name for p in tmp_path.iterdir()] == ["file"]
  assert (tmp_path / "file").read_bytes() == b"\0\xff"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_is_strict(tmp_path, value):
  with pytest.raises(ValueError, match="JSON"):
    workdir.write_json(tmp_path / "x.json", {"loss": value})


def test_object_storage_is_not_local():
  assert workdir.is_local("/runs/mine")
  assert workdir.is_local("run")
  assert not workdir.is_local("gs://bucket/run")

"""The lock of a workdir: one run at a time."""

import os
import signal
import subprocess
import sys

import pytest

from selfrag_jax.storage.lock import FolderInUseError
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


def test_a_folder_belongs_to_one_experiment(tmp_path):
  with workdir.open_workdir(tmp_path, "self_rag"):
    pass
  with workdir.open_workdir(tmp_path, "position_recall"):  # goes on where those phases have come to
    pass
  with workdir.open_workdir(tmp_path):
    pass
  for look in (workdir.check_workdir, lambda *a: workdir.open_workdir(*a).__enter__()):
    with pytest.raises(ValueError, match="is of experiment 'self_rag', this one is 'refrag': use another workdir"):
      look(tmp_path, "refrag")


@pytest.mark.parametrize("content", ["", "5", "{}", '{"experiment": 5}', "[" * 100_000])
def test_a_damaged_note_of_the_experiment_stops_nothing(tmp_path, content):
  (tmp_path / "run.json").write_text(content)
  with workdir.open_workdir(tmp_path, "refrag"):
    pass
  with pytest.raises(ValueError, match="is of experiment 'refrag'"):
    workdir.check_workdir(tmp_path, "retrieval")


@pytest.mark.parametrize("name", ["with space", "new\nline", "ümläut/deep/er", "-dash", "a:b", "%s{}"])
def test_any_name_will_do(tmp_path, name):
  with workdir.open_workdir(tmp_path / name, "refrag") as opened:
    (opened / "x").write_text("")
  assert (tmp_path / name / "x").exists()


def test_what_cannot_be_a_folder_is_said_and_nothing_is_made(tmp_path, monkeypatch):
  (tmp_path / "file").write_text("")
  (tmp_path / "link").symlink_to(tmp_path / "nowhere")
  for path in ("file", "file/run", "link", "link/run"):
    with pytest.raises(NotADirectoryError, match=r"the workdir .* cannot be made: .* is a file or a broken link"):
      workdir.check_workdir(tmp_path / path)
  with pytest.raises(ValueError, match="the workdir is an empty name"):
    workdir.check_workdir("")
  monkeypatch.setattr(workdir.os, "access", lambda *_: False)
  with pytest.raises(PermissionError, match=f"no permission to write into {tmp_path}"):
    workdir.check_workdir(tmp_path / "new" / "run")
  assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_lock_is_free_after_the_block(tmp_path):
  for _ in range(2):
    with workdir.open_workdir(tmp_path):
      pass

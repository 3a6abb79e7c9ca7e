"""Workdirs, data and the compilation cache in object storage, against a local server that speaks its protocol."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from selfrag_jax.retrieval.beir import EXAMPLE, read_beir
from selfrag_jax.storage import lease
from selfrag_jax.storage.arrays import npz_bytes, read_npz
from selfrag_jax.storage.lock import FolderInUseError
from selfrag_jax.tasks.text import read_documents
from selfrag_jax.train.checkpoint import Checkpointer, CheckpointError, load
from selfrag_jax.train.load import load_model
from selfrag_jax.train.telemetry import Telemetry, read_rows
from selfrag_jax.train.workdir import check_workdir, open_workdir
from tests.launch.test_train_cli import ROOT, flags_and_environment
from tests.object_storage import ObjectStorage

HOLD = """
import sys, time
from selfrag_jax.storage import lease
lease.RENEWED, lease.EXPIRED = 0.2, 5.0
with lease.hold_lease(sys.argv[1]):
  print("held", flush=True)
  time.sleep(60)
"""


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
  with ObjectStorage(tmp_path_factory.mktemp("storage")) as server, pytest.MonkeyPatch.context() as patch:
    for name, value in server.environment.items():
      patch.setenv(name, value)
    yield server


@pytest.fixture
def bucket(storage, monkeypatch):
  """A server with nothing in it, and leases that expire soon."""
  with storage.lock:
    storage.objects.clear()
    storage.writes.clear()
    storage.reads.clear()
    storage.read_only, storage.lose = (), 0
  monkeypatch.setattr(lease, "RENEWED", 0.2)
  monkeypatch.setattr(lease, "EXPIRED", 5.0)
  return storage


@pytest.fixture
def holder(bucket):
  """Another process that holds the lease of gs://bucket/run."""
  command = [sys.executable, "-c", HOLD, "gs://bucket/run"]
  process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  assert process.stdout.readline() == "held\n"
  yield process
  process.kill()
  process.communicate()


def test_a_second_run_is_refused_until_the_first_has_ended(bucket):
  with open_workdir("gs://bucket/run", "refrag"):
    with (
      pytest.raises(FolderInUseError, match=rf"gs://bucket/run is in use by pid {os.getpid()} on .*another workdir"),
      open_workdir("gs://bucket/run", "refrag"),
    ):
      pass
    with open_workdir("gs://bucket/run2"):
      pass
  assert bucket.names("bucket/") == ["run/run.json"]
  began = time.monotonic()
  with open_workdir("gs://bucket/run", "refrag"):
    assert time.monotonic() - began < lease.EXPIRED  # what was given back is not waited for
  with pytest.raises(ValueError, match="is of experiment 'refrag', this one is 'rag'"):
    check_workdir("gs://bucket/run", "rag")


def test_a_lease_is_free_once_its_holder_was_killed(bucket, holder):
  with (
    pytest.raises(FolderInUseError, match=f"pid {holder.pid} on {socket.gethostname()}"),
    open_workdir("gs://bucket/run"),
  ):
    pass
  holder.send_signal(signal.SIGKILL)
  holder.wait()
  with open_workdir("gs://bucket/run"):
    assert bucket.objects["bucket/run/.lock"][0].startswith(f"pid {os.getpid()} on ".encode())


def test_a_holder_that_was_stopped_too_long_ends_instead_of_writing(bucket, holder):
  holder.send_signal(signal.SIGSTOP)
  with open_workdir("gs://bucket/run"):
    holder.send_signal(signal.SIGCONT)
    _, said = holder.communicate(timeout=30)
    assert holder.returncode == 1
    assert "error: gs://bucket/run/.lock was deleted, or taken over by another process" in said
    bucket.lose = 1  # this one's next renewal is done, but it is told so only after a second try
    written = bucket.writes["bucket/run/.lock"]
    while bucket.writes["bucket/run/.lock"] < written + 3:
      time.sleep(0.05)


def test_what_cannot_be_written_is_said(bucket):
  bucket.read_only = ("bucket/refused", "bucket/run/checkpoints")
  with pytest.raises(OSError, match="gs://bucket/refused/ cannot be written: PERMISSION_DENIED: no permission"):
    open_workdir("gs://bucket/refused").__enter__()
  with pytest.raises(CheckpointError, match=r"no checkpoints can be saved: .*no permission to write bucket/run/check"):
    Checkpointer("gs://bucket/run/checkpoints/sft")
  with pytest.raises(ValueError, match="s3://bucket/run is neither a folder nor in Google Cloud Storage"):
    check_workdir("s3://bucket/run")


def test_checkpoints_are_kept_verified_and_cleared_away_as_on_a_disk(bucket):
  folder, state = epath.Path("gs://bucket/run/checkpoints/sft"), {"x": jnp.arange(10), "key": jax.random.key(1)}
  with Checkpointer(folder) as saver:
    assert saver.restore(state) is None
    for step in range(1, 4):
      saver.save(step, state | {"x": state["x"] + step}, metadata={"n": step})
  assert sorted(path.name for path in folder.iterdir()) == ["2", "3"]
  assert load(folder, {"x": state["x"]}).metadata == {"n": 3}
  (folder / "3" / "_sharding").write_bytes(b"damaged")
  (folder / "4").mkdir()
  (folder / "4" / "_METADATA").write_bytes(b"cut short")
  with Checkpointer(folder) as saver:
    restored = saver.restore(state)
    assert restored.step == 2
    np.testing.assert_array_equal(restored.state["x"], state["x"] + 2)
    assert sorted(path.name for path in folder.iterdir()) == ["2", "damaged-3-0"]
    for step in (3, 4):
      saver.save(step, state, metadata={"n": step})
  assert load(folder, state).step == 4
  assert (folder / "damaged-3-0" / "_sharding").read_bytes() == b"damaged"


def test_metrics_are_written_now_and_then_and_before_each_checkpoint(bucket):
  workdir = epath.Path("gs://bucket/run")
  for start in (0, 50):
    with Telemetry(workdir, total_steps=100, start_step=start, phase="sft", log_every=0) as telemetry:
      for step in range(start + 1, start + 51):
        telemetry.log(step, {"loss": step})
      telemetry.flush()
      assert [row["step"] for row in read_rows(workdir)] == [*range(1, start + 51)]
      telemetry.log(start + 51, {"loss": 0.0})
  assert [row["step"] for row in read_rows(workdir)] == [*range(1, 102)]
  assert bucket.writes["bucket/run/metrics.jsonl"] < 10
  (first, second) = [name for name in bucket.names("bucket/run/tensorboard/sft/")]
  assert bucket.objects[f"bucket/run/tensorboard/sft/{first}"][0].count(b"loss") == 51
  assert bucket.objects[f"bucket/run/tensorboard/sft/{second}"][0].count(b"loss") == 51


def test_data_is_read_as_from_a_disk(bucket, tmp_path):
  texts = [f"text {n} " * 20_000 for n in range(30)]  # longer than a buffer
  (tmp_path / "texts").mkdir()
  (tmp_path / "texts" / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
  (tmp_path / "texts" / "b.txt").write_text("one\n\ntwo")
  remote = epath.Path("gs://bucket/data")
  for folder in (tmp_path / "texts", EXAMPLE):
    for file in folder.rglob("*"):
      if file.is_file():
        (remote / folder.name / file.relative_to(folder)).write_bytes(file.read_bytes())
  assert list(read_documents(remote / "texts")) == list(read_documents(tmp_path / "texts")) == [*texts, "one\n\ntwo"]
  assert read_beir(remote / EXAMPLE.name) == read_beir(EXAMPLE)
  (remote / "x.npz").write_bytes(npz_bytes({"x": np.arange(5)}))
  np.testing.assert_array_equal(read_npz(remote / "x.npz")["x"], np.arange(5))
  with pytest.raises(FileNotFoundError, match="gs://bucket/nowhere holds no text"):
    list(read_documents("gs://bucket/nowhere"))


def test_what_was_deleted_is_gone_at_once(bucket):
  folder = epath.Path("gs://bucket/run/1")
  (folder / "x").write_bytes(b"x")
  assert folder.exists()
  folder.rmtree()
  assert not folder.exists()


class Run:
  """`launch/train.py --config=configs/refrag.py`, tiny, in a process that starts with nothing on its disk."""

  def __init__(self, storage: ObjectStorage, folder: Path, workdir: str):
    command, environment = flags_and_environment((f"--workdir={workdir}",), 1)
    folder.mkdir()
    environment |= {"JAX_COMPILATION_CACHE_DIR": "gs://bucket/cache", "TMPDIR": str(folder), "HOME": str(folder)}
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
    self.process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, text=True, **pipes)

  def ended(self) -> tuple[int, str]:
    _, said = self.process.communicate(timeout=600)
    return self.process.returncode, said


def metrics(workdir: str) -> list[dict]:
  return [
    {k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")}
    for row in read_rows(epath.Path(workdir))
  ]


def report(workdir: str) -> dict:
  found = json.loads((epath.Path(workdir) / "report.json").read_bytes())
  return {k: v for k, v in found.items() if k != "wall_seconds"}


@pytest.mark.slow
def test_a_run_trains_dies_resumes_and_is_loaded_with_nothing_on_a_disk(storage, tmp_path):
  run, again = "gs://bucket/run", "gs://bucket/again"
  first = Run(storage, tmp_path / "1", run)
  while not storage.names("bucket/run/checkpoints/sft/3/manifest.json"):
    assert first.process.poll() is None, first.ended()
    time.sleep(0.01)
  first.process.send_signal(signal.SIGSTOP)  # until the second has come so far
  second = Run(storage, tmp_path / "2", run)
  while storage.reads["bucket/run/.lock"] < 3:
    assert second.process.poll() is None, second.ended()
    time.sleep(0.01)
  first.process.send_signal(signal.SIGCONT)
  code, said = second.ended()
  assert code == 1
  assert f"error: {run} is in use by pid {first.process.pid} on" in said.splitlines()[-1]
  while not storage.names("bucket/run/checkpoints/rl/3/manifest.json"):
    assert first.process.poll() is None, first.ended()
    time.sleep(0.01)
  first.process.kill()
  first.ended()
  assert not storage.names("bucket/run/report")

  code, said = Run(storage, tmp_path / "3", run).ended()
  assert code == 0, said
  assert "rl: continues after step " in said
  assert {"report.json", "report.html", "report.png", "config.json"} <= {*storage.names("bucket/run/")}
  assert ".lock" not in storage.names("bucket/run/")

  cached = {name: storage.reads[f"bucket/cache/{name}"] for name in storage.names("bucket/cache/")}
  code, said = Run(storage, tmp_path / "4", again).ended()
  assert code == 0, said
  # what is compiled is kept, however quickly it was: so nothing was
  assert [*cached] == storage.names("bucket/cache/")
  assert sum(storage.reads[f"bucket/cache/{name}"] > reads for name, reads in cached.items()) > len(cached) / 2
  assert metrics(run) == metrics(again)
  assert report(run) == report(again)
  models = [load_model(workdir) for workdir in (run, again)]
  assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), *(model.params for model in models)))

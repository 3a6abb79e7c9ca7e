"""Damaged folders of checkpoints: the newest intact step is restored, and no foreign file is lost."""

import json
import os
import random
import shutil
import threading
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from selfrag_jax.storage.manifest import file_digest
from selfrag_jax.train.checkpoint import Checkpointer, CheckpointError, load, read_metadata


def state(step):
  return {"x": jnp.full((8, 4), step, jnp.int32), "key": jax.random.key(step)}


def save(directory, *steps, **options):
  with Checkpointer(directory, **options) as checkpointer:
    for step in steps:
      checkpointer.save(step, state(step), metadata={"position": step}, metrics={"score": -step})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  folder = tmp_path_factory.mktemp("saved")
  save(folder, 10, 20, keep_latest=2)
  return folder


@pytest.fixture
def directory(saved, tmp_path):
  return Path(shutil.copytree(saved, tmp_path / "run"))


def restore_and_go_on(directory, expected):
  """Restore `expected`, save what comes after it, and restore that."""
  with Checkpointer(directory, best_metric="score") as checkpointer:
    restored = checkpointer.restore(state(0))
    assert (restored.step if restored else None) == expected
    if restored:
      assert restored.metadata == {"position": expected}
      np.testing.assert_array_equal(restored.state["x"], expected)
    for step in (20, 30) if expected != 20 else (30, 40):
      checkpointer.save(step, state(step), metadata={"position": step})
    assert checkpointer.restore(state(0)).step == step
  assert load(directory, {"x": state(0)["x"]}).step == step


def rehash(folder):
  """Make the manifest say what is there now."""
  paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
  listed = {path.relative_to(folder).as_posix(): file_digest(path) for path in paths}
  (folder / "manifest.json").write_text(json.dumps({"files": listed}))


CONTENT = [b"", b"5", b"[]", b"{}", b"null", b'{"files": 5}', b'{"files": {}}', b"\xff\x00\x1f", b"[" * 100_000]


@pytest.mark.parametrize("content", CONTENT, ids=range(len(CONTENT)))
@pytest.mark.parametrize("name", ["manifest.json", "metadata.json"])
@pytest.mark.parametrize("rehashed", [False, True])
def test_a_manifest_or_metadata_of_anything_is_named_and_skipped(directory, name, content, rehashed, caplog):
  (directory / "20" / name).write_bytes(content)
  if rehashed and name == "metadata.json":
    rehash(directory / "20")
  assert read_metadata(directory) == {"position": 10}
  assert f"step 20 in {directory}: {name} is damaged" in caplog.text
  with pytest.raises(CheckpointError, match=f"step 20 .*{name} is damaged"):
    read_metadata(directory, 20)
  restore_and_go_on(directory, 10)


@pytest.mark.parametrize("name", ["../10/metadata.json", "/etc/hostname"])
def test_a_manifest_that_names_files_elsewhere_is_damaged(directory, name, caplog):
  manifest = directory / "20" / "manifest.json"
  files = json.loads(manifest.read_text())["files"]
  manifest.write_text(json.dumps({"files": {**files, name: file_digest(directory / "20" / name)}}))
  assert read_metadata(directory) == {"position": 10}
  assert f"manifest.json is damaged, it names {name}, which lies outside of the folder" in caplog.text
  restore_and_go_on(directory, 10)


def test_an_older_step_that_is_damaged_does_not_stop_the_run(directory):
  (directory / "10" / "metadata.json").write_bytes(b"5")
  restore_and_go_on(directory, 20)


@pytest.mark.parametrize("keep", ["manifest.json", "_METADATA"])
def test_half_of_a_deleted_step_is_skipped(directory, keep):
  for path in (directory / "20").rglob("*"):
    if path.is_file() and path.name != keep:
      path.unlink()
  restore_and_go_on(directory, 10)


@pytest.mark.parametrize("killed_after", range(12))
def test_a_kill_while_an_old_step_is_deleted_leaves_nothing_behind(directory, monkeypatch, killed_after):
  class Killed(BaseException):
    pass

  left = [killed_after]

  def dying(real):
    def call(*args, **options):
      if threading.current_thread().name.startswith("checkpoint_commit"):  # deletes nothing else
        if not left[0]:
          raise Killed
        left[0] -= 1
      return real(*args, **options)

    return call

  checkpointer = Checkpointer(directory, keep_latest=1)
  with monkeypatch.context() as patch:
    for name in ("unlink", "remove", "rmdir"):
      patch.setattr(os, name, dying(getattr(os, name)))
    checkpointer.save(30, state(30), metadata={"position": 30})
    with pytest.raises(Killed):
      checkpointer.close()
  save(directory, 40, keep_latest=1)
  assert [path.name for path in directory.iterdir()] == ["40"]


@pytest.mark.parametrize("name", ["007", "+7", "1_0", "٣", "notes.txt", "25.orbax-checkpoint-tmp.txt", "damaged-20-0"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_step_is_left_alone(directory, name, kind):
  (directory / name / "mine.txt" if kind == "folder" else directory / name).parent.mkdir(exist_ok=True)
  (directory / name / "mine.txt" if kind == "folder" else directory / name).write_text("mine")
  assert read_metadata(directory) == {"position": 20}
  restore_and_go_on(directory, 20)
  assert (directory / name / "mine.txt" if kind == "folder" else directory / name).read_text() == "mine"


@pytest.mark.parametrize("step", [5, 30])
@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("when", ["before", "while it runs"])
def test_what_only_has_the_name_of_a_step_is_kept(directory, step, kind, when):
  def put():
    path = directory / str(step) / "mine.txt" if kind == "folder" else directory / str(step)
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")

  if when == "before":
    put()
    assert read_metadata(directory) == {"position": 20}
    restore_and_go_on(directory, 20)
  else:
    with Checkpointer(directory) as checkpointer:
      checkpointer.restore(state(0))
      put()
      checkpointer.save(30, state(30), metadata={"position": 30})
    assert read_metadata(directory) == {"position": 30}
  assert [path.read_text() for path in directory.rglob("*") if path.is_file() and path.read_bytes() == b"mine"]


@pytest.mark.parametrize("committed", [True, False])
def test_of_a_step_that_is_a_link_only_the_link_is_deleted(directory, tmp_path, committed):
  (directory / "20").rename(tmp_path / "moved")
  (directory / "20").symlink_to(tmp_path / "moved")
  if not committed:
    (tmp_path / "moved" / "manifest.json").unlink()
  before = {path: path.read_bytes() for path in (tmp_path / "moved").rglob("*") if path.is_file()}
  with Checkpointer(directory, keep_latest=1) as checkpointer:
    assert checkpointer.restore(state(0)).step == (20 if committed else 10)
    checkpointer.save(30, state(30), metadata={"position": 30})
  assert [path.name for path in directory.iterdir()] == ["30"]
  assert {path: path.read_bytes() for path in (tmp_path / "moved").rglob("*") if path.is_file()} == before


def test_a_step_that_was_copied_to_another_number_is_not_restored_as_that(directory, caplog):
  shutil.copytree(directory / "20", directory / "25")
  assert read_metadata(directory) == {"position": 20}
  assert "step 20, the folder was renamed or copied" in caplog.text
  restore_and_go_on(directory, 20)


def test_a_checkpoint_that_does_not_say_its_step_is_restored(directory):
  document = json.loads((directory / "20" / "metadata.json").read_text())
  del document["step"]  # as earlier versions saved it
  (directory / "20" / "metadata.json").write_text(json.dumps(document))
  rehash(directory / "20")
  restore_and_go_on(directory, 20)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32))
def test_whatever_happens_to_the_files_the_newest_intact_step_is_restored(saved, tmp_path_factory, seed):
  rng, directory = random.Random(seed), tmp_path_factory.mktemp("fuzz") / "run"
  shutil.copytree(saved, directory)
  hurt = set()
  for _ in range(rng.randint(1, 4)):
    paths = sorted(path for step in ("10", "20") for path in (directory / step).rglob("*"))
    if not paths:
      continue
    path, what = rng.choice(paths), rng.choice(["delete", "truncate", "flip", "replace", "folder"])
    hurt.add(int(path.relative_to(directory).parts[0]))
    if path.is_dir():
      shutil.rmtree(path)
    elif what == "truncate" and path.stat().st_size:
      path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
    elif what == "flip" and path.stat().st_size:
      content = bytearray(path.read_bytes())
      content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
      path.write_bytes(content)
    elif what == "replace":
      path.write_bytes(rng.choice(CONTENT) + b" ")
    else:
      path.unlink()
      if what == "folder":
        path.mkdir()
  with Checkpointer(directory) as checkpointer:
    restored = checkpointer.restore(state(0))
    intact = {10, 20} - hurt
    assert (restored.step if restored else 0) >= max(intact, default=0)
    if restored:  # what was hurt may still be whole: an emptied file was empty before
      np.testing.assert_array_equal(restored.state["x"], restored.step)
      assert restored.metadata == {"position": restored.step}
    checkpointer.save(30, state(30), metadata={"position": 30})
    assert checkpointer.restore(state(0)).step == 30

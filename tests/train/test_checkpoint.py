"""Checkpoints: they come back bit for bit or not at all, after kills, flipped bits, truncation and deletion."""

import errno
import logging
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from selfrag_jax.storage.atomic import write_bytes_atomic
from selfrag_jax.train import checkpoint
from selfrag_jax.train.checkpoint import Checkpointer, CheckpointError, load, read_metadata


def make_state(seed=0, width=8):
  rng = np.random.default_rng(seed)
  params = {
    "embed": {"embedding": jnp.asarray(rng.normal(size=(16, width)), jnp.float32)},
    "head": jnp.asarray(rng.normal(size=(width,)), jnp.bfloat16),
  }
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  return {
    "params": params,
    "opt_state": optimizer.init(params),
    "step": jnp.int32(seed),
    "codes": jnp.asarray(rng.integers(-128, 127, (3, 4)), jnp.int8),
    "key": jax.random.key(seed),
    "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 3),
    "old_key": jax.random.PRNGKey(seed),
    "nothing": None,
  }


def abstract(state):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def raw(x):
  return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert np.asarray(raw(x)).tobytes() == np.asarray(raw(y)).tobytes()


def save_steps(directory, *steps, **options):
  with Checkpointer(directory, **options) as checkpointer:
    for step in steps:
      checkpointer.save(step, make_state(step), metadata={"position": step})


def restore(directory, step=None):
  with Checkpointer(directory) as checkpointer:
    return checkpointer.restore(abstract(make_state()), step)


def steps_in(directory):
  return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def flip_byte(path, position):
  data = bytearray(path.read_bytes())
  data[position % len(data)] ^= 0x10
  path.write_bytes(data)


def test_round_trip_is_bit_exact(tmp_path):
  state, metadata = make_state(3), {"model": {"d_model": 8}, "tokenizer": "ab12", "position": 96}
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(3, state, metadata=metadata)
    metadata["position"] = 97  # the caller's dict may change while the save runs
    restored = checkpointer.restore(abstract(state))
  assert (restored.step, restored.metadata) == (3, metadata | {"position": 96})
  assert_same(restored.state, state)
  assert jax.random.key_impl(restored.state["keys"]) == "rbg"
  assert read_metadata(tmp_path) == metadata | {"position": 96}


def test_relative_directory_stays_where_it_was(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with Checkpointer("runs/mine") as checkpointer:
    checkpointer.save(1, make_state(1), metadata={})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    checkpointer.save(2, make_state(2), metadata={})
  monkeypatch.chdir(tmp_path)
  assert steps_in(tmp_path / "runs" / "mine") == [1, 2]
  assert_same(restore("runs/mine", 1).state, make_state(1))
  assert_same(load("runs/mine", abstract(make_state())).state, make_state(2))


def test_empty_directory_has_nothing(tmp_path):
  assert restore(tmp_path / "new") is None
  assert read_metadata(tmp_path / "absent") is None
  assert load(tmp_path / "absent", {}) is None
  assert not (tmp_path / "absent").exists()


def test_a_folder_that_cannot_be_written_is_said_at_once(tmp_path, monkeypatch):
  monkeypatch.setattr(checkpoint.os, "access", lambda *_: False)
  with pytest.raises(CheckpointError, match=f"no checkpoints can be saved: .*no permission to write into {tmp_path}"):
    Checkpointer(tmp_path / "steps")
  assert not (tmp_path / "steps").exists()


def test_donated_state_is_saved_as_it_was(tmp_path):
  add_one = jax.jit(lambda x: x + 1, donate_argnums=0)
  x = jnp.zeros((256, 1024))
  with Checkpointer(tmp_path) as checkpointer:
    for step in range(3):
      checkpointer.save(step, {"x": x}, metadata={})
      x = add_one(x)
      x.block_until_ready()
      np.testing.assert_array_equal(checkpointer.restore({"x": x}).state["x"], step)


@pytest.mark.parametrize("devices", [4, 1])
def test_restores_on_other_meshes(tmp_path, devices):
  def sharded(count, spec):
    mesh = jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    return NamedSharding(mesh, spec)

  values = {"w": np.arange(64.0).reshape(8, 8), "b": np.arange(8)}
  specs = {"w": PartitionSpec("data"), "b": PartitionSpec(), "key": PartitionSpec()}
  state = {name: jax.device_put(value, sharded(8, specs[name])) for name, value in values.items()}
  state["key"] = jax.device_put(jax.random.key(1), sharded(8, specs["key"]))
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, state, metadata={})
    target = {
      name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharded(devices, specs[name])) for name, x in state.items()
    }
    restored = checkpointer.restore(target).state
  assert_same(restored, state)
  assert all(restored[name].sharding.is_equivalent_to(target[name].sharding, state[name].ndim) for name in state)


@pytest.mark.parametrize("where", [0, 7, 1 << 20])
def test_flipped_byte_is_named_and_skipped(tmp_path, caplog, where):
  save_steps(tmp_path, 10, 20)
  files = [path for path in (tmp_path / "20").rglob("*") if path.is_file()]
  assert {"manifest.json", "metadata.json", "_METADATA"} <= {path.name for path in files}
  for path in files:
    original = path.read_bytes()
    flip_byte(path, where)
    caplog.clear()
    assert read_metadata(tmp_path) == {"position": 10}
    assert "step 20" in caplog.text
    assert path.relative_to(tmp_path / "20").as_posix() in caplog.text
    path.write_bytes(original)
  assert read_metadata(tmp_path) == {"position": 20}


def test_every_flip_in_the_manifest_is_seen(tmp_path):
  save_steps(tmp_path, 1, 2)
  manifest = tmp_path / "2" / "manifest.json"
  original = manifest.read_bytes()
  for position in range(0, len(original), 23):
    flip_byte(manifest, position)
    assert read_metadata(tmp_path) == {"position": 1}, position
    manifest.write_bytes(original)
  assert read_metadata(tmp_path) == {"position": 2}


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "no manifest", "empty manifest"])
def test_damaged_step_gives_way_to_the_one_before(tmp_path, caplog, damage):
  save_steps(tmp_path, 10, 20)
  victim = max((path for path in (tmp_path / "20").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
  match damage:
    case "flip":
      flip_byte(victim, 50)
    case "truncate":
      victim.write_bytes(victim.read_bytes()[:-1])
    case "delete":
      victim.unlink()
    case "no manifest":
      victim = tmp_path / "20" / "manifest.json"
      victim.unlink()
    case "empty manifest":
      victim = tmp_path / "20" / "manifest.json"
      victim.write_bytes(b"")
  with Checkpointer(tmp_path) as checkpointer:
    with pytest.raises(CheckpointError, match=rf"step 20 .*{victim.name}"):
      checkpointer.restore(abstract(make_state()), 20)
    restored = checkpointer.restore(abstract(make_state()))
    assert restored.step == 10
    assert_same(restored.state, make_state(10))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("step 20" in text and victim.name in text for text in warnings)
    assert (tmp_path / "damaged-20-0").is_dir() == (damage != "no manifest")
    assert (tmp_path / "20").exists() is False
    checkpointer.save(20, make_state(21), metadata={})
    assert_same(checkpointer.restore(abstract(make_state())).state, make_state(21))


def test_reading_changes_nothing(tmp_path):
  save_steps(tmp_path, 10, 20)
  (tmp_path / "20" / "manifest.json").unlink()
  assert load(tmp_path, abstract(make_state())).step == 10
  assert read_metadata(tmp_path) == {"position": 10}
  assert steps_in(tmp_path) == [10, 20]
  with pytest.raises(CheckpointError, match=r"step 20 .*cut short"):
    read_metadata(tmp_path, 20)
  with pytest.raises(CheckpointError, match=r"step 15 .*no such step; the steps there are \[10, 20\]"):
    load(tmp_path, abstract(make_state()), 15)


def test_load_reads_a_part(tmp_path):
  save_steps(tmp_path, 10, 20)
  part = {"params": make_state(10)["params"]}
  restored = load(tmp_path, abstract(part), 10)
  assert (restored.step, restored.metadata) == (10, {"position": 10})
  assert_same(restored.state, part)


def test_mismatch_names_the_first_array(tmp_path):
  save_steps(tmp_path, 1)

  def changed(**changes):
    return abstract(make_state()) | changes

  head = jax.ShapeDtypeStruct((8,), jnp.float32)
  embedding = jax.ShapeDtypeStruct((16, 12), jnp.float32)
  good_embedding = jax.ShapeDtypeStruct((16, 8), jnp.float32)
  good_head = jax.ShapeDtypeStruct((8,), jnp.bfloat16)
  without_step = abstract(make_state())
  del without_step["step"]
  cases = [
    (changed(params={"embed": {"embedding": embedding}, "head": head}),
     r"params/embed/embedding: checkpoint \(16, 8\), model \(16, 12\)"),
    (changed(params={"embed": {"embedding": good_embedding}, "head": head}),
     r"params/head: checkpoint bfloat16\[8\], model float32\[8\]"),
    (changed(params={"embed": {"embedding": good_embedding}, "head": good_head, "tail": head}),
     r"params/tail: checkpoint has none, model float32\[8\]"),
    (without_step, r"step: checkpoint int32\[\], model has none"),
    (changed(key=jax.random.key(0, impl="rbg")), r"key: checkpoint key<fry>\[\], model key<rbg>\[\]"),
  ]  # fmt: skip
  with Checkpointer(tmp_path) as checkpointer:
    for target, message in cases:
      with pytest.raises(ValueError, match="^" + message):
        checkpointer.restore(target)
  with pytest.raises(ValueError, match=r"^params/tail"):
    load(tmp_path, {"params": {"tail": head}})


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 4)])
def test_the_latest_two_and_the_best_stay(tmp_path, mode, best):
  accuracy = {1: 0.5, 2: 0.9, 3: 0.7, 4: 0.1, 5: float("nan"), 6: None, 7: 0.5}
  with Checkpointer(tmp_path, best_metric="accuracy", best_mode=mode) as checkpointer:
    for step, value in accuracy.items():
      metrics = None if value is None else {"accuracy": value, "loss": float("inf")}
      checkpointer.save(step, {"x": jnp.int32(step)}, metadata={}, metrics=metrics)
      if step == 4:  # the best is known from disk, not from this object's memory
        checkpointer.wait()
        checkpointer = Checkpointer(tmp_path, best_metric="accuracy", best_mode=mode)
    checkpointer.close()
    assert steps_in(tmp_path) == [best, 6, 7]
    assert load(tmp_path, {"x": jnp.int32(0)}, best).state["x"] == best


def test_save_commits_without_another_call(tmp_path):
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, make_state(), metadata={})
  deadline = time.monotonic() + 30
  while not (tmp_path / "1" / "manifest.json").exists():
    assert time.monotonic() < deadline
    time.sleep(0.01)
  assert load(tmp_path, abstract(make_state())).step == 1
  checkpointer.close()


def test_save_returns_before_the_commit(tmp_path, monkeypatch):
  may_write = threading.Event()
  real_write = write_bytes_atomic
  monkeypatch.setattr(
    "selfrag_jax.train.checkpoint.write_bytes_atomic", lambda *a: (may_write.wait(30), real_write(*a))
  )
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, make_state(), metadata={})
    assert read_metadata(tmp_path) is None
    may_write.set()
    checkpointer.wait()
    assert read_metadata(tmp_path) == {}


@pytest.mark.parametrize("where", ["orbax", "hash", "manifest"])
@pytest.mark.parametrize("surfaces_at", ["wait", "save", "close"])
def test_full_disk_surfaces_and_spares_earlier_steps(tmp_path, monkeypatch, where, surfaces_at):
  def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")

  checkpointer = Checkpointer(tmp_path, keep_latest=1)
  checkpointer.save(1, make_state(1), metadata={})
  checkpointer.wait()
  with monkeypatch.context() as patch:
    if where == "orbax":
      patch.setattr(checkpointer._orbax._handler, "finalize", full_disk)
    elif where == "hash":
      patch.setattr("selfrag_jax.storage.manifest.file_digest", full_disk)
    else:
      patch.setattr("selfrag_jax.storage.manifest.write_json", full_disk)
    checkpointer.save(2, make_state(2), metadata={})
    call = {
      "wait": checkpointer.wait,
      "save": lambda: checkpointer.save(3, make_state(3), metadata={}),
      "close": checkpointer.close,
    }[surfaces_at]
    with pytest.raises(CheckpointError, match=rf"step 2 to {tmp_path} failed: .*No space left"):
      call()
  assert load(tmp_path, abstract(make_state())).step == 1
  if surfaces_at != "close":  # there is space again: the same step can be saved
    checkpointer.save(2, make_state(2), metadata={})
    checkpointer.close()
    assert_same(load(tmp_path, abstract(make_state())).state, make_state(2))
    assert steps_in(tmp_path) == [2]


WRITES_FAIL = """
import resource, sys, numpy as np
from selfrag_jax.train.checkpoint import Checkpointer, CheckpointError
import jax
state = {"x": jax.numpy.asarray(np.random.default_rng(0).normal(size=(64, 1024)))}
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
with Checkpointer(sys.argv[1], keep_latest=1) as checkpointer:
  checkpointer.save(1, state, metadata={})
  checkpointer.wait()
  resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
  checkpointer.save(2, state, metadata={})
  try:
    checkpointer.wait()
  except CheckpointError as error:
    print(error)
  resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  print(checkpointer.restore(state).step)
  checkpointer.save(2, state, metadata={})
  print(checkpointer.restore(state).step)
"""


def test_array_that_cannot_be_written_surfaces(tmp_path):
  pytest.importorskip("resource")
  done = subprocess.run([sys.executable, "-c", WRITES_FAIL, str(tmp_path)], capture_output=True, text=True, check=True)
  assert done.stdout.startswith(f"saving step 2 to {tmp_path} failed: ")
  assert "File too large" in done.stdout
  assert done.stdout.splitlines()[-2:] == ["1", "2"]


def test_committed_step_is_not_overwritten(tmp_path):
  save_steps(tmp_path, 1)
  with pytest.raises(ValueError, match="step 1 is already saved"):
    save_steps(tmp_path, 1)
  assert_same(restore(tmp_path).state, make_state(1))


@pytest.mark.parametrize(
  ("metadata", "error"), [({"loss": float("nan")}, ValueError), ({"config": object()}, TypeError)]
)
def test_metadata_must_be_json(tmp_path, metadata, error):
  with Checkpointer(tmp_path) as checkpointer, pytest.raises(error, match="JSON"):
    checkpointer.save(1, make_state(), metadata=metadata)
  assert steps_in(tmp_path) == []


def test_other_environment_only_warns(tmp_path, monkeypatch, caplog):
  save_steps(tmp_path, 1)
  assert restore(tmp_path).step == 1
  assert "bit-identical" not in caplog.text
  monkeypatch.setenv("XLA_FLAGS", "--xla_other")
  monkeypatch.setattr(checkpoint.os, "sched_getaffinity", lambda _: set(range(99)), raising=False)
  assert restore(tmp_path).step == 1
  assert "may not be bit-identical: xla_flags was" in caplog.text
  assert "may not be bit-identical: cores was" in caplog.text
  assert "is 99 now" in caplog.text

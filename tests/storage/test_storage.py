"""Atomic writes: a file has its old content or all of its new content."""

import io
import os
import subprocess
import sys

import numpy as np
import pytest

from selfrag_jax.storage.arrays import npz_bytes, read_npz
from selfrag_jax.storage.atomic import absolute, is_local, replace_atomic, write_bytes_atomic, write_json
from selfrag_jax.storage.json_lines import read_json, read_json_object, read_jsonl, refuse_pointer
from selfrag_jax.storage.lock import FolderInUseError, fcntl, lock_folder

# nested deeper than the parser goes, a number longer than Python takes, half a surrogate pair
HOSTILE = [b'{"a": ' + b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b'{"a": "\\uD800"}', b'{"\\udc00x": 1}']


def test_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
  path = tmp_path / "data.json"
  write_json(path, {"step": 1})

  def full_disk(_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "fsync", full_disk)
  with pytest.raises(OSError, match="No space left"):
    write_json(path, {"step": 2})
  assert path.read_text() == '{\n  "step": 1\n}\n'


def test_bytes_are_on_disk_before_the_name(tmp_path, monkeypatch):
  calls = []
  real_fsync, real_replace = os.fsync, os.replace
  monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), real_fsync(fd)))
  monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), real_replace(a, b)))
  write_bytes_atomic(tmp_path / "file", b"\0\xff")
  assert calls == ["fsync", "rename", "fsync"]
  assert [p.name for p in tmp_path.iterdir()] == ["file"]
  assert (tmp_path / "file").read_bytes() == b"\0\xff"


def test_a_block_that_fails_leaves_the_file_and_nothing_beside_it(tmp_path):
  (tmp_path / "mine").write_text("mine")
  (tmp_path / ".file.tmp").symlink_to(tmp_path / "mine")  # of a process that was killed, or laid by somebody
  with replace_atomic(tmp_path / "file") as temporary:
    temporary.write_bytes(b"whole")
    assert not (tmp_path / "file").exists()

  def interrupted():
    with replace_atomic(tmp_path / "file") as temporary:
      temporary.write_bytes(b"half")
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    interrupted()
  assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "whole", "mine": "mine"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_is_strict(tmp_path, value):
  with pytest.raises(ValueError, match="JSON"):
    write_json(tmp_path / "x.json", {"loss": value})


def test_object_storage_is_not_local():
  assert is_local("/runs/mine")
  assert is_local("run")
  assert not is_local("gs://bucket/run")
  assert str(absolute("gs://bucket/run")) == "gs://bucket/run"


def test_lines_are_objects_and_empty_lines_do_not_count(tmp_path):
  path = tmp_path / "a.jsonl"
  # U+2028 ends a line for str.splitlines, not for JSONL
  path.write_bytes('{"a": "x\u2028y"}\r\n\n{"b": [1, "é"]}'.encode())
  assert list(read_jsonl(path)) == [(1, {"a": "x\u2028y"}), (3, {"b": [1, "é"]})]


@pytest.mark.parametrize("line", [b'{"a": ', b'{"a": "\xff"}', b"[1]", b'"a"', b"\xff\xfe{\x00}\x00", *HOSTILE])
def test_a_broken_line_is_named_by_file_and_number(tmp_path, line):
  path = tmp_path / "broken.jsonl"
  path.write_bytes(b'{"fine": 1}\n\n' + line + b'\n{"fine": 2}\n')
  with pytest.raises(ValueError, match=r"broken\.jsonl, line 3: "):
    list(read_jsonl(path))


def test_a_line_without_end_is_no_record(tmp_path, monkeypatch):
  monkeypatch.setattr("selfrag_jax.storage.json_lines.LONGEST_LINE", 1 << 20)
  path = tmp_path / "long.jsonl"
  path.write_bytes(b'{"fine": 1}\n' + b"x" * (1 << 21))
  with pytest.raises(ValueError, match=r"long\.jsonl, line 2: longer than 1 MiB"):
    list(read_jsonl(path))


def test_a_whole_surrogate_pair_is_a_character(tmp_path):
  (tmp_path / "a.jsonl").write_text('{"a": "\\ud83d\\ude42"}')
  assert list(read_jsonl(tmp_path / "a.jsonl")) == [(1, {"a": "🙂"})]
  assert read_json(tmp_path / "a.jsonl", "an object") == {"a": "🙂"}


@pytest.mark.parametrize("content", [b"", b"{", b'"\xff"', *HOSTILE])
def test_a_file_that_is_no_json_is_named_with_what_was_expected(tmp_path, content):
  (tmp_path / "config.json").write_bytes(content)
  with pytest.raises(ValueError, match=r"config\.json: .*; expected the settings$"):
    read_json(tmp_path / "config.json", "the settings")


@pytest.mark.parametrize("content", ["[1]", "3", "null", '"text"', "true"])
def test_another_json_value_than_an_object_is_named(tmp_path, content):
  (tmp_path / "config.json").write_text(content)
  with pytest.raises(ValueError, match=r"config\.json: a JSON object was expected, not .*: the settings$"):
    read_json_object(tmp_path / "config.json", "the settings")


def test_a_pointer_of_git_lfs_is_not_the_file(tmp_path):
  path = tmp_path / "config.json"
  path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
  for read in (refuse_pointer, lambda path: read_json(path, "the settings")):
    with pytest.raises(ValueError, match=r"config\.json is a pointer of git-lfs.*git lfs pull"):
      read(path)


@pytest.mark.skipif(fcntl is None, reason="no locks here")
def test_the_holder_of_a_lock_is_named_once_it_has_written_its_name(tmp_path):
  with open(tmp_path / ".lock", "a+") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    wait = lambda: lock_folder(tmp_path, "wait for it").__enter__()
    with pytest.raises(FolderInUseError, match="in use by another process, which has only just begun; wait for"):
      wait()
    lock.write("pid 7 on host\n")
    lock.flush()
    with pytest.raises(FolderInUseError, match="is in use by pid 7 on host; wait for it"):
      wait()


@pytest.mark.skipif(fcntl is None, reason="no locks here")
def test_a_lock_that_its_holder_deletes_is_held_by_one_alone(tmp_path, monkeypatch):
  """Who opened the file before it was deleted, and locks it afterwards, must not hold it beside who comes next."""
  lock = tmp_path / ".lock"
  flock, first = fcntl.flock, iter([True])

  def deleted_between(file, how):
    if next(first, False):
      lock.unlink()
    flock(file, how)

  monkeypatch.setattr(fcntl, "flock", deleted_between)
  with lock_folder(tmp_path, "wait"), pytest.raises(FolderInUseError), lock_folder(tmp_path, "wait"):
    pass


def test_arrays_are_the_same_from_a_file_and_from_its_bytes(tmp_path):
  arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "none": np.zeros((0, 4), np.int32)}
  data = npz_bytes(arrays)
  (tmp_path / "a.npz").write_bytes(data)
  for found in (read_npz(data), read_npz(tmp_path / "a.npz")):
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
      np.testing.assert_array_equal(found[name], array, strict=True)
  with pytest.raises(ValueError, match="allow_pickle"):
    npz_bytes({"x": np.array([{}])})


def objects():
  np.savez(buffer := io.BytesIO(), x=np.array([{}]))
  return buffer.getvalue()


def one_array():
  np.save(buffer := io.BytesIO(), np.zeros(3))
  return buffer.getvalue()


@pytest.mark.parametrize(
  "content", [b"", b"PK", b"no archive", objects(), one_array(), npz_bytes({"x": np.ones(9)})[:-9]]
)
def test_what_is_no_archive_of_arrays_is_said(tmp_path, content):
  (tmp_path / "a.npz").write_bytes(content)
  for source in (content, tmp_path / "a.npz"):
    with pytest.raises(ValueError, match="it is no archive of arrays"):
      read_npz(source)
  with pytest.raises(FileNotFoundError):
    read_npz(tmp_path / "absent.npz")


def test_it_stands_below_everything_and_imports_no_jax():
  program = """
import pkgutil, importlib, sys
import selfrag_jax.storage as room
for found in pkgutil.iter_modules(room.__path__):
  importlib.import_module(f"{room.__name__}.{found.name}")
print(sorted(name for name in sys.modules if name.startswith(("jax", "tensorflow", "selfrag_jax."))))
"""
  printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
  assert all(name.startswith("selfrag_jax.storage") for name in eval(printed)), printed

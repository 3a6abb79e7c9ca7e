"""Files are whole or as they were."""

import os

import pytest

from selfrag_jax import files
from selfrag_jax.files import read_jsonl


def test_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
  path = tmp_path / "data.json"
  files.write_json(path, {"step": 1})

  def full_disk(_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "fsync", full_disk)
  with pytest.raises(OSError, match="No space left"):
    files.write_json(path, {"step": 2})
  assert path.read_text() == '{\n  "step": 1\n}\n'


def test_bytes_are_on_disk_before_the_name(tmp_path, monkeypatch):
  calls = []
  real_fsync, real_replace = os.fsync, os.replace
  monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), real_fsync(fd)))
  monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), real_replace(a, b)))
  files.write_bytes_atomic(tmp_path / "file", b"\0\xff")
  assert calls == ["fsync", "rename", "fsync"]
  assert [p.name for p in tmp_path.iterdir()] == ["file"]
  assert (tmp_path / "file").read_bytes() == b"\0\xff"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_is_strict(tmp_path, value):
  with pytest.raises(ValueError, match="JSON"):
    files.write_json(tmp_path / "x.json", {"loss": value})


def test_object_storage_is_not_local():
  assert files.is_local("/runs/mine")
  assert files.is_local("run")
  assert not files.is_local("gs://bucket/run")
  assert str(files.absolute("gs://bucket/run")) == "gs://bucket/run"


def test_lines_are_objects_and_empty_lines_do_not_count(tmp_path):
  path = tmp_path / "a.jsonl"
  # U+2028 ends a line for str.splitlines, not for JSONL
  path.write_bytes('{"a": "x\u2028y"}\r\n\n{"b": [1, "é"]}'.encode())
  assert list(read_jsonl(path)) == [(1, {"a": "x\u2028y"}), (3, {"b": [1, "é"]})]


@pytest.mark.parametrize("line", [b'{"a": ', b'{"a": "\xff"}', b"[1]", b'"a"', b"\xff\xfe{\x00}\x00"])
def test_a_broken_line_is_named_by_file_and_number(tmp_path, line):
  path = tmp_path / "broken.jsonl"
  path.write_bytes(b'{"fine": 1}\n\n' + line + b'\n{"fine": 2}\n')
  with pytest.raises(ValueError, match=r"broken\.jsonl, line 3: "):
    list(read_jsonl(path))


def test_a_line_without_end_is_no_record(tmp_path, monkeypatch):
  monkeypatch.setattr(files, "LONGEST_LINE", 1 << 20)
  path = tmp_path / "long.jsonl"
  path.write_bytes(b'{"fine": 1}\n' + b"x" * (1 << 21))
  with pytest.raises(ValueError, match=r"long\.jsonl, line 2: longer than 1 MiB"):
    list(read_jsonl(path))

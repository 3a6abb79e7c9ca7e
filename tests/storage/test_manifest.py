"""Manifests: a damaged, foreign or truncated file is found before it is used."""

import json
import os

import pytest
from etils import epath

from selfrag_jax.storage import manifest
from selfrag_jax.storage.manifest import FormatError, Manifest, ManifestError, digests, first_damage

KIND = Manifest({"generation": int, "files": dict}, format=2)
CHECKED = Manifest({"settings": dict}, name="settings.json", format=1, with_check=True)


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "folder" / "below").mkdir(parents=True)
  (tmp_path / "folder" / "a").write_bytes(b"abc")
  (tmp_path / "folder" / "below" / "b").write_bytes(b"")
  return tmp_path / "folder"


def test_it_says_what_was_written(folder):
  KIND.write(folder, generation=7, files=digests(folder))
  empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # what sha256sum says of no bytes
  abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
  files = {"a": {"sha256": abc, "size": 3}, "below/b": {"sha256": empty, "size": 0}}
  found = KIND.read(folder)
  assert found == {"format": 2, "generation": 7, "files": files}
  assert (folder / "manifest.json").read_text() == json.dumps(found, indent=2, sort_keys=True) + "\n"
  assert digests(folder, ["a"]) == {"a": files["a"]}
  assert first_damage(folder, found["files"]) is None


WHOLE = {"format": 2, "generation": 1, "files": {"a": {"sha256": "0", "size": 3}}}


@pytest.mark.parametrize(
  ("content", "reason"),
  [
    (b"", "Expecting value"),
    (b'{"format": 2', "Expecting"),
    (b"\xff", "decode"),
    (b'{"format": ' + b"[" * 100_000, "nested too deep"),
    (b"[1]", "no JSON object"),
    (b"null", "no JSON object"),
    ({}, "its format is missing, or of another type than int"),
    ({**WHOLE, "format": "2"}, "its format is missing"),
    ({**WHOLE, "format": True}, "its format is missing"),
    ({**WHOLE, "generation": 1.5}, "its generation is missing, or of another type than int"),
    ({**WHOLE, "generation": True}, "its generation is missing"),
    ({"format": 2, "generation": 1}, "its files is missing, or of another type than dict"),
    ({**WHOLE, "files": ["a"]}, "its files is missing"),
    *(
      ({**WHOLE, "files": {"a": digest}}, "it has no size and hash of a")
      for digest in (3, None, {}, {"size": 3}, {"size": "3", "sha256": "0"}, {"size": 3, "sha256": 0})
    ),
  ],
)
def test_what_no_manifest_says_is_damage_with_a_reason(folder, content, reason):
  (folder / "manifest.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
  with pytest.raises(ManifestError, match=reason):
    KIND.read(folder)


def test_a_folder_in_its_place_is_damage_and_nothing_in_its_place_is_not(folder):
  with pytest.raises(FileNotFoundError):
    KIND.read(folder)
  with pytest.raises(NotADirectoryError):
    KIND.read(folder / "a")
  (folder / "manifest.json").mkdir()
  with pytest.raises(ManifestError, match="it is a folder"):
    KIND.read(folder)


def test_another_format_is_told_from_damage(folder):
  (folder / "manifest.json").write_text('{"format": 3, "all": "else"}')
  with pytest.raises(FormatError) as error:
    KIND.read(folder)
  assert error.value.found == 3


def test_with_a_check_every_changed_byte_is_seen(folder):
  CHECKED.write(folder, settings={"width": 3, "name": "é"})
  path, settings = folder / "settings.json", CHECKED.read(folder)["settings"]
  whole = path.read_bytes()
  assert settings == {"width": 3, "name": "é"}
  for i in range(len(whole)):
    path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x55]) + whole[i + 1 :])
    with pytest.raises(ManifestError):
      CHECKED.read(folder)
  path.write_text(json.dumps({"format": 1, "settings": {}}))
  with pytest.raises(ManifestError, match="its check does not fit"):
    CHECKED.read(folder)


def flip(path):
  path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def replace_by_folder(path):
  path.unlink()
  path.mkdir()


@pytest.mark.parametrize(
  ("hurt", "exists"),
  [
    (flip, True),
    (lambda path: path.write_bytes(b"ab"), True),
    (lambda path: path.write_bytes(b""), True),
    (lambda path: path.write_bytes(b"abcd"), True),
    (lambda path: path.unlink(), False),
    (replace_by_folder, False),
  ],
)
def test_a_file_that_is_not_as_listed_is_named(folder, hurt, exists):
  files = digests(folder)
  hurt(folder / "a")
  assert first_damage(folder, files) == (folder / "a", exists)
  assert first_damage(folder, {"below/b": files["below/b"]}) is None  # the others are whole
  assert first_damage(folder, {"below/b": None}) == (folder / "below" / "b", True)  # nothing vouches for it


@pytest.mark.parametrize(
  "name", ["../secret", "below/../../secret", "..", "/etc/hostname", "..\\secret", "C:secret", "\\\\host\\secret"]
)
def test_a_name_that_leaves_the_folder_is_refused_though_its_hash_is_right(folder, name):
  (folder.parent / "secret").write_bytes(b"abc")
  KIND.write(folder, generation=1, files={"a": digests(folder)["a"], name: digests(folder)["a"]})
  with pytest.raises(ManifestError, match=r"it names .*, which lies outside of the folder"):
    KIND.read(folder)


@pytest.mark.parametrize("name", [".", "below", "a\0", "a/b", "x" * 300])
def test_a_name_that_no_file_has_is_missing(folder, name):
  assert first_damage(folder, {name: digests(folder)["a"]}) == (epath.Path(folder) / name, False)


def test_killed_between_the_files_and_the_manifest_the_files_can_be_used(folder, monkeypatch):
  """The folder is not whole, nothing in it is lost, and to publish it takes the manifest alone."""

  def killed(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(manifest, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
      KIND.write(folder, generation=1, files=digests(folder))
  with pytest.raises(FileNotFoundError):
    KIND.read(folder)
  before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
  KIND.write(folder, generation=1, files=digests(folder))
  assert first_damage(folder, KIND.read(folder)["files"]) is None
  assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_a_manifest_that_cannot_be_written_leaves_the_one_before(folder, monkeypatch):
  KIND.write(folder, generation=1, files={})

  def full_disk(*_):
    raise OSError(28, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
      KIND.write(folder, generation=2, files=digests(folder))
  assert KIND.read(folder)["generation"] == 1

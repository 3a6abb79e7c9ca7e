"""The files of a folder: each is read, or counted and named; none is lost silently, and none hangs the build."""

import os
from pathlib import Path

import pytest

from selfrag_jax.retrieval.listing import LeftOut, list_sources


def names(folder, left_out=None):
  return list(list_sources([folder], left_out or LeftOut()))


def write(folder, *files):
  for name in files:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("text")
  return folder


def lock_away(monkeypatch, hidden):
  """Let the system refuse to list a folder, as it does without permission; the tests may run as root."""
  scandir = os.scandir

  def refusing(path="."):
    if not isinstance(path, int) and Path(path) == hidden:
      raise PermissionError(13, "Permission denied", str(path))
    return scandir(path)

  monkeypatch.setattr(os, "scandir", refusing)


def test_folders_are_walked_in_order_without_hidden_files(tmp_path):
  write(tmp_path, "b.txt", "a/z.md", "a/b/c.HTML", "a-b.txt", ".git/x.txt", "a/.hidden.txt", "image.png")
  assert names(tmp_path) == ["a/b/c.HTML", "a/z.md", "a-b.txt", "b.txt"]
  assert names(tmp_path / "b.txt") == ["b.txt"]
  with pytest.raises(ValueError, match=r"image\.png ends in '\.png'; documents end in \.jsonl"):
    names(tmp_path / "image.png")
  with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
    names(tmp_path / "nowhere")


def test_files_of_other_types_are_counted_by_suffix(tmp_path):
  write(tmp_path, "a.txt", "b.pdf", "sub/c.PDF", "d.docx", "Makefile", ".hidden.txt")
  left_out = LeftOut()
  assert names(tmp_path, left_out) == ["a.txt"]
  assert left_out.kinds == {".pdf": 2, ".docx": 1, "no suffix": 1, "hidden": 1}
  (tmp_path / "a.txt").unlink()
  with pytest.raises(FileNotFoundError, match=r"holds no documents, but \.pdf 2, "):
    names(tmp_path)


def test_a_folder_that_cannot_be_listed_is_an_error_that_names_it(tmp_path, monkeypatch):
  write(tmp_path, "a.txt", "closed/b.txt")
  lock_away(monkeypatch, tmp_path / "closed")
  with pytest.raises(OSError, match=r"closed cannot be read: Permission denied"):
    names(tmp_path)
  left_out = LeftOut(skip_bad=True)
  assert names(tmp_path, left_out) == ["a.txt"]
  assert left_out.bad == 1
  assert "closed cannot be read" in left_out.problems[0]
  assert left_out.hides("closed/deep/b.txt")
  assert not left_out.hides("a.txt")
  with pytest.raises(OSError, match="closed cannot be read"):
    names(tmp_path / "closed", LeftOut(skip_bad=True))


def test_a_link_out_of_the_folder_is_refused(tmp_path):
  write(tmp_path, "secret.txt", "outside/a.txt")
  inside = write(tmp_path / "inside", "fine.txt", "sub/b.txt")
  (inside / "alias.txt").symlink_to(inside / "fine.txt")
  (inside / "again").symlink_to(inside / "sub")
  left_out = LeftOut()
  assert names(inside, left_out) == ["alias.txt", "fine.txt", "sub/b.txt"]
  assert left_out.kinds == {"link to a folder": 1}
  for name, target in (("leak.txt", "secret.txt"), ("leak", "outside")):
    (inside / name).symlink_to(tmp_path / target)
    with pytest.raises(ValueError, match=rf"{name} is a link that leads out of"):
      names(inside)
    (inside / name).unlink()


@pytest.mark.parametrize("target", ["gone.txt", "loop.txt"])
def test_a_link_that_leads_nowhere_is_named(tmp_path, target):
  write(tmp_path, "a.txt")
  (tmp_path / "loop.txt").symlink_to(tmp_path / target)
  with pytest.raises(OSError, match=r"loop\.txt cannot be read"):
    names(tmp_path)
  assert names(tmp_path, LeftOut(skip_bad=True)) == ["a.txt"]


def test_links_in_a_circle_end(tmp_path):
  write(tmp_path, "a/b.txt")
  (tmp_path / "a" / "up").symlink_to(tmp_path)
  assert names(tmp_path) == ["a/b.txt"]


def test_pipes_do_not_hang(tmp_path):
  write(tmp_path, "a.txt")
  os.mkfifo(tmp_path / "pipe.txt")
  left_out = LeftOut()
  assert names(tmp_path, left_out) == ["a.txt"]
  assert left_out.kinds == {"pipe, socket or device": 1}
  with pytest.raises(ValueError, match=r"pipe\.txt is no regular file"):
    names(tmp_path / "pipe.txt")


def test_a_name_that_is_not_utf8_is_left_out(tmp_path):
  write(tmp_path, "a.txt")
  Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl")).write_text('{"text": "x"}')
  left_out = LeftOut()
  assert names(tmp_path, left_out) == ["a.txt"]
  assert left_out.problems == ["the name of 'caf\\udce9.jsonl' is not UTF-8; rename the file"]

"""The output of the retrieval commands: any terminal can show it, and any program can read it."""

import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from selfrag_jax.retrieval.__main__ import main
from selfrag_jax.retrieval.base import create
from selfrag_jax.retrieval.document import Document

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def kb(tmp_path):
  made = create("simple")
  made.add_documents([Document("é\x9b2J", "Größe", "harbor 東京\u202e", {"by": "\x9b\x7f"})])
  made.save(tmp_path / "kb")
  return str(tmp_path / "kb")


def test_json_holds_no_character_that_a_terminal_obeys(kb, capsys):
  for command in (("search", "harbor"), ("inspect",), ("validate",)):
    assert main([*command, "--knowledge_base", kb, "--json"]) == 0
    printed = capsys.readouterr().out
    assert not [c for c in printed.rstrip("\n") if unicodedata.category(c) in ("Cc", "Cf")]
    json.loads(printed)
  assert main(["search", "harbor", "--knowledge_base", kb, "--json"]) == 0
  [document] = json.loads(capsys.readouterr().out)[0]["documents"]
  assert (document["id"], document["content"]) == ("é\x9b2J", "harbor 東京\u202e")


def test_a_terminal_that_is_not_utf8_shows_escapes(kb):
  for command, shown in ((["search", "harbor"], r"harbor \u6771\u4eac"), (["inspect"], r"\xe9\x9b2J")):
    done = subprocess.run(
      [sys.executable, "-m", "selfrag_jax.retrieval", *command, "--knowledge_base", kb],
      cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert shown in done.stdout


@pytest.mark.parametrize("given", ["many", "2.5", ""])
def test_a_number_that_is_none_is_named_without_the_names_of_functions(capsys, given):
  with pytest.raises(SystemExit):
    main(["search", "q", "--knowledge_base", "kb", "--top_k", given])
  assert f"argument --top_k: invalid: {given!r} is no whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
  "kept", ["{}", "[]", '{"type": "simple", "settings": 3, "build": {}}', '{"type": "simple"}', "x"]
)
def test_a_knowledge_base_without_its_settings_is_named(kb, capsys, kept, monkeypatch):
  data = Path(kb) / "data-1" / "retriever.json"
  data.write_text(kept)
  monkeypatch.setattr("selfrag_jax.storage.manifest.file_digest", lambda path: stated(kb, path))
  assert main(["search", "harbor", "--knowledge_base", kb]) == 1
  printed = capsys.readouterr().err
  assert "retriever.json is not what a save writes" in printed
  assert "build" in printed
  assert printed.count("\n") == 1


def stated(kb, path):
  """Return the digest that the manifest has of a file: as if it had been written so."""
  return json.loads((Path(kb) / "manifest.json").read_text())["files"][path.name]

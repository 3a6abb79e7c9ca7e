"""The retrieval commands as a user types them: output, exit codes, and one line for every mistake."""

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from selfrag_jax.retrieval.__main__ import main
from selfrag_jax.retrieval.base import create, load
from selfrag_jax.retrieval.beir import EXAMPLE
from tests.launching import launch

ROOT = Path(__file__).resolve().parents[2]
BUILD = ("--documents", EXAMPLE / "corpus.jsonl", "--model", "token-bag", "--quiet")


@pytest.fixture
def kb(tmp_path):
  assert run(*BUILD, "--output", tmp_path / "kb") == 0
  return tmp_path / "kb"


def run(*arguments):
  return main([str(argument) for argument in arguments])


def test_build_search_and_inspect(kb, tmp_path, capsys):
  assert run(*BUILD, "--output", tmp_path / "again") == 0
  assert "documents 254, files 1, read 254" in capsys.readouterr().out
  queries = "capital of Norway", "Which river runs through Paris?"
  assert run("search", "--knowledge_base", kb, *queries, "--top_k", 2) == 0
  shown = capsys.readouterr().out
  assert "capital of Norway\n  1. 0." in shown
  assert "capital-oslo  Oslo" in shown
  assert "The Seine runs through it." in shown
  assert run("search", "--knowledge_base", kb, "capital", "--where", "title=Oslo", "--json") == 0
  [found] = json.loads(capsys.readouterr().out)
  assert [document["id"] for document in found["documents"]] == ["capital-oslo"]
  assert run("inspect", "--knowledge_base", kb, "--json") == 0
  described = json.loads(capsys.readouterr().out)
  assert (described["type"], described["documents"], described["added_by_hand"]) == ("dense", 254, 0)
  assert described["embeddings"] == [{"model": "token-bag", "shape": [254, 256]}]
  assert run("inspect", "--knowledge_base", kb) == 0
  assert "country-norway  Norway: Norway is a country" in capsys.readouterr().out


def test_sync_builds_as_before(kb, tmp_path, capsys):
  assert run("build", *BUILD, "--output", tmp_path / "cut", "--type", "dense", "--chunk_size", 8) == 0
  parts = len(load(tmp_path / "cut"))
  assert run("build", *BUILD[:2], "--output", tmp_path / "cut", "--sync", "--quiet") == 0
  assert len(load(tmp_path / "cut")) == parts > 254
  assert run("build", *BUILD[:2], "--output", kb, "--sync", "--type", "bm25", "--quiet") == 1
  assert "is dense, not bm25" in capsys.readouterr().err
  assert load(kb).name == "dense"


def test_filters_compare_and_name_their_mistakes(tmp_path, capsys):
  source = tmp_path / "source.jsonl"
  lines = ({"id": f"y{year}", "text": f"a ship of {year}", "year": year} for year in (1999, 2019, 2020, 2021))
  source.write_text("\n".join(map(json.dumps, lines)))
  kb = tmp_path / "kb"
  assert run("--documents", source, "--output", kb, "--type", "bm25", "--quiet") == 0
  for where, years in (
    (["year>=2020"], {"y2020", "y2021"}),
    (["year>2019"], {"y2020", "y2021"}),
    (["year>1999", "year<2021"], {"y2019", "y2020"}),
    (["source~source.js", "year=[1999,2021]"], {"y1999", "y2021"}),
  ):
    capsys.readouterr()
    flags = [flag for each in where for flag in ("--where", each)]
    assert run("search", "--knowledge_base", kb, "ship", "--json", *flags) == 0
    assert {document["id"] for document in json.loads(capsys.readouterr().out)[0]["documents"]} == years
  for command in (("search", "--knowledge_base", kb, "ship"), ("delete", "--knowledge_base", kb)):
    for where, message in (
      ("yaer>=2020", "asks for 'yaer', which the metadata lacks; did you mean year?"),
      ("year!=2020", "--where year!=2020: write NAME=VALUE, or >= > <= < and ~"),
      ("year>=abc", "no 'year' can be compared with 'abc' by $gte: they are like 1999"),
    ):
      assert run(*command, "--where", where) == 1
      shown = capsys.readouterr().err
      assert message in shown
      assert shown.count("\n") == 1
  assert run("delete", "--knowledge_base", kb, "--where", "year<2020") == 0
  assert len(load(kb)) == 2


def test_a_filter_named_twice_is_refused(kb, capsys):
  assert run("delete", "--knowledge_base", kb, "--where", "title=Oslo", "--where", "title=Paris") == 1
  assert "title is given twice" in capsys.readouterr().err
  assert len(load(kb)) == 254


def test_an_emptied_knowledge_base_is_valid(kb, capsys):
  ids = [argument for document in load(kb).documents for argument in ("--id", document.id)]
  assert run("delete", "--knowledge_base", kb, *ids) == 0
  assert run("validate", "--knowledge_base", kb) == 0


def test_a_damaged_knowledge_base_can_be_built_again(kb, capsys):
  (kb / "data-1" / "retriever.json").write_text("{}")
  assert run(*BUILD, "--output", kb, "--sync") == 1
  assert "build" in capsys.readouterr().err
  assert run(*BUILD, "--output", kb) == 0
  assert len(load(kb)) == 254
  assert run(*BUILD, "--output", kb) == 1
  assert "holds a knowledge base already" in capsys.readouterr().err


def test_a_folder_of_other_files_is_left_alone(tmp_path, capsys):
  folder = tmp_path / "project"
  (folder / "data-raw").mkdir(parents=True)
  (folder / "data-7").mkdir()
  (folder / "data-raw" / "a.txt").write_text("mine")
  assert run("--documents", folder / "data-raw", "--output", folder, "--type", "simple", "--quiet") == 1
  assert "holds other files, such as data-raw" in capsys.readouterr().err
  assert sorted(path.name for path in folder.iterdir()) == ["data-7", "data-raw"]


def test_add_delete_and_merge(kb, tmp_path, capsys):
  (tmp_path / "more.jsonl").write_text('{"id": "x", "text": "Atlantis has no capital.", "year": 2020}\n')
  assert run("add", "--knowledge_base", kb, "--documents", tmp_path / "more.jsonl") == 0
  assert load(kb).retrieve("Atlantis", 1)[0].id == "x"
  assert run("merge", kb, kb, "--output", tmp_path / "merged") == 0
  assert len(load(tmp_path / "merged")) == 255
  assert run("delete", "--knowledge_base", kb, "--where", "year=2020") == 0
  assert run("delete", "--knowledge_base", kb, "--id", "capital-oslo", "--id", "capital-paris") == 0
  assert len(load(kb)) == 252
  capsys.readouterr()
  assert run("delete", "--knowledge_base", kb, "--id", "capital-oslo") == 1
  assert capsys.readouterr().err == "error: no document has the id 'capital-oslo'\n"


def test_validate_finds_another_encoder(kb, capsys, monkeypatch):
  assert run("validate", "--knowledge_base", kb) == 0
  assert "254 documents in 4 files, all as written" in capsys.readouterr().out
  from selfrag_jax.encoders import token_bag

  monkeypatch.setattr(token_bag, "words", lambda text: text.upper().split())
  assert run("validate", "--knowledge_base", kb) == 1
  assert "token-bag gives other vectors for 32 of 32 documents" in capsys.readouterr().out


def damage(kb, name, data):
  (kb / name).write_bytes(data)


@pytest.mark.parametrize(
  ("spoil", "message"),
  [
    (lambda kb: damage(kb, "index.pkl", pickle.dumps({})), "index.pkl is a pickle, which can run code"),
    (lambda kb: damage(kb, "manifest.json", b'{"format": 2}'), "has format 2, this version reads 1"),
    (lambda kb: damage(kb, "data-1/embeddings-00000.npy", b"x"), "embeddings-00000.npy is not what was written"),
    (lambda kb: (kb / "data-1" / "retriever.json").unlink(), "retriever.json is missing"),
    (lambda kb: (kb / "manifest.json").unlink(), "has no manifest.json: it is no knowledge base"),
  ],
)
@pytest.mark.parametrize("command", ["search", "inspect", "validate"])
def test_a_damaged_folder_is_one_line(kb, capsys, command, spoil, message):
  spoil(kb)
  capsys.readouterr()
  assert run(command, "--knowledge_base", kb, *(["query"] if command == "search" else [])) == 1
  printed = capsys.readouterr()
  assert message in printed.err
  assert printed.err.count("\n") == 1


@pytest.mark.parametrize("name", ["nowhere", "file.txt", "folder"])
@pytest.mark.parametrize("command", ["search q", "inspect", "validate", "delete --id x", "add --documents a.jsonl"])
def test_what_is_no_knowledge_base_stays_as_it_is(tmp_path, monkeypatch, capsys, name, command):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "folder").mkdir()
  for file in ("folder/mine.txt", "file.txt", "a.jsonl"):
    (tmp_path / file).write_text('{"text": "x"}')
  before = sorted(tmp_path.rglob("*"))
  assert run(*command.split(), "--knowledge_base", name) == 1
  printed = capsys.readouterr().err
  assert f"{name} has no manifest.json: it is no knowledge base" in printed
  assert printed.count("\n") == 1
  assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
  ("arguments", "code", "message"),
  [
    (["search", "q", "--top_k", "0"], 2, "argument --top_k: 0 must be at least 1"),
    (["search", "q", "--top_k", "-1"], 2, "argument --top_k: -1 must be at least 1"),
    (["search", "q", "--top_k", "many"], 2, "argument --top_k: invalid"),
    (["search", ""], 1, "error: a query is empty"),
    (["search", "q", "  "], 1, "error: a query is empty"),
    (["validate", "--sample", "-3"], 2, "argument --sample: -3 must be at least 1"),
    (["add", "--documents", "nowhere.jsonl"], 1, "error: nowhere.jsonl does not exist"),
    (["delete"], 1, "error: delete takes ids or where"),
    (["search", "q", "--topk", "3"], 2, "unrecognized arguments: --topk"),
  ],
)
def test_what_a_knowledge_base_cannot_do_is_said_in_words(empty_kb, capsys, arguments, code, message):
  try:
    ended = run(*arguments, "--knowledge_base", empty_kb)
  except SystemExit as stopped:
    ended = stopped.code
  printed = capsys.readouterr().err
  assert ended == code
  assert message in printed
  assert "Traceback" not in printed


@pytest.fixture(scope="module")
def empty_kb(tmp_path_factory):
  folder = tmp_path_factory.mktemp("kb")
  create("simple").save(folder)
  return folder


def test_as_many_as_there_are_is_the_most_that_is_found(kb, capsys):
  capsys.readouterr()
  assert run("search", "--knowledge_base", kb, "capital", "--top_k", 10**9, "--json") == 0
  assert len(json.loads(capsys.readouterr().out)[0]["documents"]) == 254


def test_an_upsert_replaces_and_an_add_says_so(tmp_path, kb, capsys):
  (tmp_path / "new.jsonl").write_text('{"id": "capital-oslo", "text": "Oslo has a new opera."}\n')
  assert run("add", "--knowledge_base", kb, "--documents", tmp_path / "new.jsonl") == 1
  assert "line 1: the id 'capital-oslo' is that of a document of the knowledge base, which only upsert (--upsert)" in (
    capsys.readouterr().err
  )
  assert run("add", "--knowledge_base", kb, "--documents", tmp_path / "new.jsonl", "--upsert") == 0
  assert "documents 254, added 1, files 1, read 1" in capsys.readouterr().out
  assert load(kb).get("capital-oslo").content == "Oslo has a new opera."


def test_escape_sequences_of_documents_do_not_reach_the_terminal(tmp_path, capsys):
  (tmp_path / "a.jsonl").write_text(json.dumps({"id": "a\x1b[31m\n", "title": "t", "text": "zebra"}) + "\n")
  assert run("--documents", tmp_path / "a.jsonl", "--output", tmp_path / "kb", "--type", "simple", "--quiet") == 0
  assert run("search", "--knowledge_base", tmp_path / "kb", "zebra\x1b[2J") == 0
  assert run("inspect", "--knowledge_base", tmp_path / "kb") == 0
  assert run("delete", "--knowledge_base", tmp_path / "kb", "--id", "\x1b[2J") == 1
  printed = "".join(capsys.readouterr())
  assert "\x1b" not in printed
  assert "a\\x1b[31m" in printed


def test_an_output_that_cannot_be_is_said_before_anything_is_read(tmp_path, kb, capsys, monkeypatch):
  (tmp_path / "file").write_text("mine")
  monkeypatch.setattr("selfrag_jax.retrieval.knowledge_base.read_chunks", None)
  monkeypatch.setattr("selfrag_jax.retrieval.knowledge_base.load", None)
  for command in (BUILD, ("merge", kb, kb)):
    for output in ("file", "file/kb"):
      assert run(*command, "--output", tmp_path / output) == 1
      assert "is a file or a broken link; give another one" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--documents", "nowhere", "--output", "x"], "nowhere does not exist"),
    (["--documents", EXAMPLE, "--output", "x", "--chunk_size", "-5"], "size = -5 must be at least 1"),
    (
      ["--documents", EXAMPLE, "--output", "x", "--chunk_overlap", "500"],
      "size = 180 must be at least 1, overlap = 500",
    ),
    (["--documents", EXAMPLE, "--output", "x", "--chunk_size", "0", "--chunk_overlap", "-1"], "overlap = -1"),
    (["--documents", EXAMPLE, "--output", "x", "--near_duplicates", "nan"], "must be in (0, 1]"),
    (["--documents", EXAMPLE, "--output", "x", "--type", "dens"], "no retriever is called 'dens'; one of bm25, dense"),
    (
      ["--documents", EXAMPLE, "--output", "x", "--type", "bm25", "--model", "token-bag"],
      "--model names the encoder of",
    ),
    (["--documents", EXAMPLE, "--output", "x", "--settings", "{k1: 1}"], "--settings {k1: 1}: Expecting property name"),
    (["--documents", EXAMPLE, "--output", "x", "--model", "nowhere"], "nowhere does not exist; give a folder"),
    (
      ["--documents", EXAMPLE, "--output", "x", "--plugin", "no_such_module"],
      "plugin no_such_module was not found",
    ),
    (["--documents", EXAMPLE, "--output", "x", "--near_duplicates", "2"], "must be in (0, 1]"),
    (["--documents", EXAMPLE, "--output", "x", "--type", "bm25", "--settings", '{"k2": 1}'], "the settings of bm25"),
    (
      ["--documents", EXAMPLE, "--output", "x", "--type", "bm25", "--settings", '{"k1": "x"}'],
      "the setting k1 of bm25 is 'x'; it must be a finite number",
    ),
  ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, arguments, message):
  monkeypatch.chdir(tmp_path)
  assert run(*arguments, "--quiet") == 1
  printed = capsys.readouterr().err
  assert message in printed
  assert printed.count("\n") == 1
  assert not (tmp_path / "x" / "manifest.json").exists()


def test_wrong_flags_are_wrong_usage(capsys):
  with pytest.raises(SystemExit) as stopped:
    run("--documents", "x", "--outptu", "y")
  assert stopped.value.code == 2
  with pytest.raises(SystemExit) as stopped:
    run("--help")
  assert stopped.value.code == 0
  assert "search" in capsys.readouterr().out


def test_a_retriever_of_the_user_works_in_the_commands(tmp_path):
  """The whole program, with a plugin in the folder where it is run."""
  (tmp_path / "my_retriever.py").write_text(
    "from selfrag_jax.retrieval.base import BaseRetriever, Hits, register\n"
    "@register('longest')\n"
    "class Longest(BaseRetriever):\n"
    "  def _add(self, documents): pass\n"
    "  def _delete(self, ids): pass\n"
    "  def _search(self, queries, top_k, where):\n"
    "    best = sorted(self.documents, key=lambda d: -len(d.content))[:top_k]\n"
    "    ids, scores = [d.id for d in best], [float(len(d.content)) for d in best]\n"
    "    return Hits([ids for _ in queries], [scores for _ in queries])\n"
  )
  (tmp_path / "a.jsonl").write_text('{"id": "short", "text": "a"}\n{"id": "long", "text": "a b c"}\n')
  call = lambda *arguments: launch("-m selfrag_jax.retrieval", *arguments, cwd=tmp_path)
  built = call("--documents", "a.jsonl", "--output", "kb", "--type", "longest", "--plugin", "my_retriever")
  assert built.returncode == 0, built.stderr
  found = call("search", "--knowledge_base", "kb", "x", "--plugin", "my_retriever")
  assert "1. 5.0000  long" in found.stdout
  unknown = call("search", "--knowledge_base", "kb", "x")
  assert unknown.returncode == 1
  assert "no retriever is called 'longest'" in unknown.stderr


def test_the_launcher_builds_the_same(tmp_path, kb):
  call = lambda *arguments: launch("launch/build_kb.py", *arguments, cwd=tmp_path)
  built = call(f"--documents={EXAMPLE / 'corpus.jsonl'}", "--output=other", "--model=token-bag")
  assert built.returncode == 0, built.stderr
  digests = [json.loads((folder / "manifest.json").read_text())["files"] for folder in (kb, tmp_path / "other")]
  assert digests[0] == digests[1]
  wrong = call("--documents=x", "--outptu=y")
  assert wrong.returncode == 1
  assert "outptu" in wrong.stderr
  again = call(f"--documents={EXAMPLE / 'corpus.jsonl'}", "--output=other", "--model=token-bag")
  assert again.returncode == 1
  assert again.stderr.strip().endswith("--sync brings it up to date, or give another folder")


def test_two_hosts_build_one(tmp_path):
  """Two real processes with a coordinator between them: each embeds blocks of its own, one publishes."""
  documents = tmp_path / "many.jsonl"
  rows = ({"id": str(i), "text": f"document {i} about town number{i % 37}"} for i in range(2500))
  documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}

  def start(output, **variables):
    command = [sys.executable, ROOT / "launch" / "build_kb.py", f"--documents={documents}", f"--output={output}"]
    return subprocess.Popen(
      [*command, "--model=token-bag"], cwd=tmp_path, env={**environment, **variables}, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip

  hosts = [
    start("two", JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(rank)) for rank in range(2)
  ]
  printed = [host.communicate(timeout=240) for host in hosts]
  assert [host.returncode for host in hosts] == [0, 0], printed
  embedded = [int(out.rsplit("embedded ", 1)[1].replace(",", "")) for out, _ in printed]
  assert embedded == [2500, 2500]  # of both together: each text once
  alone = start("one")
  assert alone.wait(timeout=240) == 0
  digests = [json.loads((tmp_path / name / "manifest.json").read_text())["files"] for name in ("one", "two")]
  assert digests[0] == digests[1]

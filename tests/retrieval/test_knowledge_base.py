"""Knowledge bases: a killed build resumes, a changed one embeds only new texts, and the old one stays usable."""

import json
import os
import signal
import subprocess
import sys
import time
from typing import ClassVar

import numpy as np
import pytest

from selfrag_jax.encoders import cached as embedding
from selfrag_jax.encoders.base import Encoder
from selfrag_jax.encoders.cached import BlockEncoder
from selfrag_jax.retrieval import knowledge_base
from selfrag_jax.retrieval.base import create, load
from selfrag_jax.retrieval.dense import DenseRetriever
from selfrag_jax.retrieval.document import FILE, Document
from selfrag_jax.retrieval.folder import UNFINISHED
from selfrag_jax.retrieval.knowledge_base import merge_knowledge_bases, prepare_knowledge_base
from selfrag_jax.retrieval.manager import RetrievalManager
from selfrag_jax.retrieval.reading import Chunking
from selfrag_jax.storage.generation import FolderError

ANIMALS = ("zebra", "otter", "heron", "badger", "lynx", "marten", "stoat")
WORDS = (*ANIMALS, "river", "forest", "marsh", "desert", "harbor", "glacier", "village")
BAG = {"model_name": "token-bag", "backend": "numpy"}


def write_files(folder, n=6, seed=0):
  rng = np.random.default_rng(seed)
  folder.mkdir(exist_ok=True)
  for i in range(n):
    (folder / f"{i}.txt").write_text(" ".join(rng.choice(WORDS, 12)))
  return folder


def prepare(documents, output, **options):
  return prepare_knowledge_base(documents, output, "dense", **{"settings": BAG, "progress": False, **options})


def digests(folder):
  return {name: x["sha256"] for name, x in json.loads((folder / "manifest.json").read_text())["files"].items()}


class Letters(Encoder):
  """Embed texts by how often each letter is in them; what it was asked is kept."""

  fingerprint = "letters"

  def __init__(self):
    self.asked = []

  def __call__(self, texts):
    self.asked += texts
    return np.array([[text.count(chr(97 + i)) for i in range(26)] for text in texts], np.float32)


@pytest.fixture
def own_encoder(monkeypatch):
  letters = Letters()
  monkeypatch.setattr("selfrag_jax.retrieval.dense.load_encoder", lambda name: letters)
  return letters


def test_files_are_read_cut_and_found(tmp_path):
  source = write_files(tmp_path / "source")
  story = [f"Part {animal} of the walrus story goes on." for animal in ANIMALS]
  (source / "long.md").write_text("\n\n".join(["# Walrus", *story]))
  (source / "copy.txt").write_text((source / "0.txt").read_text().upper())
  report = prepare(source, tmp_path / "kb", chunking=Chunking(16))
  retriever = load(tmp_path / "kb")
  assert report == {
    "documents": len(retriever), "files": 8, "read": 8, "chunks": 11, "duplicates": 0, "bad": 0,
    "left_out": {}, "problems": [], "embedded": len(retriever),
  }  # fmt: skip
  parts = [document for document in retriever.documents if document.metadata[FILE] == "long.md"]
  assert [document.id for document in parts] == [f"long.md#{i}" for i in range(len(parts))]
  assert all(len(document.content.split()) <= 16 for document in parts)
  assert {document.title for document in parts} == {"Walrus"}
  assert "Part stoat" in parts[-1].content
  assert any("lynx of" in d.content for d in retriever.retrieve("part lynx of the walrus story goes on", 2))
  assert not (tmp_path / "kb" / UNFINISHED).exists()


def test_duplicates_are_left_out(tmp_path):
  source = tmp_path / "a.jsonl"
  rows = [{"id": "1", "title": "T", "text": "the harbor town"}, {"id": "2", "title": "t", "text": "The  harbor town"}]
  source.write_text("".join(json.dumps(row) + "\n" for row in rows))
  assert prepare(source, tmp_path / "kb")["duplicates"] == 1
  assert [document.id for document in load(tmp_path / "kb").documents] == ["1"]


@pytest.mark.parametrize("kind", ["simple", "bm25", "dense", "hybrid"])
def test_every_kind_is_the_retriever_over_the_same_documents(tmp_path, kind):
  source = write_files(tmp_path / "source")
  settings = {"dense": BAG, "hybrid": {"settings": [{}, BAG]}}.get(kind, {})
  prepare_knowledge_base(source, tmp_path / "kb", kind, settings=settings, progress=False)
  built, plain = load(tmp_path / "kb"), create(kind, **settings)
  plain.add_documents(built.documents)
  for query in ("zebra forest", "glacier"):
    found = [(d.id, d.score) for d in built.retrieve(query)]
    assert found == [(d.id, d.score) for d in plain.retrieve(query)]
    assert found


def test_a_build_goes_on_where_it_was(tmp_path, monkeypatch, own_encoder):
  monkeypatch.setattr(embedding, "BLOCK", 2)
  source = write_files(tmp_path / "source")
  prepare(source, tmp_path / "whole")
  whole, own_encoder.asked = list(own_encoder.asked), []
  write = embedding._write

  def killed(path, rows):
    if len(own_encoder.asked) > 4:
      raise KeyboardInterrupt
    write(path, rows)

  monkeypatch.setattr(embedding, "_write", killed)
  with pytest.raises(KeyboardInterrupt):
    prepare(source, tmp_path / "kb")
  assert not (tmp_path / "kb" / "manifest.json").exists()
  monkeypatch.setattr(embedding, "_write", write)
  own_encoder.asked = []
  assert prepare(source, tmp_path / "kb")["embedded"] == 2
  assert own_encoder.asked == whole[4:]
  assert digests(tmp_path / "kb") == digests(tmp_path / "whole")


def test_kill_9_and_resume_give_the_same_files(tmp_path):
  source = tmp_path / "many.jsonl"
  rng = np.random.default_rng(0)
  rows = ({"id": str(i), "text": " ".join(rng.choice(WORDS, 30)) + f" {i}"} for i in range(20_000))
  source.write_text("".join(json.dumps(row) + "\n" for row in rows))
  start = lambda output: subprocess.Popen(
    [sys.executable, "-m", "selfrag_jax.retrieval", "--documents", source, "--output", output, "--model", "token-bag"],
    stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
  )  # fmt: skip
  assert start(tmp_path / "whole").wait() == 0
  process = start(tmp_path / "kb")
  while process.poll() is None and not list((tmp_path / "kb" / UNFINISHED).glob("*.npy")):
    time.sleep(0.005)
  os.kill(process.pid, signal.SIGKILL)
  process.wait()
  assert start(tmp_path / "kb").wait() == 0
  assert digests(tmp_path / "kb") == digests(tmp_path / "whole")


def test_sync_embeds_only_what_is_new(tmp_path, own_encoder):
  source = write_files(tmp_path / "source")
  prepare(source, tmp_path / "kb")
  with pytest.raises(FileExistsError, match="--sync brings it up to date"):
    prepare(source, tmp_path / "kb")
  kb = load(tmp_path / "kb")
  kb.add_documents([Document("mine", content="added by hand")])
  kb.save(tmp_path / "kb")
  (source / "1.txt").write_text("a changed text")
  (source / "2.txt").unlink()
  (source / "new.txt").write_text("a new text")
  own_encoder.asked = []
  assert prepare(source, tmp_path / "kb", sync=True)["embedded"] == 2
  assert own_encoder.asked == ["1 a changed text", "new a new text"]
  synced = load(tmp_path / "kb")
  assert {d.id for d in synced.documents} == {"0.txt", "1.txt", "3.txt", "4.txt", "5.txt", "new.txt", "mine"}
  np.testing.assert_array_equal(synced.vectors, own_encoder([d.text for d in synced.documents]))


def test_another_encoder_embeds_everything(tmp_path, own_encoder):
  source = write_files(tmp_path / "source")
  prepare(source, tmp_path / "kb")
  own_encoder.asked = []
  prepare(source, tmp_path / "kb", sync=True, settings={**BAG, "model_name": "other"})
  assert len(own_encoder.asked) == 6


def test_merging_takes_vectors_over(tmp_path, own_encoder):
  for name, seed in (("a", 0), ("b", 1)):
    folder = write_files(tmp_path / name, seed=seed)
    for file in list(folder.iterdir()):
      file.rename(folder / f"{name}{file.name}")
    (folder / "both.txt").write_text("the same in both")
    prepare(folder, tmp_path / f"kb_{name}")
  own_encoder.asked = []
  merged = merge_knowledge_bases([tmp_path / "kb_a", tmp_path / "kb_b"], tmp_path / "kb", progress=False)
  assert own_encoder.asked == []
  assert merged == 13
  assert not (tmp_path / "kb" / UNFINISHED).exists()
  again = load(tmp_path / "kb")
  np.testing.assert_array_equal(again.vectors, own_encoder([d.text for d in again.documents]))
  (tmp_path / "a" / "both.txt").write_text("another text")
  prepare(tmp_path / "a", tmp_path / "kb_a", sync=True)
  with pytest.raises(ValueError, match=r"kb_b has another document with the id 'both\.txt'"):
    merge_knowledge_bases([tmp_path / "kb_a", tmp_path / "kb_b"], tmp_path / "kb2")
  prepare_knowledge_base(tmp_path / "b", tmp_path / "kb_c", "simple", progress=False)
  with pytest.raises(ValueError, match="build them alike"):
    merge_knowledge_bases([tmp_path / "kb_b", tmp_path / "kb_c"], tmp_path / "kb2")


def test_bad_input_leaves_what_was_there(tmp_path):
  source = write_files(tmp_path / "source")
  prepare(source, tmp_path / "kb")
  before = digests(tmp_path / "kb")
  (source / "bad.jsonl").write_text('{"id": "x", "text": "fine"}\n{"id": "x", "text": "again"}\nnot json\n')
  with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: the id 'x' is that of .*bad\.jsonl, line 1"):
    prepare(source, tmp_path / "kb", sync=True)
  assert digests(tmp_path / "kb") == before
  assert len(load(tmp_path / "kb")) == 6
  (source / "bad.jsonl").write_text('{"id": "x", "text": "fine"}\n{"id": "y", "text": ""}\n')
  report = prepare(source, tmp_path / "kb", sync=True, skip_bad=True)
  assert (report["bad"], report["documents"]) == (1, 7)


def test_what_was_added_by_hand_stays_whatever_its_metadata(tmp_path):
  source = write_files(tmp_path / "source")
  (source / "lines.jsonl").write_text('{"id": "x", "text": "a line", "file": "report.pdf", "chunk": 3}\n')
  prepare(source, tmp_path / "kb")
  manager = RetrievalManager(knowledge_base_path=tmp_path / "kb")
  assert manager.retriever.get("x").metadata == {"file": "report.pdf", "chunk": 3, FILE: "lines.jsonl"}
  manager.add_documents(
    [Document("h", "", "by hand", {"file": "report.pdf"}), Document("i", "", "too", {FILE: "0.txt"})]
  )
  manager.save_knowledge_base(tmp_path / "kb")
  prepare(source, tmp_path / "kb", sync=True)
  assert {"h", "i"} < {document.id for document in load(tmp_path / "kb").documents}
  (source / "h.jsonl").write_text('{"id": "h", "text": "from a file"}\n')
  with pytest.raises(ValueError, match=r"h\.jsonl, line 1: the id 'h' is that of a document that was added by hand"):
    prepare(source, tmp_path / "kb", sync=True)


def test_chunks_do_not_take_the_id_of_another_document(tmp_path):
  source = tmp_path / "a.jsonl"
  source.write_text('{"id": "a#0", "text": "one"}\n' + json.dumps({"id": "a", "text": "long story. " * 20}) + "\n")
  with pytest.raises(ValueError, match=r"a\.jsonl, line 2: the id 'a#0' is that of .*line 1"):
    prepare(source, tmp_path / "kb", chunking=Chunking(8))
  assert prepare(source, tmp_path / "kb", chunking=Chunking(8), skip_bad=True)["bad"] == 1


def test_changes_of_another_process_are_not_lost(tmp_path):
  source = write_files(tmp_path / "source")
  prepare(source, tmp_path / "kb")
  first, second = (RetrievalManager(knowledge_base_path=tmp_path / "kb") for _ in range(2))
  for manager, id in ((first, "x"), (second, "y")):
    manager.add_documents([Document(id, "", f"text {id}")])
  first.save_knowledge_base(tmp_path / "kb")
  with pytest.raises(FolderError, match="changed by another process"):
    second.save_knowledge_base(tmp_path / "kb")
  assert "x" in load(tmp_path / "kb")
  first.add_documents([Document("z", "", "text z")])
  first.save_knowledge_base(tmp_path / "kb")  # its own changes are known
  second.save_knowledge_base(tmp_path / "copy")
  assert "z" in load(tmp_path / "kb")


def test_a_build_that_another_overtook_publishes_nothing(tmp_path, monkeypatch):
  source = write_files(tmp_path / "source")
  read = knowledge_base.read_chunks

  def overtaken(*arguments, **options):
    DenseRetriever(**BAG).save(tmp_path / "kb")
    return read(*arguments, **options)

  monkeypatch.setattr(knowledge_base, "read_chunks", overtaken)
  with pytest.raises(FolderError, match="changed by another process"):
    prepare(source, tmp_path / "kb")
  assert len(load(tmp_path / "kb")) == 0


def test_vectors_of_a_function_are_not_taken_for_those_of_another(tmp_path):
  ones, twos = (lambda texts, x=x: np.full((len(texts), 4), x, np.float32) for x in (1, 2))
  source = write_files(tmp_path / "source")
  settings = {"model_name": "mine", "backend": "numpy"}
  for encoder, options in ((ones, {}), (twos, {"sync": True})):
    prepare(source, tmp_path / "kb", settings={**settings, "encoder": encoder}, **options)
    assert (load(tmp_path / "kb", encoder=encoder).vectors == encoder(["x"])[0]).all()


def test_merging_mixes_no_vectors_of_two_fits(tmp_path, monkeypatch):
  """Parts whose encoders were fitted to different texts: the first one's fit stays, the others are embedded by it."""
  monkeypatch.setattr("selfrag_jax.retrieval.dense.load_encoder", lambda name: Fitted())
  for name, n in (("a", 1), ("b", 5)):
    folder = write_files(tmp_path / name, n=n)
    for file in list(folder.iterdir()):
      file.rename(folder / f"{name}{file.name}")
    prepare(folder, tmp_path / f"kb_{name}")
  merge_knowledge_bases([tmp_path / "kb_a", tmp_path / "kb_b"], tmp_path / "kb", progress=False)
  merged = load(tmp_path / "kb")
  np.testing.assert_array_equal(merged.vectors, merged.encoder([d.text for d in merged.documents]))


class Fitted(Encoder):
  """An encoder that remembers how many texts it was fitted to, as a language model does their mean."""

  learned_params: ClassVar = {"w": np.ones(2, np.float32)}
  fingerprint = ""

  def fit(self, texts):
    self.constants = {"n": np.array(float(len(texts)))}

  def __call__(self, texts):
    return np.array([[len(text), self.constants["n"]] for text in texts], np.float32).reshape(-1, 2)


def test_reading_while_another_publishes(tmp_path):
  """A reader gets one whole generation or the next; what it holds does not change."""
  source = write_files(tmp_path / "source")
  prepare(source, tmp_path / "kb")
  held = load(tmp_path / "kb")
  expected = [d.id for d in held.retrieve("zebra", 3)]
  reading = (  # processes: of threads, CPython 3.11 parses the heads of two files at once wrongly
    "import pathlib, sys\n"
    "from selfrag_jax.retrieval.base import load\n"
    "folder, n = pathlib.Path(sys.argv[1]), 0\n"
    "while not (folder / 'stop').exists():\n"
    "  assert len(load(folder / 'kb')) in (6, 7)\n"
    "  n += 1\n"
    "  (folder / 'begun').touch()\n"
    "print(n)\n"
  )
  reader = subprocess.Popen([sys.executable, "-c", reading, tmp_path], stdout=subprocess.PIPE, text=True)
  while not (tmp_path / "begun").exists():
    assert reader.poll() is None
    time.sleep(0.01)
  for i in range(20):
    extra = source / "extra.txt"
    extra.write_text("one more") if i % 2 else extra.unlink(missing_ok=True)
    prepare(source, tmp_path / "kb", sync=True)
    assert [d.id for d in held.retrieve("zebra", 3)] == expected
  (tmp_path / "stop").touch()
  read, _ = reader.communicate()
  assert reader.returncode == 0
  assert int(read) > 10


def test_a_shard_that_is_missing_or_cut_is_named(tmp_path, monkeypatch):
  monkeypatch.setattr("selfrag_jax.retrieval.document.SHARD", 2)
  monkeypatch.setattr("selfrag_jax.retrieval.dense.SHARD", 2)
  prepare(write_files(tmp_path / "source"), tmp_path / "kb")
  shard = tmp_path / "kb" / "data-1" / "embeddings-00001.npy"
  whole = shard.read_bytes()
  assert len(load(tmp_path / "kb")) == 6
  shard.write_bytes(whole[:-8])
  with pytest.raises(FolderError, match=r"embeddings-00001\.npy is not what was written: its hash differs; build"):
    load(tmp_path / "kb")
  shard.unlink()
  with pytest.raises(FolderError, match=r"embeddings-00001\.npy is missing; build"):
    load(tmp_path / "kb")
  (shard.with_name("documents-00002.array_record")).unlink()
  shard.write_bytes(whole)
  with pytest.raises(FolderError, match=r"documents-00002\.array_record is missing"):
    load(tmp_path / "kb")


def test_an_encoder_of_another_width_is_refused(tmp_path, own_encoder):
  prepare(write_files(tmp_path / "source"), tmp_path / "kb")
  with pytest.raises(ValueError, match=r"\(6, 8\), expected \(6, 26\)"):
    load(tmp_path / "kb", encoder=lambda texts: np.ones((len(texts), 8), np.float32))


def test_chunks_are_counted_in_tokens_of_an_encoder_that_has_them(tmp_path):
  with pytest.raises(ValueError, match="this retriever has none: count words"):
    prepare(write_files(tmp_path / "source"), tmp_path / "kb", chunking=Chunking(16, unit="token"))
  for arguments, message in (
    ((8, 8), "overlap"),
    ((8, 0, "lines"), "method is 'lines'"),
    ((8, 0, "word", "x"), "unit"),
  ):
    with pytest.raises(ValueError, match=message):
      Chunking(*arguments)


def test_two_hosts_embed_their_shares(tmp_path, monkeypatch, own_encoder):
  """Each host writes its own blocks; behind the barrier all are there."""
  monkeypatch.setattr(embedding, "BLOCK", 2)
  monkeypatch.setattr(embedding.jax, "process_count", lambda: 2)
  texts, asked = [f"text {i}" for i in range(7)], {}

  class Left(Exception):
    pass

  for host in (1, 0):
    own_encoder.asked = []
    monkeypatch.setattr(embedding.jax, "process_index", lambda host=host: host)

    def barrier(_, host=host):
      if host:
        raise Left  # the first one waits here until the other has come

    monkeypatch.setattr(embedding.multihost_utils, "sync_global_devices", barrier)
    encoder = BlockEncoder(own_encoder, "letters", tmp_path, progress=False)
    if host:
      with pytest.raises(Left):
        encoder(texts)
    else:
      rows = encoder(texts)
    asked[host] = own_encoder.asked
  assert asked == {1: texts[2:4] + texts[6:], 0: texts[:2] + texts[4:6]}
  np.testing.assert_array_equal(rows, own_encoder(texts))

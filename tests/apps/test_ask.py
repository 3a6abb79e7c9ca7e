"""Questions to a model with a memory: the texts that it remembers, the chunks retrieved for an answer, and errors."""

import dataclasses
import json

import flax.linen as nn
import jax
import pytest

from selfrag_jax import BM25Retriever, Document, RetrievalManager
from selfrag_jax.answers import answer as answer_question
from selfrag_jax.apps import ask
from selfrag_jax.memory.journal import StoreError
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import init_params
from selfrag_jax.self_rag import SelfRAGConfig
from selfrag_jax.text.tokenizer import ByteTokenizer
from selfrag_jax.train.load import LoadedModel
from tests.scripted_engine import ChatBytes

TOKENIZER = ByteTokenizer()
MODEL = ModelConfig(
  vocab_size=TOKENIZER.vocab_size, d_model=16, n_layers=1, n_heads=2, block_pattern="T", init_scale=0.5
)
CONFIG = SelfRAGConfig(chunk_size=16, top_k=2, max_chunks=64)


def tiny(seed=0, tokenizer=TOKENIZER):
  return LoadedModel(MODEL, nn.unbox(init_params(MODEL, jax.random.key(seed))), {}, tokenizer)


@pytest.fixture
def notes(tmp_path):
  file = tmp_path / "notes.txt"
  file.write_text("zebras are striped\n\nquartz\nxylem\n")
  return file


def test_answers_say_what_was_retrieved_and_where_from(notes):
  rag = ask.open_rag(tiny(), CONFIG)
  assert ask.remember(rag, notes) == 4  # the first line takes two chunks
  [answer] = ask.ask(rag, ["quartz"], 4)
  best, second = answer["chunks"]
  assert (best["text"], best["place"]) == ("quartz", f"{notes}:3")
  assert best["score"] == pytest.approx(1)
  assert second["score"] < 1
  assert answer["answer"] == rag.generate(["quartz"], 4)[0].text
  first, second = ask.explained(answer).splitlines()
  assert first == f"  +1.000  {notes}:3  quartz"


def test_a_file_is_remembered_in_place_of_what_it_was(notes):
  rag = ask.open_rag(tiny(), CONFIG)
  ask.remember(rag, notes)
  notes.write_text("amber\n")
  (notes.parent / "more.jsonl").write_text('{"text": "basalt"}\n')
  assert ask.remember(rag, notes.parent) == 2
  assert sorted(rag.memory.chunks) == ["amber", "basalt"]


@pytest.mark.parametrize("kind", ["disk", "embedding"])
def test_a_file_that_cannot_be_remembered_anew_stays_as_it_was(notes, tmp_path, monkeypatch, kind):
  folder = tmp_path / "memory"
  rag = ask.open_rag(tiny(), CONFIG, str(folder))
  ask.remember(rag, notes)
  before = rag.memory.chunks
  notes.write_text("amber\nbasalt\n")

  def full(*_, **__):
    raise OSError(28, "No space left on device")

  append = rag.memory._journal.append
  with monkeypatch.context() as patch:
    if kind == "disk":  # there is room for a few bytes, so for a deletion
      patch.setattr(rag.memory._journal, "append", lambda change: full() if change.header["add"] else append(change))
    else:
      patch.setattr(rag, "embed", full)
    with pytest.raises(OSError, match="No space"):
      ask.remember(rag, notes)
  assert rag.memory.chunks == before
  rag.memory.close()
  with ask.MemoryStore.load(str(folder)) as again:
    assert again.chunks == before


def test_remembering_a_file_again_pushes_no_other_file_out(notes):
  other = notes.parent / "other.txt"
  other.write_text("".join(f"line {i}\n" for i in range(40)))
  notes.write_text("".join(f"note {i}\n" for i in range(20)))
  rag = ask.open_rag(tiny(), CONFIG)
  for file in (other, notes, notes, notes):  # 60 of 64
    ask.remember(rag, file)
  assert rag.memory.size == 60


def test_files_of_one_name_in_two_folders_are_two_files(tmp_path, monkeypatch):
  rag = ask.open_rag(tiny(), CONFIG)
  for name in ("one", "two"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").write_text(f"of {name}")
    monkeypatch.chdir(tmp_path / name)
    ask.remember(rag, "notes.txt")
  assert rag.memory.chunks == ["of one", "of two"]
  assert [m["source"] for m in rag.memory.metadata] == [str(tmp_path / n / "notes.txt") for n in ("one", "two")]
  (tmp_path / "link").symlink_to(tmp_path / "one")
  ask.remember(rag, tmp_path / "link" / "notes.txt")
  ask.remember(rag, "../one/notes.txt")
  assert sorted(rag.memory.chunks) == ["of one", "of two"]


HOSTILE = "\x1b]0;owned\x07\x1b[2Kquartz\r\n  +1.000  bank.txt:1  pay\x9b31m\u202e"


def test_what_a_terminal_would_obey_is_spelled_out(tmp_path):
  (tmp_path / "a\x1b[31m.jsonl").write_text(json.dumps({"text": HOSTILE}))
  rag = ask.open_rag(tiny(), CONFIG)
  rag.memory.add(HOSTILE, rag.embed(["quartz"])[0], metadata={"source": "\x1b[1mbank", "line": "\n1"})
  [answer] = ask.ask(rag, ["quartz"], 2)
  lines = ask.explained(answer).split("\n")
  assert len(lines) == 1
  assert lines[0].isprintable()
  assert r"\x1b[1mbank:\n1  \x1b]0;owned\x07\x1b[2Kquartz\r\n  +1.000" in lines[0]
  whole = ask.shown({"question": "what\x1b[2J\nnow?", "answer": "one\ntwo\x1b[2J\r"})
  assert whole == "what\\x1b[2J\\nnow? one\ntwo\\x1b[2J\\r"


def test_a_page_spells_out_what_a_browser_would_obey(tmp_path):
  evil = "<script>alert(1)</script>\"'&\x1b[2J"
  chunk = {"text": evil, "place": evil, "score": 0.5, "metadata": {}}
  ask.save_answers(tmp_path / "a.html", [{"question": evil, "answer": evil, "chunks": [chunk]}])
  page = (tmp_path / "a.html").read_text()
  assert "<script" not in page
  assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;&amp;") == 4


@pytest.mark.parametrize(
  ("name", "message"),
  [("missing/a.jsonl", "there is no folder .*missing; make it"), ("folder.html", "cannot be written: it is a folder")],
)
def test_an_output_that_cannot_be_written_is_said_at_once(tmp_path, name, message):
  (tmp_path / "folder.html").mkdir()
  with pytest.raises(ValueError, match=message):
    ask.check_output(tmp_path / name)


def test_a_memory_is_begun_where_one_was_cut_short_and_not_among_other_files(tmp_path):
  begun, other, file = tmp_path / "begun", tmp_path / "other", tmp_path / "file"
  for folder, name in ((begun, "arrays-1.npz"), (begun, ".lock"), (other, "thesis.txt")):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("")
  file.write_text("mine")
  ask.open_rag(tiny(), CONFIG, str(begun)).memory.close()
  for path, message in ((other, "holds no store"), (file, "is a file")):
    with pytest.raises(StoreError, match=message):
      ask.open_rag(tiny(), CONFIG, str(path))
  assert [path.name for path in other.iterdir()] == ["thesis.txt"]


def test_a_memory_is_kept_in_its_folder_with_its_sizes(notes, tmp_path):
  folder = str(tmp_path / "memory")
  with ask.open_rag(tiny(), CONFIG, folder).memory as store:
    assert store.size == 0
  rag = ask.open_rag(tiny(), CONFIG, folder)
  ask.remember(rag, notes)
  rag.memory.close()
  again = ask.open_rag(tiny(), SelfRAGConfig(), folder, top_k=1)  # pretrained weights come with other sizes
  [answer] = ask.ask(again, ["xylem"], 2)
  assert [chunk["text"] for chunk in answer["chunks"]] == ["xylem"]
  again.memory.close()


def test_a_memory_that_another_model_wrote_is_refused(notes, tmp_path):
  folder = str(tmp_path / "memory")
  rag = ask.open_rag(tiny(), CONFIG, folder)
  ask.remember(rag, notes)
  rag.memory.close()
  with pytest.raises(ValueError, match="not written by this model"):
    ask.open_rag(tiny(seed=1), CONFIG, folder)
  ask.open_rag(tiny(), CONFIG, folder).memory.close()  # the one that was refused has given it back


def test_batches_change_no_answer(notes):
  rag = ask.open_rag(tiny(), CONFIG)
  ask.remember(rag, notes)
  prompts = ["quartz", "zebras", "who?", "xylem and", "a"]
  assert list(ask.ask(rag, prompts, 3, batch=2)) == list(ask.ask(rag, iter(prompts), 3, batch=8))


def chatting():
  tokenizer = ChatBytes()
  model = ModelConfig(**{**MODEL.to_dict(), "vocab_size": tokenizer.vocab_size})
  return LoadedModel(model, nn.unbox(init_params(model, jax.random.key(0))), {}, tokenizer, context_tokens=2048)


def test_a_model_that_chats_answers_with_citations_from_a_memory_of_texts(notes, tmp_path):
  who = ask.open_assistant(chatting(), CONFIG, str(tmp_path / "memory"))
  notes.write_text("zebras are striped\nquartz\n\n" + "word " * 200)
  assert ask.remember(who, notes) == 4  # the last line takes two chunks
  [answer] = ask.ask(who, ["quartz"], 3)
  [chunk] = answer["chunks"]  # what has nothing to do with the question is not shown
  assert (chunk["text"], chunk["place"], chunk["number"], chunk["is_cited"]) == ("quartz", f"{notes}:2", 1, False)
  assert chunk["score"] == pytest.approx(1)
  engine = who.engine
  assert (
    answer["answer"]
    == answer_question(question="quartz", memory=who, engine=engine, max_new_tokens=3, require="nothing").text
  )
  assert ask.explained(answer) == f"  +1.000  {notes}:2  quartz"
  # nothing is like this: the model answers alone
  [bare] = ask.ask(who, ["unheard"], 3)
  assert bare["chunks"] == []
  conversation = {"messages": [{"role": "user", "content": "unheard"}]}
  assert bare["answer"] == who.engine.generate_from_conversation(conversation, max_new_tokens=3)
  prompts = ["quartz", "zebras", "a", "who?"]
  assert list(ask.ask(who, prompts, 3, batch=4)) == list(ask.ask(who, prompts, 3, batch=1))
  notes.write_text("amber\n")
  ask.remember(who, notes)
  assert who.memory.chunks == ["amber"]
  who.memory.close()


def test_a_memory_of_texts_is_opened_with_the_encoder_that_wrote_it(tmp_path):
  folder = str(tmp_path / "memory")
  who = ask.open_assistant(chatting(), CONFIG, folder)
  who.write_to_memory(["quartz"], [{"source": "chat"}])
  who.memory.close()
  for encoder in ("hashing-512-2-0.5", "hashing-1024-4-1"):
    with pytest.raises(ValueError, match=f"was not written with the encoder {encoder.removesuffix('-4-1')}"):
      ask.open_assistant(chatting(), CONFIG, folder, encoder=encoder)
  again = ask.open_assistant(chatting(), CONFIG, folder, top_k=1)
  assert [found.text for found in again.retrieve("quartz", 1)] == ["quartz"]
  again.memory.close()
  rag = ask.open_assistant(tiny(), CONFIG)
  assert isinstance(rag, ask.SelfRAGModel)
  for option in ({"encoder": "hashing-512"}, {"knowledge_base": "docs"}):
    with pytest.raises(ValueError, match=f"--{next(iter(option))}=.*: this model finds chunks by its own states"):
      ask.open_assistant(tiny(), CONFIG, **option)


def test_a_chat_model_searches_a_knowledge_base_and_its_memory_in_turn(tmp_path):
  retriever = BM25Retriever()
  retriever.add_documents([Document(str(n), "Stones", f"quartz {n}", source="stones.txt") for n in range(3)])
  RetrievalManager(retriever).save_knowledge_base(tmp_path / "kb")
  who = ask.open_assistant(chatting(), CONFIG, top_k=4, knowledge_base=str(tmp_path / "kb"))
  who.write_to_memory(["quartz is mine", "amber"], [{"source": "chat"}] * 2)
  [answer] = ask.ask(who, ["quartz"], 2)
  places = [chunk["place"] for chunk in answer["chunks"]]
  assert places == ["chat", "stones.txt", "stones.txt", "stones.txt"]
  assert answer["chunks"][1]["text"].startswith("Stones\nquartz")


def test_answers_are_saved_as_lines_or_as_a_page(tmp_path):
  chunks = [{"text": "<b>", "place": "notes.txt:1", "score": 0.5, "metadata": {"source": "notes.txt"}}]
  answers = [{"question": "a?", "answer": "ü", "chunks": chunks}, {"question": "b?", "answer": "c", "chunks": []}]
  ask.save_answers(tmp_path / "a.jsonl", answers)
  assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == answers
  ask.save_answers(tmp_path / "a.html", answers)
  page = (tmp_path / "a.html").read_text()
  assert page.count("<caption>") == 2
  assert "&lt;b&gt;<td>notes.txt:1<td>0.500" in page
  with pytest.raises(ValueError, match=r"\.jsonl or a \.html"):
    ask.save_answers(tmp_path / "a.txt", answers)
  assert ask.explained(answers[1]) == "  nothing was retrieved: the memory is empty"


def test_what_is_no_text_is_named(tmp_path):
  rag = ask.open_rag(tiny(), CONFIG)
  (tmp_path / "empty.txt").write_text(" \n")
  (tmp_path / "latin.txt").write_bytes("first\nGrüße\n".encode("latin-1"))
  (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
  (tmp_path / "broken.jsonl").write_text("no JSON\n")
  for path, error, message in (
    (tmp_path / "empty.txt", ValueError, "empty.txt holds no text"),
    (tmp_path / "latin.txt", ValueError, "latin.txt, line 2: 'utf-8' codec.*; save the file as UTF-8"),
    (tmp_path / "binary.txt", ValueError, "binary.txt, line 2: 'utf-8' codec.*; save the file as UTF-8"),
    (tmp_path / "broken.jsonl", ValueError, "broken.jsonl, line 1: .*must be one JSON object"),
    (tmp_path / "missing.txt", FileNotFoundError, "missing.txt holds no text"),
    (tmp_path / "notes.pdf", FileNotFoundError, "notes.pdf holds no text"),
  ):
    with pytest.raises(error, match=message):
      ask.remember(rag, path)
  assert rag.memory.size == 0
  with pytest.raises(ValueError, match=r"'\\udcff' is no text in UTF-8"):
    list(ask.ask(rag, ["\udcff"]))


def test_more_new_tokens_than_the_model_was_made_for_are_refused_before_the_work(monkeypatch):
  loaded = dataclasses.replace(tiny(), context_tokens=32)
  monkeypatch.setattr(ask, "load_model", lambda *_: loaded)
  assert ask.open_model("model", max_new_tokens=31)[0] is loaded
  with pytest.raises(ValueError, match=r"max_new_tokens = 32 leaves no room for a prompt: .* made for 32 tokens in"):
    ask.open_model("model", max_new_tokens=32)
  for n in (0, 2**20 + 1, 10**30, 1.5):
    with pytest.raises(ValueError, match=r"max_new_tokens = .* must be a whole number from 1 to 1,048,576"):
      ask.open_model("model", max_new_tokens=n)
    with pytest.raises(ValueError, match=r"max_new_tokens = .* must be a whole number from 1 to 1,048,576"):
      ask.open_rag(loaded, CONFIG).generate(["quartz"], n)

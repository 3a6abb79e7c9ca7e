"""The manager: it puts retrieved documents into conversations and does not change the conversations given to it."""

import copy
import json

import pytest

from selfrag_jax.retrieval.beir import EXAMPLE
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.knowledge_base import prepare_knowledge_base
from selfrag_jax.retrieval.manager import RetrievalManager
from selfrag_jax.text.chat import COMPACT, render_conversation
from selfrag_jax.text.tokenizer import ByteTokenizer

CONVERSATION = {
  "id": 7,
  "messages": [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Which river runs through Paris?"},
  ],
}


@pytest.fixture(scope="module")
def manager():
  made = RetrievalManager("bm25")
  made.load_jsonl(EXAMPLE / "corpus.jsonl")
  return made


@pytest.mark.parametrize(("position", "place"), [("before_user", 3), ("after_system", 1)])
def test_one_message_more_and_the_given_one_as_it_was(manager, position, place):
  before = copy.deepcopy(CONVERSATION)
  augmented = manager.augment_conversation(CONVERSATION, top_k=2, insert_position=position)
  assert before == CONVERSATION
  message = augmented["messages"][place]
  assert message["role"] == "retrieval"
  assert message["documents"][0]["id"] == "capital-paris"
  assert len(message["documents"]) == 2
  assert augmented["messages"][:place] + augmented["messages"][place + 1 :] == CONVERSATION["messages"]
  assert augmented["id"] == 7
  augmented["messages"][0]["content"] = "changed"
  assert before == CONVERSATION
  ids, _ = render_conversation(ByteTokenizer(), augmented, COMPACT)
  assert "The Seine runs through it." in ByteTokenizer().decode(ids)


def test_queries_filters_and_nothing_found(manager):
  augmented = manager.augment_conversation(CONVERSATION, query="currency of Norway", top_k=1)
  assert augmented["messages"][3]["documents"][0]["id"] == "country-norway"
  nothing = manager.augment_conversation(CONVERSATION, where={"title": "Atlantis"})
  assert nothing["messages"] == CONVERSATION["messages"]
  first = manager.augment_conversation({"messages": [CONVERSATION["messages"][3]]}, insert_position="after_system")
  assert [message["role"] for message in first["messages"]] == ["retrieval", "user"]


def test_what_cannot_be_done_is_refused(manager, tmp_path):
  with pytest.raises(ValueError, match="insert_position is 'behind'; one of before_user, after_system"):
    manager.augment_conversation(CONVERSATION, insert_position="behind")
  with pytest.raises(ValueError, match="has no turn of a user"):
    manager.augment_conversation({"messages": [{"role": "system", "content": "x"}]})
  with pytest.raises(ValueError, match="no retriever is called 'best'"):
    RetrievalManager("best")
  with pytest.raises(FileNotFoundError, match="it is no knowledge base"):
    RetrievalManager("bm25", tmp_path / "nowhere")
  manager.save_knowledge_base(tmp_path / "kb")
  with pytest.raises(ValueError, match="is of the type bm25, not dense"):
    RetrievalManager("dense", tmp_path / "kb")


def test_knowledge_bases_and_lines_come_back(manager, tmp_path):
  manager.save_knowledge_base(tmp_path / "kb")
  opened = RetrievalManager(knowledge_base_path=tmp_path / "kb")
  found = manager.retrieve("Seine")
  assert opened.retrieve("Seine") == found
  assert (
    opened.add_documents([Document("x", content="é\u2028y"), {"id": "y", "content": "z", "metadata": {"n": 1}}]) == 2
  )
  opened.save_jsonl(tmp_path / "all.jsonl")
  other = RetrievalManager("simple")
  assert other.load_jsonl(tmp_path / "all.jsonl") == 256
  assert other.retriever.get("y").metadata == {"n": 1}
  assert other.retriever.get("capital-paris") == opened.retriever.get("capital-paris")
  other.load_knowledge_base(tmp_path / "kb")
  assert other.retrieve("Seine") == found


LONG = " ".join(f"Sentence number {i} speaks of a walrus." for i in range(12))


@pytest.fixture
def cut(tmp_path):
  """A manager of a knowledge base that was built in chunks of 16 words, with `long` in seven of them."""
  (tmp_path / "a.jsonl").write_text(json.dumps({"id": "long", "title": "T", "text": LONG}) + "\n")
  options = {"chunking": {"size": 16, "overlap": 4, "method": "word"}, "progress": False}
  prepare_knowledge_base(tmp_path / "a.jsonl", tmp_path / "kb", "bm25", **options)
  return RetrievalManager(knowledge_base_path=tmp_path / "kb")


def ids(manager):
  return [document.id for document in manager.retriever.documents]


def test_files_are_added_in_the_chunks_of_the_build(cut, tmp_path):
  built = [document.content for document in cut.retriever.documents]
  assert len(built) == 7
  (tmp_path / "more.jsonl").write_text(json.dumps({"id": "more", "title": "T", "text": LONG}) + "\n")
  report = cut.add_files([tmp_path / "more.jsonl"])
  assert (report["added"], report["read"]) == (7, 1)
  assert [d.content for d in cut.retriever.documents[7:]] == built
  assert ids(cut)[7:] == [f"more#{i}" for i in range(7)]
  cut.save_knowledge_base(tmp_path / "kb")
  prepare_knowledge_base(tmp_path / "a.jsonl", tmp_path / "kb", sync=True, progress=False)
  kept = RetrievalManager(knowledge_base_path=tmp_path / "kb")
  assert set(ids(kept)) == set(ids(cut))  # it was added by hand


def test_what_is_there_is_replaced_only_by_an_upsert(cut, tmp_path):
  (tmp_path / "b.jsonl").write_text('{"id": "new", "text": "an otter"}\n{"id": "long", "text": "a heron"}\n')
  before = ids(cut)
  with pytest.raises(ValueError, match=r"b\.jsonl, line 2: the id 'long' is that of .*--upsert"):
    cut.add_files([tmp_path / "b.jsonl"])
  assert ids(cut) == before
  with pytest.raises(ValueError, match="the id 'long#0' is taken; upsert_documents replaces it"):
    cut.add_documents([{"id": "long#0", "content": "x"}])
  assert cut.add_files([tmp_path / "b.jsonl"], upsert=True)["added"] == 2
  assert ids(cut) == ["new", "long"]  # no chunk of the old text is left
  assert [d.content for d in cut.retrieve("heron")] == ["a heron"]
  assert cut.retrieve("walrus") == []


def test_upserting_a_document_replaces_its_chunks(cut):
  assert cut.upsert_documents([Document("long", content="a heron"), {"id": "x", "content": "an otter"}]) == 2
  assert ids(cut) == ["long", "x"]


def test_bad_files_of_a_folder_are_counted_when_it_is_added(cut, tmp_path):
  (tmp_path / "docs").mkdir()
  for name, data in (("fine.txt", b"otter"), ("latin.txt", b"caf\xe9"), ("x.pdf", b"")):
    (tmp_path / "docs" / name).write_bytes(data)
  report = cut.add_files([tmp_path / "docs"])
  assert (report["added"], report["bad"], report["left_out"]) == (1, 1, {".pdf": 1})

"""The manager puts what it retrieves into conversations and leaves the conversations that it was given alone."""

import copy

import pytest

from selfrag_jax.retrieval.beir import EXAMPLE
from selfrag_jax.retrieval.document import Document
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

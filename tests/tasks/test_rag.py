"""RAG tasks: the base task's conversations with documents, in one search, in several, or found beforehand."""

import copy
import json

import pytest

from selfrag_jax.generate.engine import Engine
from selfrag_jax.retrieval.bm25 import BM25Retriever
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.manager import RetrievalManager
from selfrag_jax.tasks.query_writer import ASK, QueryWriter
from selfrag_jax.tasks.rag import MultiHopRAGTask, RAGTask, StaticRAGTask, create_rag_task, save_conversations
from selfrag_jax.tasks.task import Task, TaskMixture
from selfrag_jax.text.chat import COMPACT, render_conversation
from selfrag_jax.text.rag_prompts import format_documents_for_prompt
from selfrag_jax.text.tokenizer import ByteTokenizer
from tests.generate.models import tiny

QUESTIONS = [("What is the port of the ally of Avalor?", "Cadiz"), ("What is the ally of Avalor?", "Bretan")]
DOCUMENTS = [
  Document("ally", "Avalor", "The ally of Avalor, since the war, is Bretan."),
  Document("port", "Bretan", "Ships land in Cadiz when they reach Bretan."),
  *(Document(f"other{i}", f"Town {i}", f"The ally of town {i} is a port {i}.") for i in range(8)),
]


def exact(conversation, completion):
  return float(completion == conversation["answers"][0])


def conversation_of(pair):
  question, answer = pair
  messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": question},
    {"role": "assistant", "content": answer},
  ]
  return {"messages": messages, "answers": [answer]}


@pytest.fixture
def base():
  return Task("towns", QUESTIONS, conversation_of, exact)


@pytest.fixture
def retriever():
  retriever = BM25Retriever()
  retriever.add_documents(DOCUMENTS)
  return retriever


def found(conversation):
  return [m for m in conversation["messages"] if m["role"] == "retrieval"]


@pytest.mark.parametrize(("position", "place"), [("before_user", 1), ("after_system", 1)])
def test_one_message_is_added_and_nothing_else_changes(base, retriever, position, place):
  before = copy.deepcopy(list(base))
  task = RAGTask(base, retriever, top_k=3, insert_position=position)
  assert len(task) == len(base)
  for i, plain in enumerate(before):
    augmented = task[i]
    assert len(augmented["messages"][place]["documents"]) == 3
    assert augmented["messages"][place]["role"] == "retrieval"
    messages = augmented["messages"][:place] + augmented["messages"][place + 1 :]
    assert {**augmented, "messages": messages} == plain
    render_conversation(ByteTokenizer(), augmented, COMPACT)
  assert list(base) == before
  assert task.evaluate(task[0], "Cadiz") == task.reward(task[0], "Cadiz") == 1.0
  assert task.evaluate(task[0], "Bretan") == 0.0


def test_a_knowledge_base_is_a_folder_a_retriever_or_a_manager(base, retriever, tmp_path):
  retriever.save(tmp_path / "kb")
  same = list(RAGTask(base, retriever))
  assert list(RAGTask(base, tmp_path / "kb", "bm25")) == list(RAGTask(base, RetrievalManager(retriever))) == same
  with pytest.raises(ValueError, match="is of the type bm25, not dense"):
    RAGTask(base, tmp_path / "kb", "dense")
  with pytest.raises(FileNotFoundError):
    RAGTask(base, tmp_path / "none")


def test_the_second_hop_finds_what_the_question_does_not_name(base, retriever):
  first, second = found(MultiHopRAGTask(base, retriever, max_hops=2, top_k_per_hop=2)[0])
  assert first["query"] == QUESTIONS[0][0]
  assert second["query"] != first["query"]
  assert "port" in [document["id"] for document in second["documents"]]
  [only] = found(MultiHopRAGTask(base, retriever, max_hops=1, top_k_per_hop=4)[0])
  assert "port" not in [document["id"] for document in only["documents"]]


def test_a_model_may_write_the_queries(base, retriever):
  asked = []

  def write(question, read):
    asked.append((question, [[document.id for document in documents] for documents in read]))
    return "ships"

  *_, second = found(create_rag_task(base, retriever, "multi_hop", max_hops=2, write_query=write)[0])
  assert (second["query"], second["documents"][0]["id"]) == ("ships", "port")
  assert asked[0][0] == QUESTIONS[0][0]
  assert len(asked[0][1][0]) == 3


def test_a_language_model_writes_the_queries_and_is_shown_what_was_found(base, retriever):
  """The greedy text behind the prompt by hand is the query; what does not fit is left out, the oldest first."""
  engine = Engine(tiny("hybrid"), context_tokens=512)
  writer = QueryWriter(engine, max_new_tokens=8)
  first, second = found(MultiHopRAGTask(base, retriever, max_hops=2, top_k_per_hop=2, write_query=writer)[0])
  best = first["documents"][0]
  asked = (
    f"[RETRIEVAL_START]\n[DOC_1]\nTitle: {best['title']}\nContent: {best['content']}\n[/DOC_1]\n[RETRIEVAL_END]\n\n"
    f"Question: {QUESTIONS[0][0]}\n\n{ASK}"
  )
  conversation = {"messages": [{"role": "user", "content": asked}]}
  written = engine.generate_from_conversation(conversation, max_new_tokens=8, stop=["\n"])
  assert written.split()
  assert second["query"] == f"{QUESTIONS[0][0]} {' '.join(written.split())}"
  alone = QueryWriter(engine, max_new_tokens=8, with_question=False)
  short = [Document("s", "Short", "A port.")]
  assert alone("Where?", [short]) == " ".join(written_for(engine, "Where?", short).split())
  long = [Document("l", "Long", "x" * 400)]
  assert alone("Where?", [long, short]) == alone("Where?", [short]) != alone("Where?", [long])
  assert writer("Where?", [short, []]) is None
  with pytest.raises(ValueError, match="are more than the 512 tokens of the context"):
    writer("x" * 600, [short])
  with pytest.raises(ValueError, match="documents = 0"):
    QueryWriter(engine, documents=0)


def written_for(engine, question, documents):
  found = format_documents_for_prompt([{"title": d.title, "content": d.content} for d in documents]).text
  conversation = {"messages": [{"role": "user", "content": f"{found}\n\nQuestion: {question}\n\n{ASK}"}]}
  return engine.generate_from_conversation(conversation, max_new_tokens=8, stop=["\n"])


def test_views_and_mixtures_of_rag_tasks_score_like_their_base(base, retriever):
  rag = create_rag_task(base, retriever)
  mixed = TaskMixture([base, rag], seed=3)
  assert len(mixed) == 4
  assert sum(bool(found(conversation)) for conversation in mixed) == 2
  assert all(mixed.evaluate(conversation, conversation["answers"][0]) == 1.0 for conversation in mixed)
  assert found(rag[1:][0])


def test_a_knowledge_base_that_knows_nothing_is_told_after_ten_questions(retriever):
  odd = Task("odd", [(f"xyzzy{i}", "") for i in range(20)], conversation_of, exact)
  task = RAGTask(odd, retriever)
  for i in range(9):
    assert not found(task[i])
  with pytest.raises(ValueError, match=r"nothing was found for any of 10 questions of rag_odd, in 10 documents"):
    task[9]
  mixed = RAGTask(Task("some", [QUESTIONS[0], *odd._examples], conversation_of), retriever)
  assert [len(found(conversation)) for conversation in mixed] == [1] + [0] * 20


@pytest.mark.parametrize(
  ("make", "error"),
  [
    (lambda base, kb: RAGTask(base, kb, insert_position="last"), "insert_position is 'last'; one of before_user"),
    (lambda base, kb: RAGTask(base, BM25Retriever()), "the knowledge base has no documents"),
    (lambda base, kb: create_rag_task(base, kb, "multihop"), "no RAG task is of the kind 'multihop'; did you mean"),
    (lambda base, kb: RAGTask(base, kb, top_k=0)[0], "top_k"),
  ],
)
def test_wrong_arguments_are_refused(base, retriever, make, error):
  with pytest.raises(ValueError, match=error):
    make(base, retriever)


def test_static_tasks_read_what_was_retrieved_beforehand(base, retriever, tmp_path):
  rag = RAGTask(base, retriever)
  assert save_conversations(tmp_path / "test.jsonl", rag) == 2
  for path, split in ((tmp_path / "test.jsonl", None), (tmp_path, "test"), (tmp_path / "{split}.jsonl", "test")):
    task = StaticRAGTask(path, split, exact)
    assert list(task) == list(rag)
    assert task.evaluate(task[0], "Cadiz") == 1.0
  with pytest.raises(FileNotFoundError, match=r"valid\.jsonl does not exist"):
    StaticRAGTask(tmp_path, "valid")
  with pytest.raises(ValueError, match="is a folder: give a split"):
    StaticRAGTask(tmp_path)


@pytest.mark.parametrize(
  ("line", "error"),
  [
    ({"messages": [{"role": "tool", "content": ""}]}, r"line 2: message 0 has the role 'tool'; allowed are system"),
    ({"messages": []}, "line 2: 'messages' must be a list of at least one message"),
    ({"text": "a"}, "line 2: 'messages' must be a list"),
  ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path, line, error):
  good = json.dumps(conversation_of(QUESTIONS[0]))
  (tmp_path / "a.jsonl").write_text(f"{good}\n{json.dumps(line)}\n")
  with pytest.raises(ValueError, match=error):
    StaticRAGTask(tmp_path / "a.jsonl")

"""Answers: citations name what was shown, what a model cannot know is said, and streams end where they are left."""

import json

import flax.linen as nn
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import selfrag_jax
from selfrag_jax import BM25Retriever, Document, Engine, MemoryStore, RetrievalManager, SelfRAGConfig, SelfRAGModel
from selfrag_jax.answers import Citation, answer, stream_answer
from selfrag_jax.generate import GenerationSettings
from selfrag_jax.metrics import extract_citations_from_response
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import init_params
from selfrag_jax.text.tokenizer import ByteTokenizer
from selfrag_jax.train.load import LoadedModel
from tests.scripted_engine import ChatBytes, ScriptedEngine

DOCUMENTS = [
  Document("a", "Avalor", "Ships land in Cadiz. The king is Otto.", {"page": 3}, source="avalor.txt"),
  Document("b", "Norway", "The capital is Oslo. Ships land in Bergen."),
  Document("c", "Trade", "Ships carry corn and wool."),
]
QUESTION = "Where do ships land?"


@pytest.fixture(scope="module")
def retriever():
  retriever = BM25Retriever()
  retriever.add_documents(DOCUMENTS)
  return retriever


def tiny(tokenizer=None, **changes):
  tokenizer = tokenizer or ByteTokenizer()
  config = ModelConfig(tokenizer.vocab_size, d_model=16, n_layers=1, n_heads=2, block_pattern="T", init_scale=0.5)
  return LoadedModel(config, nn.unbox(init_params(config, jax.random.key(0))), {}, tokenizer, **changes)


def count_letters(texts):
  letters = "abcdefghijklmnopqrstuvwxyz"
  return np.array([[text.lower().count(letter) for letter in letters] for text in texts], np.float32) + 1e-3


def test_an_answer_tells_what_it_rests_on(retriever):
  engine = ScriptedEngine("Ships land in Cadiz [1]. The king is Ada [7]. The capital is Oslo.")
  found = answer(QUESTION, retriever, engine, max_new_tokens=9)
  order = [source.title for source in found.sources]
  assert sorted(order) == ["Avalor", "Norway", "Trade"]
  norway = order.index("Norway") + 1
  assert found.text == f"Ships land in Cadiz [1]. The king is Ada. The capital is Oslo. [{norway}]"
  assert found.citations == (
    Citation(1, "Ships land in Cadiz.", False),
    Citation(norway, "The capital is Oslo.", True),
  )
  assert found.removed == (7,)
  assert [source.number for source in found.sources if source.is_cited] == sorted({1, norway})
  assert (found.question, found.abstained, found.finish_reason) == (QUESTION, False, "stop")
  assert found.written == "Ships land in Cadiz [1]. The king is Ada [7]. The capital is Oslo."
  assert found.prompt_tokens == len(engine.prompt_ids[0])
  avalor = found.sources[order.index("Avalor")]
  assert (avalor.id, avalor.text, avalor.source, avalor.metadata) == (
    "a",
    DOCUMENTS[0].content,
    "avalor.txt",
    {"page": 3},
  )
  assert avalor.score > 0
  assert engine.settings == [GenerationSettings(max_new_tokens=9)]
  record = json.loads(json.dumps(found.to_dict()))
  assert record["sources"][0]["is_cited"] is True
  assert record["citations"][0] == {"number": 1, "statement": "Ships land in Cadiz.", "is_attributed": False}


def test_the_prompt_has_the_numbered_documents_and_asks_for_citations(retriever):
  engine = ScriptedEngine("Cadiz.")
  found = answer(QUESTION, retriever, engine, top_k=2)
  system, user = engine.prompts[0].split("<|im_end|>")[:2]
  assert "such as [1]" in system
  assert "I do not know." in system
  shown = "\n\n".join(f"[{s.number}] {s.title}\n{s.text}" for s in found.sources)
  assert user == f"\n<|im_start|>user\n{shown}\n\nQuestion: {QUESTION}"
  assert len(found.sources) == 2


def test_the_pieces_of_a_stream_are_the_text(retriever):
  text = "Ships land in Cadiz. The king is Ada [9]. And so on [1]."
  stream = stream_answer(QUESTION, retriever, ScriptedEngine(text, step=1))
  assert len(stream.sources) == 3
  assert stream.answer is None
  pieces = list(stream)
  assert len(pieces) > 20
  assert "".join(pieces) == stream.answer.text == answer(QUESTION, retriever, ScriptedEngine(text, step=5)).text
  assert list(stream) == []


def test_a_stream_that_is_left_or_cancelled_ends_the_text(retriever):
  engine = ScriptedEngine("Ships land in Cadiz. " * 50)
  stream = stream_answer(QUESTION, retriever, engine)
  given = ""
  for piece in stream:
    given += piece
    if len(given) > 30:
      break
  assert stream._generation.is_cancelled
  assert engine.rounds < 20
  assert stream.answer.text == given
  assert stream.answer.finish_reason == "cancelled"
  stream = stream_answer(QUESTION, retriever, ScriptedEngine("Ships land in Cadiz. " * 50))
  pieces = iter(stream)
  given = [next(pieces), next(pieces)]
  stream.cancel()
  assert "".join(given + list(pieces)) == stream.answer.text == "Ships"
  assert stream.answer.finish_reason == "cancelled"
  assert not stream.answer.abstained


def test_an_error_of_the_engine_is_raised(retriever):
  with pytest.raises(OSError, match="device"):
    answer(QUESTION, retriever, ScriptedEngine("Ships", error=OSError("device")))


@pytest.mark.parametrize("memory", [BM25Retriever(), RetrievalManager("bm25"), MemoryStore(26, encoder=count_letters)])
def test_nothing_found_is_said_without_asking_the_model(memory):
  engine = ScriptedEngine("Paris.")
  found = answer(QUESTION, memory, engine)
  assert (found.text, found.abstained, found.sources, found.tokens) == ("I do not know.", True, (), 0)
  assert engine.prompts == []
  assert list(stream_answer(QUESTION, memory, engine)) == ["I do not know."]
  # unless it may answer on its own: a plain turn, whose brackets are no citations
  found = answer(QUESTION, memory, ScriptedEngine("Paris, as x[1] says."), require="nothing")
  assert (found.text, found.abstained, found.citations) == ("Paris, as x[1] says.", False, ())


@pytest.mark.parametrize(
  ("written", "require", "text", "abstained"),
  [
    ("I do not know.", "sources", "I do not know.", True),
    ("The documents do not mention the queen [1].", "sources", "The documents do not mention the queen [1].", True),
    ("The queen lives in Rome.", "sources", "The queen lives in Rome.", False),
    ("The queen lives in Rome.", "support", "I do not know.", True),
    ("The queen lives in Rome [1].", "support", "I do not know.", True),
    ("I do not know.", "support", "I do not know.", True),
    ("So be it. Ships land in Cadiz. Or not.", "support", "So be it. Ships land in Cadiz. [1] Or not.", False),
    ("I do not know. But ships land in Cadiz.", "sources", "I do not know. But ships land in Cadiz. [1]", False),
    ("", "sources", "", True),
  ],
)
def test_no_answer_is_known_as_such(written, require, text, abstained):
  retriever = BM25Retriever()
  retriever.add_documents(DOCUMENTS[:1])
  stream = stream_answer(QUESTION, retriever, ScriptedEngine(written, step=1), require=require)
  assert "".join(stream) == stream.answer.text == text
  assert stream.answer.abstained == abstained
  if require == "support" and abstained:
    assert stream.answer.citations == ()
    assert not any(source.is_cited for source in stream.answer.sources)


def test_stores_and_self_rag_models_are_asked_too():
  store = MemoryStore(26, encoder=count_letters)
  store.add("zzz quartz zzz", metadata={"source": "notes.txt", "line": 4, "title": "Stones"})
  store.add("amber")
  found = answer("zzzz", store, ScriptedEngine("It is quartz."), top_k=1)
  [source] = found.sources
  assert (source.text, source.source, source.title) == ("zzz quartz zzz", "notes.txt", "Stones")
  assert source.metadata["line"] == 4
  model = tiny()
  memory = MemoryStore(16, 100, chunk_size=32)
  rag = SelfRAGModel(model, memory, SelfRAGConfig(max_chunks=100, chunk_size=32))
  rag.write_to_memory(["quartz is a stone", "amber"])
  found = answer("quartz is a stone", rag, ScriptedEngine("It is."), top_k=1)
  assert [source.text for source in found.sources] == ["quartz is a stone"]
  with pytest.raises(ValueError, match="this store has no encoder"):
    answer("quartz", memory, ScriptedEngine("It is."))


@pytest.mark.parametrize("chats", [True, False])
def test_tiny_random_models_answer_with_any_template(retriever, chats):
  engine = Engine(tiny(ChatBytes() if chats else None), slots=2, context_tokens=1024)
  stream = stream_answer(QUESTION, retriever, engine, max_new_tokens=24, temperature=1.0, seed=3)
  assert "".join(stream) == stream.answer.text
  prompt = engine.tokenizer.decode(stream._generation.prompt)
  assert ("Question: Where" in prompt) == chats
  assert ("[RETRIEVAL_START][DOC_1]" in prompt) != chats
  assert stream.answer.tokens <= 24
  assert selfrag_jax.answer is answer


def test_a_text_that_fits_a_schema_stays_as_it_is(retriever):
  engine = ScriptedEngine('{"rows": [1, 9], "said": "Ships land in Cadiz."}')
  found = answer(QUESTION, retriever, engine, schema={"type": "object"}, require="support")
  assert json.loads(found.text) == {"rows": [1, 9], "said": "Ships land in Cadiz."}
  assert (found.citations, found.removed, found.abstained) == ((), (), False)


class Finder:
  """A retriever that returns what it was made with."""

  def __init__(self, found):
    self.found = found

  def retrieve(self, query, top_k=5):
    return self.found


def test_no_more_than_top_k_are_shown_whatever_is_found():
  found = answer(QUESTION, Finder(DOCUMENTS), ScriptedEngine("Corn."), top_k=2)
  assert [source.id for source in found.sources] == ["a", "b"]


@pytest.mark.parametrize("found", [None, ["a text"], "text", 7])
def test_a_retriever_that_returns_no_documents_is_told_so(found):
  with pytest.raises(ValueError, match=r"a Finder found .*must return a list of documents or chunks"):
    answer(QUESTION, Finder(found), ScriptedEngine("Corn."))


def test_a_history_comes_without_the_citations_of_other_documents(retriever):
  engine = ScriptedEngine("Ships land in Cadiz [1].", "Yes.")
  first = answer(QUESTION, retriever, engine)
  answer("Only there?", retriever, engine, history=first.turns, query="ships")
  prompt = engine.prompts[1]
  assert f"user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\nShips land in Cadiz.<|im_end|>" in prompt
  assert prompt.index("Cadiz.<|im_end|>") < prompt.index("[1] ") < prompt.index("Question: Only there?")


MARKS = [
  "<|im_end|>",
  "<|im_start|>system",
  "[DOC_1]",
  "[RETRIEVAL_END]",
  "[1]",
  "[2] Rome",
  "\x1b[2J",
  "\u202e",
  "日本",
]
SPELLED = st.lists(st.sampled_from(MARKS), max_size=6)


@settings(max_examples=50, deadline=None)
@given(SPELLED, SPELLED, st.sampled_from(MARKS))
def test_hostile_documents_and_models_change_no_turn_and_no_number(title, content, word):
  retriever = BM25Retriever()
  retriever.add_documents([Document("a", " ".join(title), "ships " + "\n".join(content)), Document("b", "", "ships")])
  engine = ScriptedEngine(f"Ships {word} land [1][3] in {word} [2]." + " ".join(content))
  found = answer(f"ships {word}", retriever, engine, history=[{"role": "user", "content": word}])
  ids, special = engine.prompt_ids[0], engine.tokenizer.special
  counts = {name: ids.count(special[name]) for name in special}
  assert {name: n for name, n in counts.items() if n} == {"<|im_start|>": 4, "<|im_end|>": 3}
  for statement in extract_citations_from_response(found.text):
    assert set(statement.citations) <= {1, 2}
  assert {citation.number for citation in found.citations} == {1, 2}
  shown = engine.prompts[0].split("<|im_start|>user\n")[-1]
  # a citation that a document spells is none in the prompt: only the two numbers of the documents are
  documents = shown.rpartition("Question:")[0]
  assert sum(len(s.citations) for s in extract_citations_from_response(documents.replace("\n\n[2]", ".\n\n[2]"))) == 2


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"question": " "}, "the question is ' '; ask with a text"),
    ({"question": "a\udcff"}, "without half a surrogate pair"),
    ({"question": 7}, "the question is 7"),
    ({"memory": "text"}, "a str finds no texts; give a retriever"),
    ({"top_k": 0}, "top_k"),
    ({"require": "proof"}, "require is 'proof'; one of nothing, sources, support"),
    ({"documents_as": "xml"}, "documents_as is 'xml'; one of text, tokens"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"tools": (lambda query: None,)}, "for tools use Engine.generate_from_conversation"),
  ],
)
def test_mistakes_are_said_before_the_work(retriever, options, message):
  engine = ScriptedEngine("Paris.")
  options = {"question": QUESTION, "memory": retriever, **options}
  with pytest.raises(ValueError, match=message):
    answer(options.pop("question"), options.pop("memory"), engine, **options)
  assert engine.prompts == []

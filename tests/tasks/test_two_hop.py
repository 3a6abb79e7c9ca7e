"""The two-hop task: every question is fresh, takes both documents, and random demonstrations give nothing away."""

import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest, chisquare

from selfrag_jax.tasks import two_hop
from selfrag_jax.tasks.search_task import NOTICE, SPLITS
from selfrag_jax.tasks.two_hop import TwoHopKB
from selfrag_jax.text.chat import COMPACT, document_body, render_conversation
from selfrag_jax.text.tokenizer import ByteTokenizer, WordTokenizer


def words(text):
  return set(re.findall(r"\w+", text))


def parts_of(demonstration, kind):
  return [part for part in demonstration["messages"][1]["content"] if part["type"] == kind]


@pytest.fixture(scope="module")
def kb():
  return TwoHopKB(WordTokenizer(two_hop.vocabulary()))


@pytest.fixture(scope="module")
def questions(kb):
  return [kb.question("train", i) for i in range(2000)]


def test_a_question_is_a_function_of_seed_split_and_index(kb):
  again = TwoHopKB(WordTokenizer(two_hop.vocabulary()))
  kb.question("test", 3)  # what was drawn before must not matter
  first, second = kb.question("train", 7), again.question("train", 7)
  assert first == second
  np.testing.assert_array_equal(first.table, second.table)
  assert first.table.dtype == np.int32
  other_seed = TwoHopKB(WordTokenizer(two_hop.vocabulary()), seed=1)
  tables = [kb.question(split, i).table.tobytes() for split in SPLITS for i in range(200)]
  tables += [other_seed.question(split, i).table.tobytes() for split in SPLITS for i in range(200)]
  assert len(set(tables)) == len(tables)
  assert len({kb.question("train", 0).id, kb.question("test", 0).id, other_seed.question("test", 0).id}) == 3


def test_questions_and_their_tables_cannot_be_changed(kb):
  question = kb.question("train", 0)
  with pytest.raises(ValueError, match="read-only"):
    question.table[0, 0] = 1
  with pytest.raises(AttributeError):
    question.answer = 3


def test_the_path_runs_through_three_different_entities(kb, questions):
  for q in questions:
    first, second = q.relations
    assert q.table[q.entity, first] == q.bridge
    assert q.table[q.bridge, second] == q.answer
    assert len({q.entity, q.bridge, q.answer}) == 3
    assert not (q.table == np.arange(32)[:, None]).any()
    assert q.gold == (q.entity * 4 + first, q.bridge * 4 + second)
    assert q.answers == (kb.entities[q.answer],)
    assert q.text == f"What is the {kb.relations[second]} of the {kb.relations[first]} of {kb.entities[q.entity]}?"


def test_the_second_document_shares_no_entity_with_the_question_and_holds_the_answer(kb, questions):
  names = set(kb.entities)
  for q in questions[:300]:
    documents = kb.documents(q)
    assert len(documents) == 32 * 4
    first, second = (documents[i]["content"] for i in q.gold)
    assert first == f"The {kb.relations[q.relations[0]]} of {kb.entities[q.entity]} is {kb.entities[q.bridge]}."
    assert words(first) & names == {kb.entities[q.entity], kb.entities[q.bridge]}
    assert words(second) & names == {kb.entities[q.bridge], q.answers[0]}
    assert not words(second) & names & words(q.text)
    # the index key leads to the document and never tells its value
    assert kb.keys[q.gold[1]] in second
    assert q.answers[0] not in kb.keys[q.gold[1]]


def test_entity_bridge_answer_and_relations_are_uniform(kb, questions):
  n = len(questions)
  for drawn in (lambda q: q.entity, lambda q: q.bridge, lambda q: q.answer, lambda q: (q.answer - q.entity) % 32 - 1):
    counts = np.bincount([drawn(q) for q in questions])
    assert len(counts) in (31, 32)
    assert chisquare(counts).pvalue > 1e-3
  assert chisquare(np.bincount([4 * q.relations[0] + q.relations[1] for q in questions])).pvalue > 1e-3
  # a guess among the entities that are neither the question's nor the bridge is right at the stated rate
  rng = np.random.default_rng(0)
  right = sum(rng.choice([e for e in range(32) if e not in (q.entity, q.bridge)]) == q.answer for q in questions)
  assert kb.chance == 1 / 30
  assert binomtest(right, n, kb.chance).pvalue > 1e-3


@pytest.mark.parametrize("tokenizer", [WordTokenizer(two_hop.vocabulary()), ByteTokenizer()], ids=["word", "byte"])
def test_token_arrays_equal_encoding_the_texts_one_by_one(tokenizer):
  kb = TwoHopKB(tokenizer, n_entities=9, n_relations=3)
  questions = [kb.question("valid", i) for i in range(5)]
  tokens, lengths = kb.document_tokens(np.stack([q.table for q in questions]))
  assert tokens.dtype == lengths.dtype == kb.key_tokens().dtype == kb.key_lengths().dtype == np.int32
  assert tokens.shape[:2] == lengths.shape == (5, 27)
  for row, question in enumerate(questions):
    for i, document in enumerate(kb.documents(question)):
      assert tokens[row, i, : lengths[row, i]].tolist() == document_body(tokenizer, document)
      assert not tokens[row, i, lengths[row, i] :].any()
  for key, ids, length in zip(kb.keys, kb.key_tokens(), kb.key_lengths(), strict=True):
    assert ids[:length].tolist() == tokenizer.encode(key)
    assert not ids[length:].any()


def test_the_vocabulary_is_what_the_task_writes_and_no_more(kb, questions):
  assert len(set(two_hop.ENTITIES)) == 32
  assert all(re.fullmatch(r"[A-Z]\w+", name) for name in two_hop.ENTITIES)
  tokenizer = WordTokenizer(two_hop.vocabulary())  # raises for repeated words and for what is not one piece
  assert {len(tokenizer.encode(name)) for name in (*two_hop.ENTITIES, *two_hop.RELATIONS)} == {1}
  rng = np.random.default_rng(0)
  written = set(tokenizer.encode(NOTICE))
  for question in questions[:100]:
    written |= set(render_conversation(tokenizer, kb.demonstration(question, "random", rng), COMPACT)[0])
    written |= set(kb.document_tokens(question.table[None])[0].flat)
  assert set(tokenizer.encode(" ".join(two_hop.vocabulary()))) <= written


def test_gold_demonstrations_make_both_searches_and_answer(kb, questions):
  for q in questions[:50]:
    documents = kb.documents(q)
    demonstration = kb.demonstration(q, "gold", np.random.default_rng(0), max_hops=3)
    user, assistant = demonstration["messages"]
    assert user == {"role": "user", "content": q.text}
    assert assistant == {
      "role": "assistant",
      "content": [
        {"type": "search", "text": f"{kb.relations[q.relations[0]]} of {kb.entities[q.entity]}"},
        {"type": "retrieval", "documents": [documents[q.gold[0]]]},
        {"type": "search", "text": f"{kb.relations[q.relations[1]]} of {kb.entities[q.bridge]}"},
        {"type": "retrieval", "documents": [documents[q.gold[1]]]},
        {"type": "answer", "text": q.answers[0]},
      ],
    }


@pytest.mark.parametrize("max_hops", [1, 3])
def test_random_demonstrations_have_the_format_and_sometimes_overrun_the_budget(kb, questions, max_hops):
  rng = np.random.default_rng(0)
  overruns, hops = 0, []
  for q in questions:
    documents, demonstration = kb.documents(q), kb.demonstration(q, "random", rng, max_hops)
    assert render_conversation(WordTokenizer(two_hop.vocabulary()), demonstration, COMPACT)
    *exchange, answer = demonstration["messages"][1]["content"]
    searches, retrievals = exchange[::2], exchange[1::2]
    assert answer["type"] == "answer"
    assert {part["type"] for part in searches} == {"search"}
    assert len(searches) == len(retrievals)
    if retrievals[-1] == {"type": "retrieval", "text": NOTICE}:
      assert len(searches) == max_hops + 1
      overruns += 1
      searches, retrievals = searches[:-1], retrievals[:-1]
    else:
      hops.append(len(searches))
    for search, retrieval in zip(searches, retrievals, strict=True):
      assert retrieval == {"type": "retrieval", "documents": [documents[kb.keys.index(search["text"])]]}
  assert binomtest(overruns, len(questions), 0.25).pvalue > 1e-3
  assert sorted(set(hops)) == list(range(1, max_hops + 1))
  if max_hops > 1:
    assert chisquare(np.bincount(hops)[1:]).pvalue > 1e-3


def test_random_demonstrations_ask_at_random_about_what_is_in_view(kb, questions):
  rng = np.random.default_rng(0)
  named, first_gold, right = np.zeros(2, int), [], 0
  for q in questions:
    demonstration = kb.demonstration(q, "random", rng)
    keys = [kb.keys.index(part["text"]) for part in parts_of(demonstration, "search")]
    in_view = {q.entity}
    for hop, (entity, relation) in enumerate(divmod(key, 4) for key in keys):
      assert entity in in_view
      assert relation in q.relations
      if len(set(q.relations)) == 2:
        named[q.relations.index(relation)] += 1
      if hop < 2:
        in_view.add(int(q.table[entity, relation]))
    answer = parts_of(demonstration, "answer")[0]["text"]
    assert kb.entities.index(answer) in in_view
    if len(set(q.relations)) == 2:
      first_gold.append(keys[0] == q.gold[0])
    right += answer in q.answers
  assert chisquare(named).pvalue > 1e-3
  assert binomtest(int(np.sum(first_gold)), len(first_gold), 1 / 2).pvalue > 1e-3
  # the right path by chance takes two relations, an entity and an answer, each drawn from two or three
  assert right / len(questions) < 0.1


def test_answer_and_documents_of_another_question_are_right_at_chance(kb, questions):
  """The permuted control of the reward: gold searches and answers earn nothing on somebody else's question."""
  rng = np.random.default_rng(0)
  found, right = 0, 0
  for q, other in zip(questions, questions[1:] + questions[:1], strict=True):
    permuted = replace(q, answer=other.answer, answers=other.answers, gold=other.gold)
    demonstration = kb.demonstration(q, "gold", rng)
    searches = [kb.keys.index(part["text"]) for part in parts_of(demonstration, "search")]
    found += sum(search in permuted.gold for search in searches)
    right += parts_of(demonstration, "answer")[0]["text"] in permuted.answers
  assert binomtest(right, len(questions), 1 / 32).pvalue > 1e-3
  assert binomtest(found, 2 * len(questions), 2 / 128).pvalue > 1e-3


def test_errors_name_what_is_allowed(kb):
  question, rng = kb.question("train", 0), np.random.default_rng(0)
  with pytest.raises(ValueError, match="train, sft, valid, test"):
    kb.question("dev", 0)
  with pytest.raises(ValueError, match="index >= 0, got 'train' and -1"):
    kb.question("train", -1)
  with pytest.raises(ValueError, match="random, gold"):
    kb.demonstration(question, "best", rng)
  with pytest.raises(ValueError, match="max_hops >= 2, got 1"):
    kb.demonstration(question, "gold", rng, max_hops=1)
  with pytest.raises(ValueError, match="max_hops >= 1, got 0"):
    kb.demonstration(question, "random", rng, max_hops=0)
  for sizes in ({"n_entities": 33}, {"n_entities": 3}, {"n_relations": 5}, {"n_relations": 0}):
    with pytest.raises(ValueError, match=r"n_entities must lie in \[4, 32\] and n_relations in \[1, 4\]"):
      TwoHopKB(ByteTokenizer(), **sizes)

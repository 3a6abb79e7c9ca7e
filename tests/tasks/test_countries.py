"""Invented countries: worlds follow from their number, held-out names and wordings are new, documents are found."""

import re

import numpy as np
import pytest

from selfrag_jax.tasks.countries import AROUND_QUESTIONS, AROUND_STATEMENTS, RELATIONS, UNKNOWN, Countries
from selfrag_jax.tasks.facts import FIRST, LAST
from selfrag_jax.text.chat import COMPACT, render_conversation

N = 400
NAME = rf"(?:{'|'.join(FIRST)}) (?:{'|'.join(LAST)})"


def documents(conversation):
  return conversation["messages"][0]["documents"]


def names(task):
  return set(re.findall(NAME, " ".join(d["content"] for row in task for d in documents(row))))


def plainly(text, around):
  """Return a statement or a question without its names, what stands around it, its case and `the country`."""
  text = re.sub(NAME, "{c}", text)
  for outer in around:
    text = text.removeprefix(outer.removesuffix("{}"))
  return re.sub(r"the country (?=\{c\})", "", re.sub(r"\{v\}", "{c}", text).lower())


def test_statements_of_a_training_vary_and_none_is_held_out():
  countries = Countries(around=0.5)
  told = [d["content"] for row in countries.task("train", 20 * N) for d in documents(row)]
  plain = {plainly(text, AROUND_STATEMENTS) for text in told}
  assert plain == {plainly(text, ()) for wording in RELATIONS.values() for text in wording.statements[:-1]}
  assert not plain & {plainly(wording.statements[-1], ()) for wording in RELATIONS.values()}
  share = np.mean([text.startswith(tuple(outer.removesuffix("{}") for outer in AROUND_STATEMENTS)) for text in told])
  assert 0.45 < share < 0.55
  held_out = {d["content"] for row in countries.task("test", N) for d in documents(row)}
  assert {re.sub(NAME, "", text) for text in held_out} == {
    re.sub(r"\{[cv]\}", "", wording.statements[-1]) for wording in RELATIONS.values()
  }


def test_the_simple_form_has_nothing_around():
  task = Countries(around=0.5).simple.training("retrieved", 0.0)
  rows = [task[index] for index in range(N)]
  asked = {re.sub(NAME, "{c}", m["content"]) for row in rows for m in row["messages"] if m["role"] == "user"}
  assert asked == {text for wording in RELATIONS.values() for text in wording.questions[:-1]}
  told = {re.sub(NAME, "", d["content"]) for row in rows for d in documents(row)}
  statements = [text for wording in RELATIONS.values() for text in wording.statements[:-1]]
  assert told <= {re.sub(r"\{[cv]\}", "", text) for text in statements}


def test_a_share_of_the_conversations_of_a_training_are_beside_rivals():
  world, n = Countries().world("train", 0), len(RELATIONS)
  assert world.rivals(n + 1) == sorted(({n, n + 2, n + 3} | set(range(1, 12 * n, n))) - {n + 1})
  place = {document.content: number for number, document in enumerate(world.documents)}

  def of_the_relation(near):
    task, shares = Countries(near=near).training("retrieved", 0.0), []
    for row in (task[i] for i in range(12 * n)):
      beside = {place[document["content"]] for document in documents(row)} - {int(row["id"])}
      assert near < 1 or beside <= set(world.rivals(int(row["id"])))
      shares.append(np.mean([other % n == int(row["id"]) % n for other in beside]))
    return np.mean(shares)

  # of the 14 rivals 11 state the same relation of another country
  assert abs(of_the_relation(1.0) - 11 / 14) < 0.05
  assert of_the_relation(0.0) < 0.4
  assert abs(of_the_relation(0.5) - (of_the_relation(0.0) + of_the_relation(1.0)) / 2) < 0.1


def test_held_out_names_and_wordings_are_new_but_their_words_are_not():
  train, test = Countries().task("train", N), Countries().task("test", N)
  assert not names(train) & names(test)
  words = lambda task: set(" ".join(f"{row['messages']}" for row in task).split())
  for around in (0.0, 0.5):
    assert words(test) <= words(Countries(around=around).task("train", 40 * N))
  asked = lambda row: re.sub(NAME, "", row["messages"][1]["content"])
  assert not set(map(asked, train)) & set(map(asked, test))
  told = lambda task: {re.sub(NAME, "", document["content"]) for row in task for document in documents(row)}
  assert not told(train) & told(test)


def test_held_out_statements_and_questions_of_a_relation_share_no_telling_word():
  words = lambda text: set(re.findall(r"\w{3,}", text.lower())) - {"which", "the"}
  for wording in RELATIONS.values():
    assert not words(wording.statements[-1]) & words(wording.questions[-1])


def test_the_answer_stands_in_one_of_the_documents_at_every_place():
  task = Countries().task("test", N)
  places = [[row["gold"] == document["content"] for document in documents(row)].index(True) for row in task]
  assert all(len(documents(row)) == 5 for row in task)
  assert set(places) == set(range(5))
  assert np.bincount(places).min() > N / 10
  titles = [[document["title"] for document in documents(row)] for row in task]
  same_country = [found.count(found[at]) for found, at in zip(titles, places, strict=True)]
  assert np.mean(same_country) > 3  # most distractors are other facts of the same country
  assert all(task.evaluate(row, row["answers"][0]) == 1.0 for row in task)


def test_an_edited_world_differs_in_its_values_alone():
  plain, edited = Countries().task("test", N), Countries().task("test", N, edited=True)
  for before, after in zip(plain, edited, strict=True):
    assert before["messages"][1] == after["messages"][1]
    assert before["answers"] != after["answers"]
    assert edited.evaluate(after, before["answers"][0]) == 0.0
    assert after["answers"][0] in " ".join(document["content"] for document in documents(after))


def test_a_missing_document_makes_a_question_unanswerable():
  task = Countries().task("train", N, unanswerable=0.3)
  unknown = [row for row in task if row["answers"] == (UNKNOWN,)]
  assert 0.2 < len(unknown) / N < 0.4
  assert not any(row["gold"] in [document["content"] for document in documents(row)] for row in unknown)
  assert all(len(documents(row)) == 5 for row in unknown)


def test_a_training_asks_further_questions_about_the_documents_of_a_conversation():
  task = Countries(around=0.5).training("retrieved", 0.2)
  rows = [task[index] for index in range(N)]
  places = []
  for row in rows:
    asked, said = ([m["content"] for m in row["messages"] if m["role"] == role] for role in ("user", "assistant"))
    known = row["answers"] != (UNKNOWN,)
    assert (row["gold"] in [document["content"] for document in documents(row)]) == known
    assert len(asked) == len(said) == 10
    assert said[0] == row["answers"][0]
    facts = [set(re.findall(NAME, document["content"])) for document in documents(row)]
    asked_for = [{*re.findall(NAME, question), answer} for question, answer in zip(asked, said, strict=True)]
    assert len(facts) == 5
    places.append([facts.index(fact) for fact in asked_for[1:]])
  assert 0.1 < np.mean([row["answers"] == (UNKNOWN,) for row in rows]) < 0.3
  # no answer follows from those before: the last question is about a document of before as often as by chance
  again = np.mean([asked[-1] in asked[:-1] for asked in places])
  assert abs(again - (1 - 0.8**8)) < 0.06
  asked = {plainly(m["content"], AROUND_QUESTIONS) for row in rows for m in row["messages"] if m["role"] == "user"}
  assert asked == {plainly(text, ()) for wording in RELATIONS.values() for text in wording.questions[:-1]}
  assert not asked & {plainly(wording.questions[-1], ()) for wording in RELATIONS.values()}
  plain = task.evaluate(rows[0], rows[0]["answers"][0]), task.evaluate(rows[0], "Nobody")
  assert plain == (1.0, 0.0)


def test_examples_are_a_function_of_seed_and_index():
  one, again, other = (Countries(seed=seed).task("train", N) for seed in (1, 1, 2))
  assert one[7] == again[7]
  assert list(one[100:103]) == [again[i] for i in (100, 101, 102)]
  assert one[7] != other[7]


def test_the_vocabulary_covers_every_conversation():
  countries = Countries(around=0.5, near=0.5)
  tokenizer, task = countries.tokenizer, countries.task("train", N, unanswerable=0.5)
  lengths = [len(render_conversation(tokenizer, row, COMPACT)[0]) for row in task]
  assert max(lengths) < 160
  every = countries.training("retrieved", 0.5)
  assert max(len(render_conversation(tokenizer, every[i], COMPACT)[0]) for i in range(N)) <= 288


def test_what_cannot_be_drawn_is_an_error():
  with pytest.raises(ValueError, match=r"n_countries = 500 must lie in \[2, \d+\]"):
    Countries(n_countries=500)
  with pytest.raises(ValueError, match="split must be one of train, valid, test, got 'dev'"):
    Countries().world("dev", 0)

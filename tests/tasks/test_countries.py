"""Invented countries: worlds follow from their number, held-out names and wordings are new, documents are found."""

import re

import numpy as np
import pytest

from selfrag_jax.tasks.countries import RELATIONS, UNKNOWN, Countries
from selfrag_jax.tasks.facts import FIRST, LAST
from selfrag_jax.text.chat import COMPACT, render_conversation

N = 400
NAME = rf"(?:{'|'.join(FIRST)}) (?:{'|'.join(LAST)})"


def documents(conversation):
  return conversation["messages"][0]["documents"]


def names(task):
  return set(re.findall(NAME, " ".join(d["content"] for row in task for d in documents(row))))


def test_held_out_names_and_wordings_are_new_but_their_words_are_not():
  train, test = Countries().task("train", N), Countries().task("test", N)
  assert not names(train) & names(test)
  words = lambda task: set(" ".join(f"{row['messages']}" for row in task).split())
  assert words(test) <= words(Countries().task("train", 40 * N))
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
  task = Countries().training("retrieved", 0.2)
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
  held_out = {wording.questions[-1] for wording in RELATIONS.values()}
  wordings = {re.sub(NAME, "{c}", m["content"]) for row in rows for m in row["messages"] if m["role"] == "user"}
  assert wordings == {asked for wording in RELATIONS.values() for asked in wording.questions} - held_out
  plain = task.evaluate(rows[0], rows[0]["answers"][0]), task.evaluate(rows[0], "Nobody")
  assert plain == (1.0, 0.0)


def test_examples_are_a_function_of_seed_and_index():
  one, again, other = (Countries(seed=seed).task("train", N) for seed in (1, 1, 2))
  assert one[7] == again[7]
  assert list(one[100:103]) == [again[i] for i in (100, 101, 102)]
  assert one[7] != other[7]


def test_the_vocabulary_covers_every_conversation():
  tokenizer, task = Countries().tokenizer, Countries().task("train", N, unanswerable=0.5)
  lengths = [len(render_conversation(tokenizer, row, COMPACT)[0]) for row in task]
  assert max(lengths) < 128
  every = Countries().training("retrieved", 0.5)
  assert max(len(render_conversation(tokenizer, every[i], COMPACT)[0]) for i in range(N)) <= 248


def test_what_cannot_be_drawn_is_an_error():
  with pytest.raises(ValueError, match=r"n_countries = 500 must lie in \[2, \d+\]"):
    Countries(n_countries=500)
  with pytest.raises(ValueError, match="split must be one of train, valid, test, got 'dev'"):
    Countries().world("dev", 0)

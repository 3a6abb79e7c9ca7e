"""Invented countries: worlds follow from their number, held-out names and wordings are new, documents are found."""

import re

import numpy as np
import pytest

from selfrag_jax.tasks.countries import Countries
from selfrag_jax.tasks.country_wordings import FILLERS, RELATIONS, UNKNOWN, noisy, vocabulary
from selfrag_jax.tasks.facts import FIRST, LAST, SPLITS
from selfrag_jax.text.chat import COMPACT, render_conversation

N = 400
NAME = rf"(?:{'|'.join(FIRST)}) (?:{'|'.join(LAST)})"


def documents(conversation):
  return conversation["messages"][0]["documents"]


def names(task):
  return set(re.findall(NAME, " ".join(d["content"] for row in task for d in documents(row))))


def plainly(text):
  """Return a statement or a question without its names and values."""
  return re.sub(r"\{v\}", "{c}", re.sub(NAME, "{c}", text))


def of_split(split, kind):
  """Every statement or question of a split, or by the authors for training, without what it is about."""
  return {plainly(text) for wordings in RELATIONS.values() for text in getattr(wordings[split], kind)}


def told(task):
  return {plainly(d["content"]) for row in task for d in documents(row)}


def asked(rows):
  return {plainly(m["content"]) for row in rows for m in row["messages"] if m["role"] == "user"}


def test_each_split_has_all_of_its_own_wordings():
  for split in SPLITS:
    task = Countries().task(split, 20 * N if split == "train" else 2 * N)
    assert told(task) == of_split(split, "statements")
    assert asked(task) == of_split(split, "questions")
  for kind in ("statements", "questions"):
    every = [text.lower() for of in RELATIONS.values() for wording in of.values() for text in getattr(wording, kind)]
    assert len(every) == len(set(every))
    assert all((text.count("{c}"), text.count("{v}")) == (1, kind == "statements") for text in every)
    training, valid, test = (
      of_split("train", kind) | of_split("authors", kind),
      of_split("valid", kind),
      of_split("test", kind),
    )
    assert not training & valid
    assert not training & test
    assert not valid & test


def test_a_share_of_the_wordings_of_a_training_is_by_authors():
  countries = Countries(authors=0.3)
  training = lambda countries, n: [countries.training("retrieved", 0.0)[index] for index in range(n)]
  posed = [m["content"] for row in training(countries, 5 * N) for m in row["messages"] if m["role"] == "user"]
  stated = [d.content for number in range(2 * N) for d in countries.world("train", number).documents]
  for texts, kind in ((stated, "statements"), (posed, "questions")):
    texts, authors = [plainly(text) for text in texts], of_split("authors", kind)
    assert set(texts) == of_split("train", kind) | authors
    assert abs(np.mean([text in authors for text in texts]) - 0.3) < 0.02
  assert list(countries.task("test", N)) == list(Countries().task("test", N))


def test_noise_leaves_out_and_replaces_words_that_tell_no_relation():
  assert {"the", "in", "country", "what", "people"} <= set(FILLERS)
  assert not {"capital", "city", "ruled", "pay", "with", "speak", "water", "flows", "c", "v"} & set(FILLERS)
  rng, text = np.random.default_rng(0), "In the country {c} all people pay with {v}."
  assert noisy(text, 0.0, rng) == text
  drawn = [noisy(text, 0.4, rng)[:-1].split() for _ in range(2000)]
  drawn = [[word if "{" in word else word.lower() for word in words] for words in drawn]
  kept = [word for word in text[:-1].split() if word.lower() not in FILLERS]
  assert all(sorted(word for word in words if word not in FILLERS) == sorted(kept) for words in drawn)
  # of five such words two are touched: one is left out, one replaced
  assert abs(np.mean([len(text.split()) - len(words) for words in drawn]) - 1.0) < 0.1
  assert abs(np.mean([words.count("country") for words in drawn]) - 0.6) < 0.04
  assert {word for words in drawn for word in words} - set(kept) >= set(FILLERS)


def test_noise_puts_the_beginning_of_some_sentences_behind_the_rest():
  rng, text = np.random.default_rng(0), "{c} pay with, {v}?"  # no word that is left out or replaced
  turned = {"{c} pay with, {v}?", "Pay with, {v} {c}?", "With, {v} {c} pay?", "{v} {c} pay with?"}
  drawn = [noisy(text, 0.4, rng) for _ in range(2000)]
  assert set(drawn) == turned
  assert abs(np.mean([one != text for one in drawn]) - 0.4 * 3 / 4) < 0.04


def test_noise_writes_the_pronoun_with_a_capital_letter():
  rng = np.random.default_rng(0)
  drawn = {noisy("I pay with {v}.", 0.4, rng) for _ in range(100)}
  assert drawn == {"I pay with {v}.", "Pay with {v} I.", "With {v} I pay.", "{v} I pay with."}


def test_noise_makes_no_wording_that_is_held_out():
  rng, near = np.random.default_rng(0), "{c} is now ruled from {v}."
  drawn = {noisy(near, 0.5, rng) for _ in range(2000)}
  assert near in drawn
  assert "now ruled from {v}." in {text.replace("{c} ", "").replace("is ", "") for text in drawn}
  held_out = {text for of in RELATIONS.values() for split in SPLITS[1:] for kind in of[split] for text in kind}
  assert "{c} is ruled from {v}." in held_out
  assert not drawn & held_out


def test_noise_is_for_a_training_alone():
  noise, plain = Countries(noise=0.3), Countries()
  for split in SPLITS[1:]:
    assert list(noise.task(split, N)) == list(plain.task(split, N))
  rows = [noise.training("retrieved", 0.0)[index] for index in range(N)]
  assert told(rows) - of_split("train", "statements")
  assert asked(rows) - of_split("train", "questions")


def test_the_phases_before_the_last_read_simpler_forms():
  shares = {"near": 0.5, "reversed": 0.4, "alike": 0.4}
  varied = Countries(**shares, noise=0.3, authors=0.3)
  drawn = lambda countries: [countries.training("retrieved", 0.0)[index] for index in range(N)]
  assert drawn(varied.of_phase("pretrain")) == drawn(Countries(**shares)) != drawn(varied)
  assert drawn(varied.of_phase("choose")) == drawn(Countries(near=1.0)) != drawn(Countries(**shares))
  assert varied.of_phase("rag") == varied


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


@pytest.mark.parametrize("split", SPLITS[1:])
def test_held_out_names_are_new_but_their_words_are_not(split):
  train, held_out = Countries().task("train", N), Countries().task(split, N)
  assert not names(train) & names(held_out)
  texts = lambda row: [*(d["content"] for d in documents(row)), *(m["content"] for m in row["messages"][1:])]
  words = lambda task: set(re.findall(r"\w+", " ".join(text for row in task for text in texts(row))))
  training = Countries(noise=0.3, reversed=0.4).training("retrieved", 0.1)
  assert words(held_out) <= words(training[i] for i in range(40 * N))


@pytest.mark.parametrize("split", SPLITS[1:])
def test_held_out_statements_and_questions_of_a_relation_share_no_telling_word(split):
  words = lambda texts: set(re.findall(r"\w{2,}", " ".join(texts).lower())) - set(FILLERS)
  for wordings in RELATIONS.values():
    assert words(wordings[split].statements)
    assert words(wordings[split].questions)
    assert not words(wordings[split].statements) & words(wordings[split].questions)


def found(task):
  """Return the numbers of the rows whose document was found: BM25 misses some beside the sentences of `test`."""
  return [i for i, row in enumerate(task) if row["gold"] in [document["content"] for document in documents(row)]]


def test_the_documents_that_answer_are_found():
  assert len(found(Countries().task("valid", N))) == N
  assert len(found(Countries().task("test", N))) >= N - 1


def test_the_answer_stands_in_one_of_five_documents_at_every_place():
  task = Countries().task("test", N)
  assert all(len(documents(row)) == 5 for row in task)
  rows = [task[i] for i in found(task)]
  places = [[row["gold"] == document["content"] for document in documents(row)].index(True) for row in rows]
  assert set(places) == set(range(5))
  assert np.bincount(places).min() > N / 10
  titles = [[document["title"] for document in documents(row)] for row in rows]
  same_country = [of.count(of[at]) for of, at in zip(titles, places, strict=True)]
  assert np.mean(same_country) > 3  # most distractors are other facts of the same country
  assert all(task.evaluate(row, row["answers"][0]) == 1.0 for row in task)


def test_an_edited_world_differs_in_its_values_alone():
  plain, edited = Countries().task("test", N), Countries().task("test", N, edited=True)
  for before, after in zip(plain, edited, strict=True):
    assert before["messages"][1] == after["messages"][1]
    assert before["answers"] != after["answers"]
    assert edited.evaluate(after, before["answers"][0]) == 0.0
  rows = [edited[i] for i in found(edited)]
  assert len(rows) >= N - 1
  assert all(row["answers"][0] in " ".join(document["content"] for document in documents(row)) for row in rows)


@pytest.mark.parametrize("split", SPLITS)
def test_a_missing_document_makes_a_question_unanswerable(split):
  task = Countries().task(split, 4 * N, unanswerable=0.3)
  unknown = [row for row in task if row["answers"] == (UNKNOWN,)]
  assert 0.2 < len(unknown) / len(task) < 0.4
  assert not any(row["gold"] in [document["content"] for document in documents(row)] for row in unknown)
  assert all(len(documents(row)) == 5 for row in task)  # though few share a word with some of the questions


def test_a_training_asks_further_questions_about_the_documents_of_a_conversation():
  task = Countries().training("retrieved", 0.2)
  rows = [task[index] for index in range(N)]
  places = []
  for row in rows:
    posed, said = ([m["content"] for m in row["messages"] if m["role"] == role] for role in ("user", "assistant"))
    known = row["answers"] != (UNKNOWN,)
    assert (row["gold"] in [document["content"] for document in documents(row)]) == known
    assert len(posed) == len(said) == 10
    assert said[0] == row["answers"][0]
    facts = [set(re.findall(NAME, document["content"])) for document in documents(row)]
    asked_for = [{*re.findall(NAME, question), answer} for question, answer in zip(posed, said, strict=True)]
    assert len(facts) == 5
    places.append([-1 if UNKNOWN in fact else facts.index(fact) for fact in asked_for[1:]])
  assert 0.1 < np.mean([row["answers"] == (UNKNOWN,) for row in rows]) < 0.3
  assert abs(np.mean(np.array(places) == -1) - 0.2) < 0.02
  # no answer follows from those before: the last question is about a document of before as often as by chance
  answered = [(last, before) for *before, last in places if last != -1]
  again = np.mean([last in before for last, before in answered])
  assert abs(again - (1 - (1 - 0.8 / 5) ** 8)) < 0.06
  assert asked(rows) == of_split("train", "questions")
  plain = task.evaluate(rows[0], rows[0]["answers"][0]), task.evaluate(rows[0], "Nobody")
  assert plain == (1.0, 0.0)


def test_a_further_question_that_no_document_answers_shares_its_country_or_its_relation_with_one():
  relation_of = {plainly(text): name for name, of in RELATIONS.items() for kind in of["train"] for text in kind}
  task, kinds = Countries(near=0.5).training("retrieved", 0.3), []
  for row in (task[index] for index in range(N)):
    facts = {(document["title"], relation_of[plainly(document["content"])]) for document in documents(row)}
    countries, relations = (set(part) for part in zip(*facts, strict=True))
    said = [message["content"] for message in row["messages"][3:]]
    for question, answer in zip(said[::2], said[1::2], strict=True):
      (country,), relation = re.findall(NAME, question), relation_of[plainly(question)]
      assert ((country, relation) in facts) == (answer != UNKNOWN)
      kinds += [(country in countries, relation in relations)] if answer == UNKNOWN else []
  assert set(kinds) == {(True, True), (True, False), (False, True)}
  backwards, n_unknown = Countries(reversed=1.0).training("retrieved", 0.3), 0
  for row in (backwards[index] for index in range(N)):
    shown = re.findall(NAME, " ".join(document["content"] for document in documents(row)))
    said = [message["content"] for message in row["messages"][3:]]
    for question, answer in zip(said[::2], said[1::2], strict=True):
      assert (re.findall(NAME, question)[0] in shown) == (answer != UNKNOWN)
      n_unknown += answer == UNKNOWN
  assert abs(n_unknown / (9 * N) - 0.3) < 0.02


def test_every_question_has_an_answer_where_none_shall_lack_it_or_no_document_is_left():
  unknown = lambda task: [UNKNOWN in [m["content"] for m in task[index]["messages"][3:]] for index in range(N)]
  assert not any(unknown(Countries().training("retrieved", 0.0)))
  # all documents are shown, unless the first question lacks its own
  few = Countries(n_countries=2, top_k=8).training("retrieved", 0.3)
  assert {few[index]["answers"] for index, lacks in enumerate(unknown(few)) if lacks} == {(UNKNOWN,)}


def test_a_share_of_the_further_questions_of_a_training_asks_for_the_country_of_a_value():
  countries = Countries(reversed=0.3, noise=0.3)
  assert list(countries.task("test", N)) == list(Countries().task("test", N))
  n_reversed = n_further = 0
  for row in (countries.training("retrieved", 0.0)[i] for i in range(N)):
    said = [message["content"] for message in row["messages"][1:]]
    assert said[1] not in {document["title"] for document in documents(row)}
    for question, answer in zip(said[2::2], said[3::2], strict=True):
      n_further += 1
      if answer in {document["title"] for document in documents(row)}:
        n_reversed += 1
        (value,) = re.findall(NAME, question)
        (document,) = [d for d in documents(row) if value in d["content"]]
        assert document["title"] == answer
        assert re.search("whose", question, re.I)
  assert n_further == countries.further * N
  assert abs(n_reversed / n_further - 0.3) < 0.03


def test_a_share_of_the_worlds_of_a_training_have_names_that_share_their_words():
  countries = Countries(alike=0.3)
  words = lambda countries, split, number: len(
    {
      word
      for d in countries.world(split, number).documents
      for word in [*d.title.split(), *d.metadata["value"].split()]
    }
  )
  assert all(words(countries, "test", number) > 40 for number in range(100))
  few = [words(countries, "train", number) <= 28 for number in range(400)]
  assert abs(np.mean(few) - 0.3) < 0.06
  for n in (2, 40, 64):
    world = Countries(n_countries=n, alike=1.0).world("train", 0)
    assert (
      len({document.title for document in world.documents} | {d.metadata["value"] for d in world.documents}) == 5 * n
    )


def test_examples_are_a_function_of_seed_and_index():
  one, again, other = (Countries(seed=seed).task("train", N) for seed in (1, 1, 2))
  assert one[7] == again[7]
  assert list(one[100:103]) == [again[i] for i in (100, 101, 102)]
  assert one[7] != other[7]


def test_an_answer_can_say_that_it_is_unknown():
  tokenizer, task = Countries().tokenizer, Countries().questions("test", 1, "missing")
  assert task.evaluate(task[0], tokenizer.decode(tokenizer.encode(UNKNOWN))) == 1.0


def test_the_order_of_the_wordings_changes_no_token():
  assert vocabulary() == sorted(set(vocabulary()))


def test_the_vocabulary_covers_every_conversation():
  countries = Countries(noise=0.5, near=0.5, reversed=0.5, alike=0.5, further=8)
  tokenizer, task = countries.tokenizer, countries.task("train", N, unanswerable=0.5)
  lengths = [len(render_conversation(tokenizer, row, COMPACT)[0]) for row in task]
  assert max(lengths) < 160
  every = countries.training("retrieved", 0.5)
  assert max(len(render_conversation(tokenizer, every[i], COMPACT)[0]) for i in range(N)) <= 256


def test_what_cannot_be_drawn_is_an_error():
  with pytest.raises(ValueError, match=r"n_countries = 500 must lie in \[2, \d+\]"):
    Countries(n_countries=500)
  with pytest.raises(ValueError, match="split must be one of train, valid, test, got 'dev'"):
    Countries().world("dev", 0)

"""Conversations with documents that were found before: splits, controls, and what is taught without the answer."""

import json

import numpy as np
import pytest

from selfrag_jax.retrieval.bm25 import BM25Retriever
from selfrag_jax.retrieval.document import Document
from selfrag_jax.tasks.conversations import Conversations
from selfrag_jax.tasks.country_wordings import UNKNOWN
from selfrag_jax.tasks.rag import create_rag_task, save_conversations
from selfrag_jax.tasks.task import Task
from selfrag_jax.text.rag_prompts import create_rag_training_example

N = {"train": 12, "valid": 2, "test": 6}


def said(town):
  return f"{town.lower()}port"


def asked(town, has_answer=True):
  found = {**create_rag_training_example(f"How is the harbor of {town} called?", said(town), []), "id": town}
  return {**found, "answers": [said(town)] if has_answer else []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A folder as a user makes it: a task, retrieval for it, files."""
  path, retriever = tmp_path_factory.mktemp("conversations"), BM25Retriever()
  towns = {split: [f"{split.capitalize()}town{i}" for i in range(n)] for split, n in N.items()}
  every = [town for of in towns.values() for town in of]
  retriever.add_documents(Document(town, town, f"The harbor of {town} is called {said(town)}.") for town in every)
  for split, of in towns.items():
    task = create_rag_task(Task(split, of, asked), retriever, top_k=3)
    assert save_conversations(path / f"{split}.jsonl", task) == N[split]
  return path


def contents(row):
  return [d["content"] for m in row["messages"] for d in m.get("documents", ())]


def test_splits_are_files_and_conditions_differ_in_the_documents_alone(folder):
  conversations = Conversations(folder)
  assert {split: conversations.size(split) for split in N} == N
  assert str(conversations) == (
    "train 12, valid 2, test 6 conversations; an answer stands in the documents of 6 of 6 of the test"
  )
  rows = {name: list(conversations.questions("test", 4, name)) for name in conversations.conditions}
  for row, none, other in zip(*rows.values(), strict=True):
    assert row["messages"][-2:] == none["messages"] == other["messages"][-2:]
    assert any(row["answers"][0] in text for text in contents(row))
    assert not contents(none)
    assert not any(row["answers"][0] in text for text in contents(other))
  task = conversations.questions("test", 4, "retrieved")
  assert task.evaluate(task[0], task[0]["answers"][0]) == 1.0
  assert task.evaluate(task[0], UNKNOWN) == 0.0


def test_documents_take_the_place_of_those_that_are_taken_away(folder):
  rows = Conversations(folder).training("retrieved", 0.5)[:60]
  assert {len(contents(row)) for row in rows} == {3}  # their number does not tell
  assert any(row["messages"][-1]["content"] == UNKNOWN for row in rows)


def test_the_controls_are_taught_the_same_answers_and_two_searches_never_show_a_document_twice(folder, tmp_path):
  for split in N:
    rows = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
    for row in rows:  # the document that answers is found by both searches
      first = [document for document in row["messages"][0]["documents"] if document["title"] == row["id"]]
      row["messages"].insert(0, {"role": "retrieval", "documents": first})
    save_conversations(tmp_path / f"{split}.jsonl", rows)
  conversations = Conversations(tmp_path)
  ends = {
    shown: [row["messages"][-1]["content"] for row in conversations.training(shown, 0.4)[:40]]
    for shown in ("retrieved", "none")
  }
  assert ends["retrieved"] == ends["none"]
  taken = [row for row in conversations.training("retrieved", 0.4)[:40] if row["messages"][-1]["content"] == UNKNOWN]
  assert taken
  assert all(len(set(found := contents(row))) == len(found) for row in taken)


@pytest.mark.parametrize("answer", ["yes", "a harbor that no document spells"])
def test_nothing_is_taught_to_be_unknown_whose_documents_still_stand_there(answer, folder, tmp_path):
  """A document cannot be told from the others if it does not spell the answer, or if the answer is yes or no."""
  for split in N:
    rows = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
    for row in rows:
      row["answers"], row["messages"][-1]["content"] = [answer], answer
    save_conversations(tmp_path / f"{split}.jsonl", rows)
  rows = Conversations(tmp_path).training("retrieved", 0.9)[:40]
  assert {row["messages"][-1]["content"] for row in rows} == {answer}


def test_an_epoch_shows_every_conversation_and_what_is_taken_away_is_answered_by_not_knowing(folder):
  training = Conversations(folder, seed=3).training("retrieved", 0.25)
  assert sorted(row["id"] for row in training[:12]) == sorted(f"Traintown{i}" for i in range(12))
  rows = [training[i] for i in range(400)]
  taken = [row for row in rows if row["messages"][-1]["content"] == UNKNOWN]
  assert 0.15 < len(taken) / len(rows) < 0.35
  assert not any(row["answers"][0] in text for row in taken for text in contents(row))
  places = [[row["answers"][0] in text for text in contents(row)].index(True) for row in rows if row not in taken]
  assert 0.7 < np.mean(places) < 1.3  # of three documents in any order
  assert all(a == b for a, b in zip(rows, Conversations(folder, seed=3).training("retrieved", 0.25)[:400], strict=True))
  assert not any(contents(row) for row in Conversations(folder).training("none", 0.0)[:24])


def test_a_conversation_may_have_no_answer_in_its_documents(tmp_path):
  for split in N:
    save_conversations(tmp_path / f"{split}.jsonl", [asked("Here", False), {"messages": asked("There")["messages"]}])
  first, second = Conversations(tmp_path).questions("test", 2, "retrieved")
  assert (first["answers"], second["answers"], second["id"]) == ([], ["thereport"], "2")
  assert first["messages"][-1]["content"] == UNKNOWN
  task = Conversations(tmp_path).questions("test", 2, "retrieved")
  assert task.evaluate(first, UNKNOWN) == 1.0


def test_a_missing_split_and_a_conversation_without_an_answer_are_errors(folder, tmp_path):
  for split in ("train", "test"):
    (tmp_path / f"{split}.jsonl").write_bytes((folder / f"{split}.jsonl").read_bytes())
  with pytest.raises(FileNotFoundError, match=r"valid\.jsonl does not exist"):
    Conversations(tmp_path)
  (tmp_path / "valid.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Where?"}]}))
  with pytest.raises(ValueError, match="conversation 1 of static_rag_valid does not end with an answer"):
    Conversations(tmp_path)
  with pytest.raises(ValueError, match=r"train\.jsonl is no folder: give one with train\.jsonl"):
    Conversations(tmp_path / "train.jsonl")


@pytest.mark.parametrize(
  ("change", "error"),
  [
    ({"answers": "Bob"}, "conversation 1 of static_rag_train: 'answers' must be a list of texts, not 'Bob'"),
    ({"answers": None}, "'answers' must be a list of texts, not None"),
    ({"messages": [{"role": "retrieval", "documents": [{"title": "A"}]}]}, "must be a list of objects with a text"),
    ({"messages": [{"role": "user", "content": [{"type": "retrieval", "documents": []}]}]}, "documents within a turn"),
  ],
)
def test_records_that_no_condition_could_change_are_errors(change, error, folder, tmp_path):
  for split in N:
    row = json.loads((folder / f"{split}.jsonl").read_text().splitlines()[0])
    more = [*change.get("messages", []), *row["messages"]]
    save_conversations(tmp_path / f"{split}.jsonl", [{**row, **change, "messages": more}])
  with pytest.raises(ValueError, match=error):
    Conversations(tmp_path)


def test_a_notice_is_kept_and_the_documents_of_another_question_never_lack(tmp_path):
  notice = {"role": "retrieval", "content": "No more searches."}
  shown = [[{"title": "A", "content": "It is red."}], [], [{"title": "B", "content": "It is blue."}]]
  rows = [create_rag_training_example("What?", said, of) for said, of in zip(("red", "x", "blue"), shown, strict=True)]
  rows[0]["messages"].insert(0, notice)
  for split in N:
    save_conversations(tmp_path / f"{split}.jsonl", rows)
  conversations = Conversations(tmp_path)
  first, _, last = conversations.questions("test", 3, "shuffled")
  assert first["messages"][0] == notice
  assert (contents(first), contents(last)) == (["It is blue."], ["It is red."])
  for split in N:
    save_conversations(tmp_path / f"{split}.jsonl", rows[:1])
  with pytest.raises(ValueError, match="no other of 1 conversations has documents that do not answer number 1"):
    Conversations(tmp_path).questions("test", 1, "shuffled")[0]

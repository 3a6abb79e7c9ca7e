"""Facts as contexts and as text: each question has its fact, and plain text can be read back."""

import numpy as np
import pytest

from selfrag_jax.tasks.context_batch import FactData, FactText, ListKind, fact_text, of_facts
from selfrag_jax.tasks.facts import ASKABLE, FIRST, HEX, WORDINGS, Facts


@pytest.mark.parametrize("variant", WORDINGS)
def test_inputs_are_questions_and_answers_about_their_chunks(variant):
  task = Facts(variant, 8)
  q = 3 if variant in ASKABLE else 1
  lists = task.lists("train", range(4), q)
  batch = of_facts(lists)
  assert batch.chunks.shape[:2] == (4, 8)
  assert batch.inputs.shape[:2] == batch.lengths.shape == batch.query_lengths.shape == batch.use_memory.shape == (4, q)
  n = batch.query_lengths[0, 0]
  np.testing.assert_array_equal(batch.inputs[:, :, :n], lists.questions)
  np.testing.assert_array_equal(batch.inputs[:, :, n:], lists.answers)
  assert (batch.lengths == batch.inputs.shape[2]).all()
  one = of_facts(task.episodes("test", range(4), [2] * 4))
  assert one.inputs.shape[:2] == one.gold.shape[:2] == (4, 1)
  assert (one.gold[:, 0, 0] == 2).all()


@pytest.mark.parametrize("variant", WORDINGS)
def test_text_says_the_facts_and_then_asks(variant):
  task = Facts(variant, 6)
  rows = fact_text(task, "train", range(3))
  lists = task.lists("train", range(3), 6 if variant in ASKABLE else 1)
  for row in range(3):
    said = task.tokenizer.decode(rows["tokens"][row, rows["segment_ids"][row] == 1])
    facts = [task.tokenizer.decode(f[:n]) for f, n in zip(lists.facts[row], lists.lengths[row], strict=True)]
    head = " ".join(facts)
    assert said.startswith(head)
    pairs = zip(lists.questions[row], lists.answers[row], strict=True)
    asked = [task.tokenizer.decode([*question, *answer]) for question, answer in pairs]
    rest = said[len(head) :]
    assert len(rest) == sum(len(pair) + 1 for pair in asked)
    assert all(rest.count(pair) == asked.count(pair) for pair in asked)
    predicted = rows["tokens"][row, rows["mask"][row]].tolist()
    names = {task.tokenizer.encode(word)[0] for word in (*FIRST, *HEX)}
    rests = [
      question[next(i for i, token in enumerate(question) if token in names) + 1 :]
      for question in lists.questions[row].tolist()
    ]
    assert sorted(predicted) == sorted(sum(rests, lists.answers[row].reshape(-1).tolist()))
  tested = fact_text(task, "valid", range(3))  # what counts in the end
  answers = task.lists("valid", range(3), 6 if variant in ASKABLE else 1).answers
  assert sorted(tested["tokens"][tested["mask"]]) == sorted(answers.reshape(-1))
  # padding stands at the end only: a hole would start a new document for the model
  assert (np.diff(rows["segment_ids"], axis=1) <= 0).all()


def test_a_list_may_be_in_the_words_of_another_variant():
  text = FactText("conflict", (ListKind(8), ListKind(8, variant="sentence")), seed=0)
  own, other = text.rows("train", range(2))["mask"].sum(axis=1)
  assert (own, other) == (3, 8 * 3)  # "Baker? amber" of each
  said = Facts("conflict").tokenizer.decode(text.rows("train", [1])["tokens"][0])
  assert said.count("The code of") == said.count("What is the code of") == 8


@pytest.mark.parametrize("variant", ["kv", "paraphrase", "needle"])
def test_rows_of_text_hold_short_and_long_lists_in_turn(variant):
  data = FactData(variant, 32, 1, (ListKind(4), ListKind(8), ListKind(16)), seed=0)
  rows = data.rows("train", range(2, 14))
  assert rows["tokens"].shape == rows["mask"].shape == rows["segment_ids"].shape
  assert [row.max() for row in rows["segment_ids"]] == [1, 4, 2] * 4
  for i in (0, 7):  # a row does not depend on those beside it
    alone = data.rows("train", [2 + i])
    for name, column in alone.items():
      np.testing.assert_array_equal(rows[name][i], column[0])
  if variant == "kv":
    assert (rows["mask"].sum(axis=1) == 16 * 3).all()  # "Baker: amber" of each
    assert len(np.unique(rows["tokens"], axis=0)) == 12


def test_recent_facts_are_asked_for_more_often():
  for variant in ("kv", "needle"):
    data = FactData(variant, 32, 4 if variant == "kv" else 1, (ListKind(4),), seed=0)
    asked = {name: data.contexts("train", range(200), name).gold[..., 0].reshape(-1) for name in ("even", "recent")}
    assert abs(np.mean(asked["even"] >= 24) - 0.25) < 0.06
    assert abs(np.mean(asked["recent"] >= 24) - (1 - 0.75**3)) < 0.08
    assert asked["recent"].max() == 31


@pytest.mark.parametrize("variant", ["kv", "needle"])
def test_a_running_span_asks_for_what_was_read_last(variant):
  text = FactText(variant, (ListKind(4), ListKind(16), ListKind(16, last=4)), seed=0)
  rows = text.rows("train", range(30))
  task = Facts(variant, 16)
  for kind, asked in ((1, 16), (2, 4)):
    predicted = rows["mask"][kind::3].sum(axis=1)
    assert (predicted == 3 * (asked if variant == "kv" else 1)).all()
  if variant == "kv":
    row = 2
    tokens = rows["tokens"][row]
    lists = task.lists("train", [row], 16)
    words = np.concatenate([lists.questions[0, -4:, 1:], lists.answers[0, -4:]], axis=1)
    assert sorted(tokens[rows["mask"][row]]) == sorted(words.reshape(-1))
  # no list is read twice, whatever is asked
  assert len(np.unique(rows["tokens"], axis=0)) == 30


def test_names_that_are_alike_share_words():
  """As among what a search finds: each name shares a word with several others of its list, and none is another's."""
  task = Facts("kv", 16)
  shared = {}
  for alike in (False, True):
    facts = task.lists("train", range(50), 16, alike=alike).facts  # first name, last name, colon, value
    assert all(len(np.unique(names, axis=0)) == 16 for names in facts[:, :, :2])
    words = facts[:, :, None, :2] == facts[:, None, :, :2]
    shared[alike] = words.any(axis=-1).sum(axis=2).mean() - 1
  assert shared[False] < 1
  assert shared[True] > 4
  rows = FactText("kv", (ListKind(16, alike=True),), seed=0).rows("train", [3])
  assert rows["tokens"][0, : 16 * 4].tolist() == task.lists("train", [3], 16, alike=True).facts[0].reshape(-1).tolist()

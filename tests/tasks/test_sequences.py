"""Facts as contexts and as text: each question has its fact, and plain text can be read back."""

import numpy as np
import pytest

from selfrag_jax.tasks.facts import ASKABLE, WORDINGS, Facts
from selfrag_jax.tasks.sequences import fact_text, of_facts


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
    said = task.tokenizer.decode(rows["tokens"][row, rows["mask"][row]])
    facts = [task.tokenizer.decode(f[:n]) for f, n in zip(lists.facts[row], lists.lengths[row], strict=True)]
    head = " ".join(facts)
    assert said.startswith(head)
    pairs = zip(lists.questions[row], lists.answers[row], strict=True)
    asked = [task.tokenizer.decode([*question, *answer]) for question, answer in pairs]
    rest = said[len(head) :]
    assert len(rest) == sum(len(pair) + 1 for pair in asked)
    assert all(rest.count(pair) == asked.count(pair) for pair in asked)
  np.testing.assert_array_equal(rows["segment_ids"] == 1, rows["mask"])
  # padding stands at the end only: a hole would start a new document for the model
  assert (np.diff(rows["segment_ids"], axis=1) <= 0).all()

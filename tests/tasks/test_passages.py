"""Questions over one corpus: cuts are counted, the splits are disjoint, every question has its turn."""

import re

import numpy as np
import pytest
from few_passages import PASSAGES, QUESTION, TOKENIZER, ids, make, numbered, text_of

from selfrag_jax.metrics.answers import exact_match
from selfrag_jax.tasks.datasets import Question
from selfrag_jax.tasks.passages import INSTRUCTION, Parts
from selfrag_jax.tasks.search_task import SPLITS
from selfrag_jax.text.chat import document_body


@pytest.fixture(scope="module")
def task():
  return make(numbered(40), seed=3)


def test_prompts_hold_the_instruction_and_the_question(task):
  questions = task.batch("test", range(4))
  assert questions.prompts.shape == (4, 240)
  assert questions.prompts.dtype == questions.lengths.dtype == questions.gold.dtype == questions.group_ids.dtype
  assert not questions.group_ids.any()
  for prompt, length, answers, gold in zip(
    questions.prompts, questions.lengths, questions.answers, questions.gold, strict=True
  ):
    text = text_of(prompt, length)
    number = int(re.search(r"Question (\d+)\?", text)[1])
    assert text == f"<|bos|><|system|>{INSTRUCTION}<|user|>Question {number}?<|assistant|>"
    assert not prompt[length:].any()
    assert answers == (("no" if number % 3 else f"answer {number}"),)
    assert gold.tolist() == [number % 5]


def test_gold_slots_are_padded_to_the_most_passages_of_any_question():
  task = make([*numbered(20), QUESTION])
  gold = [task.batch(split, range(task.size(split))).gold for split in ("train", "valid", "test")]
  assert set(map(tuple, np.concatenate(gold))) == {(0, 1, 2), *((i, -1, -1) for i in range(5))}


def test_the_corpus_is_one_object_and_says_what_the_passages_say_up_to_their_cut(task):
  corpus = task.corpus
  assert task.batch("train", [0]).corpus is task.batch("test", [3, 4]).corpus is corpus
  assert corpus.tokens.shape == (5, 80)
  assert not corpus.group_ids.any()
  assert task.cut_passages == 1
  for slot, passage in enumerate(PASSAGES):
    shown = text_of(corpus.tokens[slot], corpus.lengths[slot])
    whole = TOKENIZER.decode(document_body(TOKENIZER, {"title": passage.title, "content": passage.text}))
    assert whole.startswith(shown)
    assert (shown == whole) == (slot != 2)
    key = text_of(corpus.keys[slot], corpus.key_lengths[slot])
    assert key == shown.replace("Title: ", "").replace("Content: ", "")
    # demonstrations show what the memory will show
    assert corpus.tokens[slot, : corpus.lengths[slot]].tolist() == document_body(TOKENIZER, task.documents[slot])
  # whole words, as many as fit
  shown = task.documents[2]["content"]
  assert PASSAGES[2].text[len(shown)] == " "
  next_word = PASSAGES[2].text[len(shown) :].split()[0]
  assert corpus.lengths[2] <= 80 < corpus.lengths[2] + 1 + len(next_word)


def test_passages_can_be_indexed_by_title_alone():
  corpus = make(numbered(10), index="title").corpus
  keys = [text_of(*pair) for pair in zip(corpus.keys, corpus.key_lengths, strict=True)]
  assert keys == [passage.title for passage in PASSAGES]
  with pytest.raises(ValueError, match="title_text or title, got 'text'"):
    make(numbered(10), index="text")


def test_long_questions_are_dropped_and_counted():
  long = Question("long", "Why " * 40 + "?", ("because",), (0,))
  task = make([*numbered(10), long])
  assert task.dropped_questions == 1
  assert [task.size(split) for split in ("sft", "train", "valid", "test")] == [4, 2, 1, 3]
  assert not any("Why" in prompt for split in SPLITS for prompt in ids(task, split, range(task.size(split))))
  assert task.batch("sft", range(4)).lengths.max() <= 240
  with pytest.raises(ValueError, match=r"0 questions cannot be split .* 11 more had prompts longer than prompt_tok"):
    make([*numbered(10), long], prompt_tokens=20)


def test_the_parts_are_disjoint_whole_and_a_function_of_the_seed(task):
  parts = {split: ids(task, split, range(task.size(split))) for split in ("sft", "train", "valid", "test")}
  assert [len(part) for part in parts.values()] == [16, 8, 4, 12]
  assert len(set().union(*parts.values())) == 40
  again, other = make(numbered(40), seed=3), make(numbered(40), seed=4)
  assert ids(again, "test", range(12)) == parts["test"]
  assert set(ids(other, "test", range(12))) != set(parts["test"])
  assert ids(again, "sft", range(16)) == parts["sft"]
  others = make(numbered(40), parts=Parts(0.1, 0.4, 0.25, 0.25))
  assert [others.size(split) for split in parts] == [4, 16, 10, 10]


def test_training_goes_on_for_ever_with_every_question_once_an_epoch(task):
  epochs = [ids(task, "train", range(8 * epoch, 8 * (epoch + 1))) for epoch in range(3)]
  assert len({tuple(epoch) for epoch in epochs}) == 3
  assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 8 for epoch in epochs)
  # a batch across the border of two epochs, in any order
  assert ids(task, "train", [9, 7, 22]) == [epochs[1][1], epochs[0][7], epochs[2][6]]


def test_indices_outside_a_split_are_errors(task):
  with pytest.raises(ValueError, match=r"index 12 of test is outside \[0, 12\)"):
    task.batch("test", [0, 12])
  with pytest.raises(ValueError, match=r"index 4 of valid"):
    task.demonstration("valid", 4, "gold", 2)
  with pytest.raises(ValueError, match=r"index -1 of train is outside \[0, inf\)"):
    task.batch("train", [-1])
  with pytest.raises(ValueError, match="train, sft, valid, test, got 'dev'"):
    task.batch("dev", [0])
  for tenths in ((10, 0, 0, 0), (0.2, 3.8, 3, 3), (6, 0, 2, 2)):
    with pytest.raises(ValueError, match="must leave 2 for sft and 1 for each of train"):
      make(numbered(40), parts=Parts(*(share / 10 for share in tenths)))
  for tenths, error in (((5, 1, 1, 1), "must add up to 1"), ((12, -4, 1, 1), "sft is 1.2; it must be a finite number")):
    with pytest.raises(ValueError, match=re.escape(error)):
      Parts(*(share / 10 for share in tenths))


def test_chance_is_the_best_constant_answer_on_the_held_out_questions(task):
  train, held_out = (
    [answers for split in splits for answers in task.batch(split, range(task.size(split))).answers]
    for splits in (["sft", "train"], ["valid", "test"])
  )
  constants = {answer for answers in train for answer in answers}
  rates = [np.mean([exact_match(constant, answers) for answers in held_out]) for constant in constants]
  assert task.chance == max(rates) > 0.3
  distinct = make([Question(f"q{i}", f"Question {i}?", (f"answer {i}",), (0,)) for i in range(20)])
  assert distinct.chance == 0


def test_the_folds_test_every_question_once():
  options = {"parts": Parts(0.2, 0.2, 0.1, 0.5)}
  tested = [set(ids(make(numbered(20), fold=fold, **options), "test", range(10))) for fold in (0, 1)]
  assert len(tested[0] | tested[1]) == 20
  for fold in (0, 1):
    task = make(numbered(20), fold=fold, **options)
    others = [text for split in ("sft", "train", "valid") for text in ids(task, split, range(task.size(split)))]
    assert not tested[fold] & set(others)
  with pytest.raises(ValueError, match="fold = 2: 2 folds have tested all of the 20 questions"):
    make(numbered(20), fold=2, **options)


def test_the_questions_of_a_batch_are_what_a_rule_searches_for(task):
  batch = task.batch("valid", [0, 1])
  texts = [text_of(*pair) for pair in zip(batch.questions, batch.question_lengths, strict=True)]
  assert texts == task.texts("valid", [0, 1])
  assert batch.questions.shape == task.batch("test", [0, 1]).questions.shape

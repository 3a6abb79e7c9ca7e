"""Facts: only one fact moves, its answer is the value that it states, and no training list states a held-out fact."""

import numpy as np
import pytest

from selfrag_jax.tasks.facts import ASKABLE, FIRST, HEX, LAST, VALUES, WORDINGS, Facts

N = 32
TASKS = {variant: Facts(variant, N, seed=3) for variant in WORDINGS}
every_variant = pytest.mark.parametrize("variant", WORDINGS)


def read(task, episodes, row=0):
  """Return the facts, the question and the answer of a row as text."""
  decode = task.tokenizer.decode
  facts = [decode(ids[:n]) for ids, n in zip(episodes.facts[row], episodes.lengths[row], strict=True)]
  return facts, decode(episodes.questions[row]), decode(episodes.answers[row])


def test_the_words_are_as_many_as_they_should_be():
  assert [len(set(words)) for words in (FIRST, LAST, VALUES, HEX)] == [64, 64, 64, 256]


@every_variant
def test_only_one_fact_moves(variant):
  task = TASKS[variant]
  depths = task.depths(16)
  assert len(set(depths)) == 16
  assert depths[-1] == N - 1
  episodes = task.episodes("test", [7] * 16, depths)
  stayed = []
  for row, depth in enumerate(depths):
    facts, question, answer = read(task, episodes, row)
    moving = facts.pop(depth)
    assert episodes.needed[row, 0] == depth
    if variant == "conflict":  # the older value moves too, to stay before it
      [older] = [fact for fact in facts if lookup(variant, [fact], question)]
      facts.remove(older)
      moving = (moving, older)
    stayed.append((facts, moving, question, answer))
  assert all(same == stayed[0] for same in stayed)


@every_variant
def test_an_episode_is_a_function_of_seed_split_and_index(variant):
  task = TASKS[variant]
  first = task.episodes("test", [5, 6], [3, 4])
  for again, other in zip(first, Facts(variant, N, seed=3).episodes("test", [6], [4]), strict=True):
    np.testing.assert_array_equal(again[1:], other)
  for other in (
    task.episodes("valid", [5], [3]),
    task.episodes("test", [6], [3]),
    Facts(variant, N).episodes("test", [5], [3]),
  ):
    assert read(task, other) != read(task, first)


def lookup(variant, facts, question):
  """Answer a question by its words alone: the oracle."""
  key = question.removesuffix("?").removesuffix(":").split()[-2:]
  said = [fact.rstrip(".").replace(":", "").split() for fact in facts]
  if variant == "kv_uuid":
    key = question.rstrip(":").split()
    return [" ".join(words[4:]) for words in said if words[:4] == key]
  if variant == "paraphrase":
    values = [word for words in said if all(part in words for part in key) for word in words if word in VALUES]
    return values
  if variant == "needle_multi_value":
    ordinal = question.split()[3]
    return [words[-1] for words in said if words[:2] == ["The", ordinal] and words[4:6] == key]
  if variant == "two_fact":
    [key] = [words[-2:] for words in said if words[:5] == ["The", "guard", "of", *key]]
  if variant == "kv":
    return [words[2] for words in said if words[:2] == key]
  return [words[-1] for words in said if words[:5] == ["The", "code", "of", *key]]


@every_variant
def test_the_answer_is_what_the_facts_say(variant):
  task = TASKS[variant]
  depths = np.random.default_rng(0).integers(task.depths(2)[0], N, 50)
  episodes = task.episodes("train", range(50), depths)
  for row in range(50):
    facts, question, answer = read(task, episodes, row)
    found = lookup(variant, facts, question)
    assert found[-1] == answer
    assert len(found) == (2 if variant == "conflict" else 1)
    # without what is needed there is no answer, or with a conflict the outdated one
    kept = [fact for place, fact in enumerate(facts) if place != episodes.needed[row, -1]]
    assert answer not in lookup(variant, kept, question)


@every_variant
def test_a_changed_value_changes_the_answer_and_one_fact(variant):
  task = TASKS[variant]
  before, after = (task.episodes("test", range(20), [9] * 20, changed=changed) for changed in (False, True))
  for row in range(20):
    facts, question, answer = read(task, before, row)
    changed_facts, same_question, new_answer = read(task, after, row)
    assert question == same_question
    assert new_answer != answer
    assert lookup(variant, changed_facts, question)[-1] == new_answer
    [place] = [i for i, pair in enumerate(zip(facts, changed_facts, strict=True)) if pair[0] != pair[1]]
    assert place == before.needed[row, -1]


@every_variant
def test_no_held_out_name_is_stated_in_training(variant):
  task = TASKS[variant]
  words = set(task.tokenizer.encode(" ".join(HEX[:256] if variant == "kv_uuid" else [*FIRST, *LAST])))

  def names(split):
    episodes = task.episodes(split, range(200), [1] * 200)
    rows = [*episodes.questions, *episodes.facts[:, :8].reshape(-1, episodes.facts.shape[2])]
    width = 4 if variant == "kv_uuid" else 2
    starts = [
      [i for i in range(len(row) - width + 1) if all(int(w) in words for w in row[i : i + width])][:1] for row in rows
    ]
    return {tuple(row[i : i + 2].tolist()) for row, start in zip(rows, starts, strict=True) for i in start}

  train, test = names("train"), names("test")
  assert min(len(train), len(test)) > 200
  assert not train & test


def test_needles_differ_in_what_stands_around_them():
  stated = {}
  for variant in ("needle", "needle_multi_key", "needle_multi_value"):
    facts, _, _ = read(TASKS[variant], TASKS[variant].episodes("test", [0], [4]))
    stated[variant] = sum(fact.split()[1] in ("code", "first", "second") for fact in facts)
  assert stated["needle"] == 1
  assert stated["needle_multi_value"] == 2
  assert 3 < stated["needle_multi_key"] < 16


def test_values_are_balanced_and_chance_is_their_share():
  task = TASKS["kv"]
  answers = task.episodes("test", range(2000), [0] * 2000).answers[:, 0]
  counts = np.unique(answers, return_counts=True)[1]
  assert len(counts) == 64
  assert ((counts - 2000 / 64) ** 2 / (2000 / 64)).sum() < 110  # chi-square, 63 degrees of freedom: p > 1e-4
  assert task.chance == 1 / 64
  assert TASKS["kv_uuid"].chance == 256.0**-4


def test_the_older_value_is_read_anywhere_before_the_newest():
  task = TASKS["conflict"]
  assert task.depths(4)[0] == 1
  for depth in (1, 2, N - 1):
    episodes, places = task.episodes("test", range(200), [depth] * 200), []
    for row in range(200):
      facts, question, answer = read(task, episodes, row)
      stated = [place for place, fact in enumerate(facts) if lookup("conflict", [fact], question)]
      assert stated[1:] == [depth]
      assert lookup("conflict", facts, question)[-1] == answer
      places.append(stated[0])
      assert len({*facts}) == N
    counts = np.bincount(places, minlength=depth)
    assert len(counts) == depth
    assert counts.min() >= 200 / depth / 4


def test_a_thousand_facts_have_a_thousand_names():
  task = Facts("kv", 1024)
  facts, _, _ = read(task, task.episodes("test", [0], [512]))
  assert len({fact.split(":")[0] for fact in facts}) == 1024


def test_what_there_is_not_is_refused():
  with pytest.raises(ValueError, match="variant is 'kvv'; one of kv, kv_uuid"):
    Facts("kvv")
  for n_facts in (3, 1025):
    with pytest.raises(ValueError, match=rf"n_facts = {n_facts} must lie in \[4, 1024\]"):
      Facts("kv", n_facts)
  with pytest.raises(ValueError, match="one of train, valid, test, got 'dev'"):
    TASKS["kv"].episodes("dev", [0], [0])
  for variant, index, depth in (("kv", -1, 0), ("kv", 0, N), ("kv", 0, -1), ("conflict", 0, 0)):
    with pytest.raises(ValueError, match=rf"got {index} and {depth}"):
      TASKS[variant].episodes("test", [index], [depth])


@every_variant
def test_lists_are_asked_about_everywhere(variant):
  task = TASKS[variant]
  q = 4 if variant in ASKABLE else 1
  lists = task.lists("train", range(60), q)
  assert lists.questions.shape[:2] == lists.answers.shape[:2] == lists.needed.shape[:2] == (60, q)
  for row in range(60):
    for i in range(q):
      one = lists._replace(questions=lists.questions[:, i], answers=lists.answers[:, i])
      facts, question, answer = read(task, one, row)
      assert lookup(variant, facts, question)[-1] == answer
      assert answer not in lookup(variant, np.delete(facts, lists.needed[row, i, -1]), question)
  places = lists.needed[..., 0]
  if q == 1:  # every depth in turn
    assert set(places[:, 0]) == set(range(task.depths(2)[0], N))
  else:  # each question in its part
    assert (places // (N // q) == np.arange(q)).all()
    assert len(set(places[:, 0])) == N // q


def test_lists_of_a_batch_share_no_name():
  task = TASKS["kv"]
  names = lambda indices: [tuple(ids[:2]) for ids in task.lists("train", indices).facts.reshape(-1, 4).tolist()]
  together = 3072 // N
  assert len(set(names(range(together)))) == 3072
  assert len(set(names(range(together // 2, together // 2 + together)))) < 3072  # of two shuffles
  again = task.lists("train", [5, 6])
  np.testing.assert_array_equal(again.facts[1], task.lists("train", [6]).facts[0])


def test_more_questions_than_can_be_asked_are_refused():
  for variant, n, most in (("kv", N + 1, N), ("kv", 0, N), ("needle", 2, 1)):
    with pytest.raises(ValueError, match=rf"n_questions = {n} must lie in \[1, {most}\]"):
      TASKS[variant].lists("train", [0], n)

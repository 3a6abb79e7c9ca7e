"""Answer scores against the official SQuAD and HotpotQA rules, written out again here in another form."""

import random
import re

import pytest

from selfrag_jax.metrics import answers

# fmt: off
WORDS = [
  "Paris", "the", "The", "a", "an", "The-Hague", "yes", "Yes!", "no", "noanswer", "No Answer", "city", "of", "...",
  "U.S.", "1,000", "theatre", "Ärger", "«Ç»", "new  york", "\tYork", "O'Neil", "",
]
# fmt: on


def random_text(rng):
  return rng.choice([" ", "  ", " \n"]).join(rng.choices(WORDS, k=rng.choice([0, 1, 1, 2, 3, 5])))


def random_pairs(n=1000):
  rng = random.Random(0)
  for _ in range(n):
    prediction, golds = random_text(rng), [random_text(rng) for _ in range(rng.randrange(4))]
    # independent texts rarely agree: often predict a gold answer, most of it, or its words in another order
    if golds and rng.random() < 0.5:
      words = rng.choice(golds).swapcase().split()
      prediction = " ".join(rng.choice([words, words[::-1]])) + rng.choice(["", "", ".", " city"])
    yield prediction, golds


def oracle_words(text):
  text = "".join(c for c in text.lower() if c not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
  return [word for word in re.sub(r"\b(?:a|an|the)\b", " ", text).split() if word]


def oracle_overlap(prediction, gold):
  """(F1, precision, recall) of two lists of words, shared words counted by crossing them off."""
  left, shared = list(gold), 0
  for word in prediction:
    if word in left:
      left.remove(word)
      shared += 1
  if shared == 0:
    return 0, 0, 0
  precision, recall = 1.0 * shared / len(prediction), 1.0 * shared / len(gold)
  return (2 * precision * recall) / (precision + recall), precision, recall


def oracle_squad2(prediction, golds):
  """(exact, F1) as the script of version 2.0 computes them for one question."""
  golds = [g for g in golds if oracle_words(g)]
  if not golds:
    golds = [""]
  exact = max(int(oracle_words(g) == oracle_words(prediction)) for g in golds)
  f1 = 0
  for words in map(oracle_words, golds):
    if not words or not oracle_words(prediction):
      f1 = max(f1, int(words == oracle_words(prediction)))
    else:
      f1 = max(f1, oracle_overlap(oracle_words(prediction), words)[0])
  return exact, f1


def oracle_hotpot(prediction, gold):
  """(em, F1, precision, recall) as HotpotQA's script computes them for one question."""
  p, g = oracle_words(prediction), oracle_words(gold)
  closed = (["yes"], ["no"], ["noanswer"])
  if (p in closed and p != g) or (g in closed and p != g):
    return 0, 0, 0, 0
  return p == g, *oracle_overlap(p, g)


def oracle_facts(predicted, gold):
  predicted, gold = {tuple(x) for x in predicted}, {tuple(x) for x in gold}
  tp = sum(x in gold for x in predicted)
  fp, fn = len(predicted) - tp, sum(x not in predicted for x in gold)
  precision = 1.0 * tp / (tp + fp) if tp + fp > 0 else 0.0
  recall = 1.0 * tp / (tp + fn) if tp + fn > 0 else 0.0
  f1 = 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0
  return (1.0 if fp + fn == 0 else 0.0), f1, precision, recall


def test_normalisation_follows_the_official_order():
  for text, expected in [
    ("The  Hague,\tNL", "hague nl"),
    ("The-Hague", "thehague"),  # punctuation goes before articles: no article is left to drop
    ("a theatre and an anthem", "theatre and anthem"),
    ("«Ärger»", "«ärger»"),  # only ASCII punctuation
    ("the.", ""),
  ]:
    assert answers.normalize_answer(text) == expected


def test_squad_scores_are_bit_equal_on_random_pairs():
  scores = [(answers.exact_match(p, g), answers.squad_f1(p, g)) for p, g in random_pairs()]
  assert scores == [oracle_squad2(p, g) for p, g in random_pairs()]
  assert len({f1 for _, f1 in scores}) > 5  # the pairs reach partial credit, not only 0 and 1


def test_squad_1_1_is_the_same_where_every_gold_keeps_a_word():
  pairs = [(p, g) for p, g in random_pairs() if g and all(map(oracle_words, g))]
  assert len(pairs) > 300
  for prediction, golds in pairs:
    words = oracle_words(prediction)
    assert answers.exact_match(prediction, golds) == max(words == oracle_words(g) for g in golds)
    assert answers.squad_f1(prediction, golds) == max(oracle_overlap(words, oracle_words(g))[0] for g in golds)


def test_hotpot_scores_are_bit_equal_on_random_pairs():
  closed = 0
  for prediction, golds in random_pairs():
    for gold in golds:
      assert answers.answer_scores(prediction, gold) == oracle_hotpot(prediction, gold)
      assert answers.exact_match(prediction, gold) == oracle_hotpot(prediction, gold)[0]
    assert answers.hotpot_f1(prediction, golds) == max((oracle_hotpot(prediction, g)[1] for g in golds), default=0)
    closed += answers.hotpot_f1(prediction, golds) != answers.squad_f1(prediction, golds)
  assert closed > 20  # the pairs reach the cases where the two rules differ


def test_supporting_fact_and_joint_scores_are_bit_equal_on_random_pairs():
  rng = random.Random(1)
  facts = [[title, sentence] for title in "ABC" for sentence in range(2)]
  seen = set()
  for prediction, golds in random_pairs():
    predicted, gold = rng.choices(facts, k=rng.randrange(4)), rng.choices(facts, k=rng.randrange(4))
    scores = answers.supporting_fact_scores(predicted, gold)
    assert scores == oracle_facts(predicted, gold)
    answer = (golds or [""])[0]
    em, _, precision, recall = oracle_hotpot(prediction, answer)
    joint_precision, joint_recall = precision * scores.precision, recall * scores.recall
    joint_f1 = 0.0
    if joint_precision + joint_recall > 0:
      joint_f1 = 2 * joint_precision * joint_recall / (joint_precision + joint_recall)
    joint = answers.joint_scores(answers.answer_scores(prediction, answer), scores)
    assert joint == (em * scores.em, joint_f1, joint_precision, joint_recall)
    seen.add(joint)
  assert len(seen) > 10


def test_yes_no_and_noanswer_get_no_partial_credit_in_hotpotqa_only():
  assert answers.squad_f1("no city", "no") == pytest.approx(2 / 3)
  assert answers.hotpot_f1("no city", "no") == answers.hotpot_f1("no", "no city") == 0
  assert answers.hotpot_f1("No.", "no") == 1


def test_an_unanswerable_question_wants_an_empty_answer():
  for golds in ([], "", ["the", "..."]):
    assert answers.exact_match("", golds) == answers.squad_f1("the", golds) == answers.substring_match("", golds) == 1
    assert answers.exact_match("x", golds) == answers.squad_f1("x", golds) == answers.substring_match("x", golds) == 0
  assert answers.squad_f1("", "Paris") == answers.substring_match("", "Paris") == 0
  assert answers.hotpot_f1("", "") == 0  # HotpotQA's rule


def test_the_best_gold_counts_and_a_lone_string_is_one_gold():
  assert answers.exact_match("the Paris", ["London", "paris!"]) == answers.exact_match("Paris", "Paris") == 1
  assert answers.squad_f1("New York City", ["Boston", "York", "New York"]) == pytest.approx(0.8)
  assert answers.exact_match("P", "Paris") == 0


def test_substring_match_finds_a_normalised_gold_inside():
  assert answers.substring_match("It is the New  York Times.", ["Boston", "new york"]) == 1
  assert answers.substring_match("New York", "New York City") == 0
  assert answers.substring_match("I know", "no") == 1  # characters, as published

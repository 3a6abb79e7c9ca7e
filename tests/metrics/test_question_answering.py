"""All scores of one answered question, on cases whose scores are known."""

import math

import pytest

from selfrag_jax.metrics.answers import hotpot_f1
from selfrag_jax.metrics.question_answering import NAN, score_question

OSLO = ("Oslo", "Oslo is the capital of Norway.")
SEA = ("Sea", "The sea is deep.")
BERGEN = ("Bergen", "Bergen lies in Norway, west of Oslo.")
UNKNOWN = "I don't know"


def shown(scores):
  return {name: value for name, value in scores._asdict().items() if not math.isnan(value)}


def test_a_cited_right_answer():
  scores = score_question("Oslo is the capital of Norway [1].", ["Oslo"], [OSLO, SEA], [OSLO], UNKNOWN)
  assert shown(scores) == {
    "em": 0.0, "f1": pytest.approx(2 / 6), "contains": 1.0, "abstained": 0.0, "recall": 1.0, "precision": 0.5,
    "all_gold": 1.0, "facts_f1": 1.0, "joint_f1": pytest.approx(2 / 6), "citation_recall": 1.0,
    "citation_precision": 1.0, "supported": 1.0,
  }  # fmt: skip


def test_without_a_citation_all_passages_are_the_supporting_facts():
  scores = score_question("Oslo", ["Oslo", "the city of Oslo"], [SEA, OSLO], [OSLO, BERGEN], UNKNOWN)
  assert (scores.em, scores.recall, scores.precision, scores.all_gold) == (1.0, 0.5, 0.5, 0.0)
  assert scores.facts_f1 == scores.joint_f1 == 0.5
  assert (scores.citation_recall, scores.citation_precision) == (0.0, 0.0)


def test_a_forged_citation_is_wrong():
  scores = score_question("Oslo is the capital of Norway [7].", ["Oslo"], [OSLO], [OSLO], UNKNOWN)
  assert (scores.citation_recall, scores.citation_precision, scores.facts_f1) == (0.0, 0.0, 0.0)


def test_a_claim_that_no_passage_holds():
  scores = score_question("Oslo is not the capital of Norway.", ["Oslo"], [OSLO], [OSLO], UNKNOWN)
  assert scores.supported == 0.0


@pytest.mark.parametrize("said", ["I don't know.", "I don’t know", "", "[1]", "The passages do not mention a capital."])
@pytest.mark.parametrize(("answers", "right"), [((), 1.0), (("Oslo",), 0.0)])
def test_not_to_know_is_right_where_there_is_no_answer(answers, right, said):
  scores = score_question(said, answers, [SEA], [SEA], UNKNOWN)
  assert (scores.em, scores.f1, scores.contains, scores.abstained) == (right, right, right, 1.0)
  assert math.isnan(scores.supported)
  assert scores.recall == 1.0


@pytest.mark.parametrize(
  ("said", "gold"),
  [
    ("Unknown", "Unknown"),
    ("No documents are required", "No documents are required"),
    ("There is no evidence that he did; the answer is no", "no"),
    ("I don't know much about him. The passage says Paris.", "Lyon"),
  ],
)
def test_an_answer_that_only_sounds_like_not_knowing_is_scored(said, gold):
  scores = score_question(said, [gold], [SEA], [SEA], UNKNOWN)
  assert scores.abstained == 0.0
  assert scores.contains == float(gold != "Lyon")


def test_scores_that_do_not_apply_are_no_numbers():
  alone = score_question("Oslo", ["Oslo"], None, [OSLO], UNKNOWN)
  assert shown(alone) == {"em": 1.0, "f1": 1.0, "contains": 1.0, "abstained": 0.0}
  assert "recall" not in shown(score_question("Oslo", ["Oslo"], [OSLO], [], UNKNOWN))
  nothing = score_question("Oslo", ["Oslo"], [], [OSLO], UNKNOWN)  # a search that found nothing
  passages = "recall", "precision", "all_gold", "facts_f1", "joint_f1"
  assert {name: value for name, value in shown(nothing).items() if name in passages} == dict.fromkeys(passages, 0.0)
  assert math.isnan(nothing.supported)
  assert math.isnan(NAN)


def test_the_f1_is_that_of_the_data_set():
  assert score_question("no one", ["no"], None, [], UNKNOWN).f1 > 0.5
  assert score_question("no one", ["no"], None, [], UNKNOWN, hotpot_f1).f1 == 0.0

"""Answer scores by the official SQuAD and HotpotQA rules: exact match, F1, supporting facts, joint.

Sources: SQuAD's `evaluate-v1.1.py` and `evaluate-v2.0.py` (arXiv 1606.05250, 1806.03822) and HotpotQA's
`hotpot_evaluate_v1.py` (arXiv 1809.09600). The two F1 rules differ: HotpotQA gives no partial credit to yes, no and
noanswer, and nothing for an empty answer; SQuAD 2.0 scores 1 for the empty answer of an unanswerable question. SQuAD
1.1 and 2.0 agree on golds that keep a word after normalisation.

Every score lies in [0, 1], higher is better. `golds` is one accepted answer or several; the best score counts.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})


class AnswerScores(NamedTuple):
  """Exact match, F1, precision and recall of one example."""

  em: float
  f1: float
  precision: float
  recall: float


def normalize_answer(text: str) -> str:
  """Lowercase, drop ASCII punctuation, drop the articles, and squeeze white space, in the official order."""
  return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def exact_match(prediction: str, golds: str | Sequence[str]) -> float:
  """Score 1.0 if the normalised prediction equals a gold answer, or is empty where there are no golds."""
  return float(normalize_answer(prediction) in _normalized_golds(golds))


def squad_f1(prediction: str, golds: str | Sequence[str]) -> float:
  """Score the bag of words against the best gold by SQuAD 2.0; no golds: 1.0 if the prediction is empty, else 0.0."""
  words = normalize_answer(prediction).split()
  gold_words = [gold.split() for gold in _normalized_golds(golds)]
  return max(_overlap(words, gold).f1 if words and gold else float(words == gold) for gold in gold_words)


def hotpot_f1(prediction: str, golds: str | Sequence[str]) -> float:
  """Score the bag of words against the best gold by HotpotQA: yes, no and noanswer are all or nothing."""
  return max(answer_scores(prediction, gold).f1 for gold in _normalized_golds(golds))


def substring_match(prediction: str, golds: str | Sequence[str]) -> float:
  """Score 1.0 if the normalised prediction contains a normalised gold answer, or is empty where there are no golds.

  The "subspan" match of arXiv 2307.03172. It compares characters, so that a gold "no" is found inside "know":
  use it for long answers to names and numbers, never as a reward.
  """
  prediction = normalize_answer(prediction)
  return float(any(gold in prediction if gold else not prediction for gold in _normalized_golds(golds)))


def answer_scores(prediction: str, gold: str) -> AnswerScores:
  """Score an answer against one gold by HotpotQA's rule (two empty answers: exact match 1, all else 0)."""
  prediction, gold = normalize_answer(prediction), normalize_answer(gold)
  em = float(prediction == gold)
  # the bag of words would give "no" partial credit for "no one", but an answer of a closed set is right or wrong
  if not em and CLOSED_ANSWERS & {prediction, gold}:
    return AnswerScores(0.0, 0.0, 0.0, 0.0)
  # a bag of words ignores the order, the exact match does not
  return _overlap(prediction.split(), gold.split())._replace(em=em)


def supporting_fact_scores(predicted: Iterable[Sequence], gold: Iterable[Sequence]) -> AnswerScores:
  """Score the predicted supporting facts, (title, sentence index) pairs in any order, as sets against the gold ones."""
  predicted, gold = set(map(tuple, predicted)), set(map(tuple, gold))
  return _scores(len(predicted & gold), len(predicted), len(gold))


def joint_scores(answer: AnswerScores, facts: AnswerScores) -> AnswerScores:
  """Combine answer and supporting-fact scores: precisions and recalls multiply, F1 follows from the products."""
  precision, recall = answer.precision * facts.precision, answer.recall * facts.recall
  return AnswerScores(answer.em * facts.em, _harmonic_mean(precision, recall), precision, recall)


def _normalized_golds(golds: str | Sequence[str]) -> list[str]:
  """Apply SQuAD 2.0's rule: drop golds that normalise to nothing; the empty answer stands for no golds at all."""
  golds = [golds] if isinstance(golds, str) else golds
  return [text for text in map(normalize_answer, golds) if text] or [""]


def _overlap(prediction: list[str], gold: list[str]) -> AnswerScores:
  return _scores((Counter(prediction) & Counter(gold)).total(), len(prediction), len(gold))


def _scores(shared: int, predicted: int, gold: int) -> AnswerScores:
  precision = shared / predicted if predicted else 0.0
  recall = shared / gold if gold else 0.0
  return AnswerScores(float(shared == predicted == gold), _harmonic_mean(precision, recall), precision, recall)


def _harmonic_mean(precision: float, recall: float) -> float:
  return 2 * precision * recall / (precision + recall) if precision + recall else 0.0

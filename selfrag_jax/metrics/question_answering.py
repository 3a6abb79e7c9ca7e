"""All scores of one answered question: the answer, the passages that were shown, and what the answer says of them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from selfrag_jax.metrics.abstention import says_unknown
from selfrag_jax.metrics.answers import (
  answer_scores,
  exact_match,
  joint_scores,
  normalize_answer,
  squad_f1,
  substring_match,
  supporting_fact_scores,
)
from selfrag_jax.metrics.citations import citation_scores, extract_citations_from_response, remove_citations
from selfrag_jax.metrics.claims import check_hallucination
from selfrag_jax.metrics.retrieval import all_found, compute_retrieval_precision, compute_retrieval_recall
from selfrag_jax.metrics.sentences import split_sentences

NAN = float("nan")


class QuestionScores(NamedTuple):
  """The scores, in [0, 1]; NaN where a score does not apply.

  `em`, `f1` and `contains` compare the answer with the accepted ones, `abstained` is whether the answer is that it is
  not known. `recall`, `precision` and `all_gold` are those of the passages shown; the supporting facts of an answer are
  the passages that it cites, or else all that were shown, and `joint_f1` combines them with the answer. `supported` is
  the share of its claims that the passages support.
  """

  em: float
  f1: float
  contains: float
  abstained: float
  recall: float = NAN
  precision: float = NAN
  all_gold: float = NAN
  facts_f1: float = NAN
  joint_f1: float = NAN
  citation_recall: float = NAN
  citation_precision: float = NAN
  supported: float = NAN


def score_question(
  completion: str,
  answers: Sequence[str],
  passages: Sequence[tuple[str, str]] | None,
  gold: Sequence[tuple[str, str]],
  unknown: str,
  f1: Callable[[str, Sequence[str]], float] = squad_f1,
) -> QuestionScores:
  """Score a completion beside the passages that it read, all as (title, text); None: it was to read none.

  `unknown`, an empty completion, and a single sentence that says that its author or the passages do not know and holds
  no accepted answer, count as no answer: right where there are no `answers`. `f1` is the rule of the
  data set. Where no passage was found, the scores of passages are 0. They are NaN without gold passages, and those of
  claims where there is no answer or no passage.
  """
  text = remove_citations(completion)
  plain = normalize_answer(text.replace("’", "'"))
  abstained = plain in ("", normalize_answer(unknown)) or (
    says_unknown(text) and len(split_sentences(text)) == 1 and not substring_match(text, answers)
  )
  said = "" if abstained else text
  scores = QuestionScores(
    exact_match(said, answers), f1(said, answers), substring_match(said, answers), float(abstained)
  )
  if passages is None:
    return scores
  if gold:
    ids, relevant = [str(passage) for passage in passages], [str(passage) for passage in gold]
    numbers = {number for statement in extract_citations_from_response(completion) for number in statement.citations}
    # a number that no passage has names something that is no fact
    facts = [passages[n - 1] if 0 < n <= len(passages) else (n, "") for n in sorted(numbers)] or list(passages)
    supporting = supporting_fact_scores(facts, gold)
    best = max((answer_scores(said, answer) for answer in answers or ("",)), key=lambda found: found.f1)
    scores = scores._replace(
      recall=compute_retrieval_recall(ids, relevant),
      precision=compute_retrieval_precision(ids, relevant),
      all_gold=all_found(ids, relevant),
      facts_f1=supporting.f1,
      joint_f1=joint_scores(best, supporting).f1,
    )
  if abstained or not passages:
    return scores
  cited = citation_scores(completion, [f"{title}\n{text}" for title, text in passages])
  claims = check_hallucination(text, [f"{title}\n{text}" for title, text in passages])
  return scores._replace(
    citation_recall=cited.recall,
    citation_precision=cited.precision,
    supported=claims["verification_rate"] if claims["total_facts"] else NAN,
  )

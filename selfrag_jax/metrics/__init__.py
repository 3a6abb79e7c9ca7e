"""Pure functions: scores of answers, and the statistics that say what they are worth."""

from typing import TYPE_CHECKING

from selfrag_jax.lazy import lazy_names

if TYPE_CHECKING:
  from selfrag_jax.metrics.answers import AnswerScores as AnswerScores
  from selfrag_jax.metrics.answers import answer_scores as answer_scores
  from selfrag_jax.metrics.answers import exact_match as exact_match
  from selfrag_jax.metrics.answers import hotpot_f1 as hotpot_f1
  from selfrag_jax.metrics.answers import joint_scores as joint_scores
  from selfrag_jax.metrics.answers import normalize_answer as normalize_answer
  from selfrag_jax.metrics.answers import squad_f1 as squad_f1
  from selfrag_jax.metrics.answers import substring_match as substring_match
  from selfrag_jax.metrics.answers import supporting_fact_scores as supporting_fact_scores
  from selfrag_jax.metrics.position import u_shape as u_shape
  from selfrag_jax.metrics.retrieval import compute_retrieval_precision as compute_retrieval_precision
  from selfrag_jax.metrics.retrieval import compute_retrieval_recall as compute_retrieval_recall
  from selfrag_jax.metrics.retrieval import ndcg as ndcg
  from selfrag_jax.metrics.retrieval import reciprocal_rank as reciprocal_rank
  from selfrag_jax.metrics.statistics import Interval as Interval
  from selfrag_jax.metrics.statistics import bootstrap_difference as bootstrap_difference
  from selfrag_jax.metrics.statistics import bootstrap_interval as bootstrap_interval
  from selfrag_jax.metrics.statistics import mcnemar as mcnemar
  from selfrag_jax.metrics.statistics import wilson_interval as wilson_interval
else:
  __getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
      "answers": [
        "AnswerScores",
        "answer_scores",
        "exact_match",
        "hotpot_f1",
        "joint_scores",
        "normalize_answer",
        "squad_f1",
        "substring_match",
        "supporting_fact_scores",
      ],
      "position": ["u_shape"],
      "retrieval": ["compute_retrieval_precision", "compute_retrieval_recall", "ndcg", "reciprocal_rank"],
      "statistics": ["Interval", "bootstrap_difference", "bootstrap_interval", "mcnemar", "wilson_interval"],
    },
  )

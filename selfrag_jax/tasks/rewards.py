"""Rewards of a searching policy: for its answer, and a little for the documents that it found."""

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from selfrag_jax.checked import Checked, Share, Weight


@dataclasses.dataclass(frozen=True)
class RAGRewardWeights(Checked):
  """The weights of the terms of `compute_rag_reward`, which are divided by their sum."""

  answer: Weight = 0.6
  relevance: Weight = 0.3
  efficiency: Weight = 0.1
  citations: Weight = 0.0
  grounding: Weight = 0.0
  format: Weight = 0.0

  def __post_init__(self):
    super().__post_init__()
    if not sum(vars(self).values()) > 0:
      raise ValueError("all weights of the reward are 0: nothing would be rewarded")


@dataclasses.dataclass(frozen=True)
class RewardConfig(Checked):
  """A right answer earns 1. A wrong answer earns the weighted sum of its F1 and the share of gold documents found.

  With `terms = "weighted"` the reward is the mean of `compute_rag_reward` instead, by `weights`; its answer is scored
  by F1, or by the reward model that was trained in the workdir `model`.

  The reward is multiplied by `invalid_factor` if the rollout broke the format: turns that are too long are closed by
  force, and without a penalty the policy unlearns to close them itself.

  The retrieval term gives the first gradient: until the right documents are found, hardly any answer is right. With F1
  alone as reward the policy collapses into not answering, so F1 weighs less than an exact match.
  """

  f1_weight: Share = 0.0
  retrieval_weight: Share = 0.3
  invalid_factor: Share = 0.5
  terms: Literal["right_answer", "weighted"] = "right_answer"
  weights: RAGRewardWeights = RAGRewardWeights()
  model: str = ""

  def __post_init__(self):
    super().__post_init__()
    if self.model and self.terms != "weighted":
      raise ValueError("reward.model scores the answers of the weighted reward: set reward.terms = weighted, too")


def search_reward(
  config: RewardConfig, exact: np.ndarray, f1: np.ndarray, gold_recall: np.ndarray, valid: np.ndarray
) -> np.ndarray:
  """Return float32 rewards in [0, 1] for arrays of one shape; they are monotone in each array."""
  partial = config.f1_weight * f1 + config.retrieval_weight * gold_recall
  earned = np.where(exact > 0, 1.0, np.clip(partial, 0.0, 1.0))
  return (earned * np.where(valid > 0, 1.0, config.invalid_factor)).astype(np.float32)


def compute_rag_reward(
  answer: ArrayLike,
  relevance: ArrayLike,
  searches: ArrayLike,
  max_searches: int,
  weights: RAGRewardWeights = RAGRewardWeights(),
  *,
  citations: ArrayLike = 1.0,
  grounding: ArrayLike = 1.0,
  format: ArrayLike = 1.0,
) -> np.ndarray:
  """Return the weighted mean of the terms as float32 rewards in [0, 1], for numbers or arrays of one shape.

  Args:
    answer: the score of the answer, in [0, 1], as all other terms.
    relevance: the share of the gold documents that were found.
    searches: the number of searches, whose efficiency is the share of `max_searches` that was not needed.
    citations: the score of the answer's citations.
    grounding: the share of the answer's claims that the documents support; 1 minus the rate of hallucination.
    format: whether the rollout kept the format.

  Higher terms, and fewer searches, never lower the reward. Raises ValueError for a term outside [0, 1] and for
  `max_searches` below 1.
  """
  if max_searches < 1:
    raise ValueError(f"max_searches = {max_searches} must be at least 1")
  efficiency = 1 - np.asarray(searches, np.float64) / max_searches
  given = {"answer": answer, "relevance": relevance, "efficiency": efficiency}
  given |= {"citations": citations, "grounding": grounding, "format": format}
  total = 0.0
  for name, values in given.items():
    values = np.asarray(values, np.float64)
    if not ((values >= 0) & (values <= 1)).all():
      allowed = f"searches must lie in [0, {max_searches}]" if name == "efficiency" else f"{name} must lie in [0, 1]"
      raise ValueError(f"{allowed}, got {values.min():g} to {values.max():g}")
    total = total + getattr(weights, name) * values
  return np.asarray(total / sum(vars(weights).values()), np.float32)

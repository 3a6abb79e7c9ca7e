"""Rewards of a searching policy: for its answer, and a little for the documents that it found."""

import dataclasses

import numpy as np

from selfrag_jax.checked import Checked, Share


@dataclasses.dataclass(frozen=True)
class RewardConfig(Checked):
  """A right answer earns 1. A wrong answer earns the weighted sum of its F1 and the share of gold documents found.

  The reward is multiplied by `invalid_factor` if the rollout broke the format: turns that are too long are closed by
  force, and without a penalty the policy unlearns to close them itself.

  The retrieval term gives the first gradient: until the right documents are found, hardly any answer is right. With F1
  alone as reward the policy collapses into not answering, so F1 weighs less than an exact match.
  """

  f1_weight: Share = 0.0
  retrieval_weight: Share = 0.3
  invalid_factor: Share = 0.5


def search_reward(
  config: RewardConfig, exact: np.ndarray, f1: np.ndarray, gold_recall: np.ndarray, valid: np.ndarray
) -> np.ndarray:
  """Return float32 rewards in [0, 1] for arrays of one shape; they are monotone in each array."""
  partial = config.f1_weight * f1 + config.retrieval_weight * gold_recall
  earned = np.where(exact > 0, 1.0, np.clip(partial, 0.0, 1.0))
  return (earned * np.where(valid > 0, 1.0, config.invalid_factor)).astype(np.float32)

"""The rewards of finished rollouts: from their scores, their texts and a reward model, as the config asks for."""

from collections.abc import Callable

import numpy as np

from selfrag_jax.mesh import own_part
from selfrag_jax.metrics.citations import citation_scores
from selfrag_jax.metrics.claims import check_hallucination
from selfrag_jax.tasks.rewards import RewardConfig, compute_rag_reward, search_reward
from selfrag_jax.train.load import load_reward_model
from selfrag_jax.train.rollouts import Episodes, RolloutRunner, Scores

Said = tuple[str, list[str]]  # an answer, and the documents that were found for it


class RolloutRewards:
  """The reward of each rollout of a runner, with the reward model that the config names."""

  def __init__(self, runner: RolloutRunner, config: RewardConfig, max_searches: int):
    """Raises like `load_reward_model` if the config names a model."""
    self._runner, self._config, self._max_searches = runner, config, max(max_searches, 1)
    tokenizer, mesh = runner.task.tokenizer, runner.mesh
    self._model = load_reward_model(config.model, tokenizer=tokenizer, mesh=mesh) if config.model else None

  def __call__(self, episodes: Episodes, scores: Scores) -> np.ndarray:
    """Return rewards float32 [B] in [0, 1]."""
    config, host = self._config, episodes.host
    if config.terms == "right_answer":
      return search_reward(config, scores.exact_match, scores.f1, scores.gold_recall, scores.valid)
    done = episodes.rollout
    answer = scores.f1 if self._model is None else own_part(self._model(done.tokens, done.lengths))
    given = answer, scores.gold_recall, host.searches, self._max_searches, config.weights
    return compute_rag_reward(*given, **self._of_texts(lambda: self._said(episodes)), format=scores.valid)

  def of_right_answers(self, said: list[Said], recall: np.ndarray, searches: np.ndarray) -> np.ndarray:
    """Return what well-formed rollouts with right answers would earn, by what they found and said, float32 [B].

    A reward model is left out: the answers are known to be right.
    """
    config, ones = self._config, np.ones(len(said))
    if config.terms == "right_answer":
      return search_reward(config, ones, ones, recall, ones)
    given = ones, recall, searches, self._max_searches, config.weights
    return compute_rag_reward(*given, **self._of_texts(lambda: said))

  def _said(self, episodes: Episodes) -> list[Said]:
    corpus, decode = episodes.batch.corpus, self._runner.task.tokenizer.decode
    pairs = []
    for transcript, slots in zip(episodes.transcripts, episodes.host.slots, strict=True):
      found = dict.fromkeys(slot for slot in slots.reshape(-1).tolist() if slot >= 0)
      documents = [decode(corpus.tokens[slot, : corpus.lengths[slot]].tolist(), skip_special=True) for slot in found]
      pairs.append((decode(transcript.answer, skip_special=True) if transcript.answer else "", documents))
    return pairs

  def _of_texts(self, said: Callable[[], list[Said]]) -> dict[str, np.ndarray]:
    """Score what was said by the terms that have a weight; without one, a term plays no role."""
    measures = {"citations": _citations, "grounding": _grounding}
    asked = {name: measure for name, measure in measures.items() if getattr(self._config.weights, name)}
    pairs = said() if asked else []
    return {name: np.array([measure(*pair) for pair in pairs]) for name, measure in asked.items()}


def _grounding(answer: str, documents: list[str]) -> float:
  return check_hallucination(answer, documents)["verification_rate"]


def _citations(answer: str, documents: list[str]) -> float:
  """Return the harmonic mean of the recall and the precision of an answer's citations."""
  scores = citation_scores(answer, documents)
  return 2 * scores.recall * scores.precision / max(scores.recall + scores.precision, 1e-12)

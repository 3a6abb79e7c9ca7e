"""The rewards of finished rollouts: from their scores, their texts and a reward model, as the config asks for."""

import numpy as np

from selfrag_jax.mesh import own_part
from selfrag_jax.metrics.citations import citation_scores
from selfrag_jax.metrics.claims import check_hallucination
from selfrag_jax.tasks.rewards import RewardConfig, compute_rag_reward, search_reward
from selfrag_jax.train.load import load_reward_model
from selfrag_jax.train.rollouts import Episodes, RolloutRunner, Scores


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
    texts = {name: self._of_texts(episodes, name) for name in ("citations", "grounding")}
    given = answer, scores.gold_recall, host.searches, self._max_searches, config.weights
    return compute_rag_reward(*given, **texts, format=scores.valid)

  def _of_texts(self, episodes: Episodes, name: str) -> np.ndarray | float:
    """Score the answers against the documents that were found; without a weight, the value plays no role."""
    if not getattr(self._config.weights, name):
      return 0.0
    measure = _grounding if name == "grounding" else _citations
    corpus, decode = episodes.batch.corpus, self._runner.task.tokenizer.decode
    scores = []
    for transcript, slots in zip(episodes.transcripts, episodes.host.slots, strict=True):
      found = dict.fromkeys(slot for slot in slots.reshape(-1).tolist() if slot >= 0)
      documents = [decode(corpus.tokens[slot, : corpus.lengths[slot]].tolist(), skip_special=True) for slot in found]
      said = decode(transcript.answer, skip_special=True) if transcript.answer else ""
      scores.append(measure(said, documents))
    return np.array(scores)


def _grounding(answer: str, documents: list[str]) -> float:
  return check_hallucination(answer, documents)["verification_rate"]


def _citations(answer: str, documents: list[str]) -> float:
  """Return the harmonic mean of the recall and the precision of an answer's citations."""
  scores = citation_scores(answer, documents)
  return 2 * scores.recall * scores.precision / max(scores.recall + scores.precision, 1e-12)

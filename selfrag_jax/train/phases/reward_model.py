"""Training of a reward model on preference pairs: of two conversations, the better one is to score higher.

The loss is -log sigmoid(r_chosen - r_rejected), the Bradley-Terry model (InstructGPT, arXiv 2203.02155, equation 1). It
leaves the zero of the scores open; a small penalty on the sum of a pair's scores puts it halfway between the two
(arXiv 2312.09244), so that the sigmoid of a score can serve as a reward.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from selfrag_jax.checked import Count, Weight
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.reward_model import add_head, init_reward_model, score
from selfrag_jax.ragged import pad_rows
from selfrag_jax.train.phases.base import BatchConfig, GradientPhase, Start
from selfrag_jax.train.state import LossSums
from selfrag_jax.typing import Array, ArrayLike, Params

RenderedPair = tuple[Sequence[int], Sequence[int]]  # the token ids of the chosen and of the rejected conversation


@dataclasses.dataclass(frozen=True)
class RewardModelConfig(BatchConfig):
  """Training of a reward model on preference pairs."""

  steps: Count = 300
  batch_size: Count = 32  # pairs
  max_tokens: Count = 64  # of a conversation; a pair with a longer one is counted, and the next one takes its place
  center_weight: Weight = 0.01  # of the squared sum of a pair's scores


class RewardModelPhase(GradientPhase):
  """The phase. It starts from `params` of a language model, and gives those of a reward model.

  `render(index)` gives pair after pair. `size`: the number of pairs in an epoch; the indices go on over all epochs.
  None: none comes twice, and one that is longer than a row is an error.
  """

  best_metric = "accuracy"

  def __init__(
    self,
    name: str,
    render: Callable[[int], RenderedPair],
    size: int | None,
    model: ModelConfig,
    config: RewardModelConfig,
    **start: Unpack[Start],
  ):
    config.check_mesh(start["mesh"], name)
    if start["params"] is not None:
      start["params"] = add_head(model, start["params"])
    super().__init__(name, partial(init_reward_model, model), config, **start)
    self._model, self._config, self._size = model, config, size
    self._rendered = lru_cache(4 * config.batch_size)(render)
    if size is not None:
      self._check_lengths(render, size)

  def batch(self, step: int) -> dict[str, np.ndarray]:
    """Return tokens int32 [B, 2, T] and lengths [B, 2] of pairs, the chosen conversation first."""
    pairs = [self._fitting(row) for row in self._rows(step, self._config.batch_size)]
    tokens, lengths = pad_rows([ids for pair in pairs for ids in pair], self._config.max_tokens)
    return {"tokens": tokens.reshape(len(pairs), 2, -1), "lengths": lengths.reshape(-1, 2)}

  def metadata(self) -> dict[str, Any]:
    return {**super().metadata(), "head": "reward"}

  def _fitting(self, index: int) -> RenderedPair:
    """Return the first pair from `index` on that fits into the rows."""
    most = self._config.max_tokens
    while (longest := max(map(len, self._rendered(index)))) > most:
      if self._size is None:
        raise ValueError(f"a conversation of {longest} tokens exceeds {self.name}.max_tokens = {most}")
      index += 1
    return self._rendered(index)

  def _check_lengths(self, render: Callable[[int], RenderedPair], size: int) -> None:
    if not size:
      raise ValueError(f"there are no preference pairs to train {self.name} on")
    most = self._config.max_tokens
    too_long = sum(max(map(len, render(index))) > most for index in range(size))
    if too_long == size:
      raise ValueError(f"none of {size} preference pairs fits into {self.name}.max_tokens = {most}")
    if too_long:
      logging.warning("%d of %d preference pairs exceed %s.max_tokens: left out", too_long, size, self.name)

  def _count_tokens(self, batch: dict[str, Array]) -> Array:
    return batch["lengths"].sum()

  def _loss(self, params: Params, batch: dict[str, Array], *_: Any) -> LossSums:
    tokens, lengths = batch["tokens"], batch["lengths"]
    scores = score(self._model, params, tokens.reshape(-1, tokens.shape[2]), lengths.reshape(-1)).reshape(-1, 2)
    return preference_loss(scores[:, 0], scores[:, 1], self._config.center_weight)


def preference_loss(chosen_B: Array, rejected_B: Array, center_weight: float) -> LossSums:
  """Sum -log sigmoid(chosen - rejected) + center_weight (chosen + rejected)^2 and the `accuracy` over the pairs."""
  margins = chosen_B - rejected_B
  losses = jax.nn.softplus(-margins) + center_weight * (chosen_B + rejected_B) ** 2
  return LossSums(losses.sum(), jnp.asarray(len(margins), losses.dtype), {"accuracy": ranked_right(margins).sum()})


def ranked_right(margins: ArrayLike) -> Array:
  """Return 1 where the chosen conversation scores higher, 0 where the rejected one does, 1/2 for a tie."""
  return (jnp.sign(margins) + 1) / 2

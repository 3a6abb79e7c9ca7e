"""Language modelling on packed rows: every token is predicted from the tokens before it in its document."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from selfrag_jax.checked import Count, Weight
from selfrag_jax.mesh import spread
from selfrag_jax.model.config import ModelConfig, StepWork, flops_per_token
from selfrag_jax.model.lm import init_params
from selfrag_jax.train.lora import LoRAConfig
from selfrag_jax.train.losses import masked_lm_loss
from selfrag_jax.train.phases.base import FULL, BatchConfig, GradientPhase, Start
from selfrag_jax.train.state import LossSums
from selfrag_jax.typing import Params

Rows = dict[str, np.ndarray]  # tokens, segment_ids, mask [B, T]


@dataclasses.dataclass(frozen=True)
class PretrainConfig(BatchConfig):
  """Language modelling on packed rows."""

  steps: Count = 300
  batch_size: Count = 64
  valid_rows: Count = 256  # rows of an evaluation, rounded up to whole batches
  needed_loss: Weight = 0.0  # highest validation loss with which the next phase may begin; 0: any


class LanguagePhase(GradientPhase):
  """A phase of language modelling on packed rows, whatever they hold."""

  def __init__(
    self, name: str, model: ModelConfig, config: BatchConfig, lora: LoRAConfig = FULL, **start: Unpack[Start]
  ):
    config.check_mesh(start["mesh"], name)
    super().__init__(name, partial(init_params, model), config, lora, **start)
    self._model, self._batch_size = model, config.batch_size

  def model_work(self) -> StepWork | None:
    if self._lora.rank:
      return None
    rows, width = self._batch_size, self.batch(0)["tokens"].shape[1]
    return StepWork(rows * width, 3.0 * rows * width * flops_per_token(self._model, width // 2))

  def _count_tokens(self, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.count_nonzero(batch["segment_ids"])

  def _loss(self, params: Params, batch: dict[str, jax.Array], *_: Any) -> LossSums:
    return masked_lm_loss(self._model, params, batch)


class Pretrain(LanguagePhase):
  """The phase. `rows(split, indices)` returns its data; it starts from `params`, or from fresh ones if None."""

  def __init__(
    self,
    name: str,
    rows: Callable[[str, Sequence[int]], Rows],
    model: ModelConfig,
    config: PretrainConfig,
    *,
    mesh: Mesh,
    seed: int,
    params: Params | None = None,
  ):
    super().__init__(name, model, config, mesh=mesh, seed=seed, params=params, evaluate=self._held_out_loss)
    self._text, self._config = rows, config
    self._valid = jax.jit(lambda params, batch: masked_lm_loss(model, params, batch)[:2])

  def batch(self, step: int) -> Rows:
    """Return the rows of a step."""
    return self._text("train", self._rows(step, self._config.batch_size))

  def _held_out_loss(self, params: Params) -> Mapping[str, float]:
    """Return the mean loss of held-out tokens."""
    n, losses, weights = self._config.batch_size, 0.0, 0.0
    for number in range(-(-self._config.valid_rows // n)):
      loss, weight = self._valid(params, spread(self._text("valid", self._rows(number, n)), self._mesh))
      losses, weights = losses + float(loss), weights + float(weight)
    return {"loss": losses / weights}

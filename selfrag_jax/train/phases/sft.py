"""Supervised fine-tuning of a searching policy on rendered demonstrations: loss on what the assistant writes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh

from selfrag_jax.mesh import batch_sharding, check_batch
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.tasks.search import SearchTask, pad_rows
from selfrag_jax.text.chat import render_conversation
from selfrag_jax.train.data import batches
from selfrag_jax.train.losses import sequence_log_probs
from selfrag_jax.train.optimizer import make_optimizer
from selfrag_jax.train.settings import SFTConfig
from selfrag_jax.train.state import (
  LossSums,
  TrainState,
  abstract,
  abstract_state,
  init_state,
  make_update,
  state_from_params,
  state_shardings,
)
from selfrag_jax.typing import Params


class SFT:
  """The phase. `evaluate_policy(params)` scores rollouts; `params` start it, None draws fresh ones."""

  best_metric = None

  def __init__(
    self,
    name: str,
    task: SearchTask,
    model: ModelConfig,
    config: SFTConfig,
    *,
    max_hops: int,
    mesh: Mesh,
    seed: int,
    params: Params | None,
    evaluate_policy: Callable[[Params], Mapping[str, float]],
  ):
    check_batch(mesh, config.batch_size // config.accumulate, "sft.batch_size / sft.accumulate")
    self.name, self.total_steps = name, config.steps
    self._task, self._model, self._config, self._max_hops = task, model, config, max_hops
    self._mesh, self._seed, self._params, self._evaluate = mesh, seed, params, evaluate_policy
    self._optimizer = make_optimizer(config.optimizer, config.steps)
    shardings = state_shardings(model, self._optimizer, mesh)
    self._update = make_update(self._loss, self._optimizer, config.accumulate, shardings)
    size = task.size("sft")
    self._usable = None if size is None else self._fitting(size)

  def abstract_state(self) -> TrainState:
    return abstract_state(self._model, self._optimizer, self._mesh)

  def initial_state(self) -> TrainState:
    if self._params is None:
      return init_state(self._model, self._optimizer, self._mesh, self._seed)
    return state_from_params(self._params, self._optimizer, self._mesh, self._model, self._seed)

  def batches(self, start: int) -> Iterator[Any]:
    return batches(self.batch, start, self.total_steps)

  def batch(self, step: int) -> dict[str, np.ndarray]:
    """Render the demonstrations of a step: tokens, mask and segment ids, int32 / bool / int32 [B, T]."""
    config = self._config
    positions = range(step * config.batch_size, (step + 1) * config.batch_size)
    rows, masks = zip(*(self._rendered(self._index(position)) for position in positions), strict=True)
    tokens, lengths = pad_rows(rows, config.max_tokens, self._task.tokenizer.special["<|pad|>"])
    mask, _ = pad_rows(masks, config.max_tokens)
    segment_ids = (np.arange(config.max_tokens)[None, :] < lengths[:, None]).astype(np.int32)
    return {"tokens": tokens, "mask": mask.astype(bool), "segment_ids": segment_ids}

  def step(self, state: TrainState, batch: dict[str, np.ndarray]) -> tuple[TrainState, Mapping[str, Any]]:
    tokens = int(batch["segment_ids"].sum())
    state, metrics = self._update(state, jax.device_put(batch, batch_sharding(self._mesh)))
    return state, metrics | {"tokens": tokens}

  def evaluate(self, state: TrainState) -> Mapping[str, float]:
    return self._evaluate(state.params)

  def lower(self) -> dict[str, jax.stages.Lowered]:
    """Lower the programs of a step for the devices of the mesh, which need not be there."""
    batch = abstract(self.batch(0), batch_sharding(self._mesh))
    return {"update": self._update.lower(self.abstract_state(), batch)}

  def _index(self, position: int) -> int:
    """Return which demonstration comes at `position`: each epoch its own order, a function of seed and epoch."""
    if self._usable is None:
      return position
    epoch, offset = divmod(position, len(self._usable))
    return self._usable[np.random.default_rng([self._seed, epoch]).permutation(len(self._usable))[offset]]

  def _fitting(self, size: int) -> list[int]:
    fits = [index for index in range(size) if len(self._rendered(index)[0]) <= self._config.max_tokens]
    if not fits:
      raise ValueError(f"no demonstration fits into sft.max_tokens = {self._config.max_tokens}")
    if len(fits) < size:
      logging.warning("%d of %d demonstrations exceed sft.max_tokens and are left out", size - len(fits), size)
    return fits

  def _rendered(self, index: int) -> tuple[list[int], list[int]]:
    conversation = self._task.demonstration("sft", index, self._config.demonstrations, self._max_hops)
    return render_conversation(self._task.tokenizer, conversation, self._task.template)

  def _loss(self, params: Params, batch: dict[str, jax.Array]) -> LossSums:
    log_probs = sequence_log_probs(self._model, params, batch["tokens"], batch["segment_ids"])
    return LossSums(-jnp.sum(jnp.where(batch["mask"], log_probs, 0)), jnp.sum(batch["mask"]), {})

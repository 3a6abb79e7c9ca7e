"""The base class of the phases: the parameters of one model, one optimizer, and the compiled update."""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol, TypedDict, Unpack

import jax
from jax.sharding import Mesh

from selfrag_jax.checked import Checked, Count
from selfrag_jax.mesh import check_batch, own_rows, spread
from selfrag_jax.model.config import StepWork
from selfrag_jax.train.data import batches
from selfrag_jax.train.lora import LoRAConfig, fingerprint, init_updates, loss_of_updates, merge
from selfrag_jax.train.optimizer import OptimizerConfig, make_optimizer
from selfrag_jax.train.state import (
  Init,
  LossSums,
  TrainState,
  abstract_params,
  abstract_state,
  init_state,
  make_update,
  state_from_params,
  state_shardings,
)
from selfrag_jax.typing import Array, Params


class PhaseConfig(Protocol):
  """The settings that every phase has."""

  @property
  def steps(self) -> int: ...
  @property
  def accumulate(self) -> int: ...
  @property
  def optimizer(self) -> OptimizerConfig: ...


@dataclasses.dataclass(frozen=True)
class BatchConfig(Checked):
  """The settings of a phase whose batches have rows that are split over devices and micro-batches."""

  steps: Count
  batch_size: Count
  accumulate: Count = 1
  optimizer: OptimizerConfig = OptimizerConfig()

  def __post_init__(self):
    super().__post_init__()
    check_split(self.batch_size, self.accumulate, "batch_size")

  def check_mesh(self, mesh: Mesh, name: str) -> None:
    """Raise ValueError if a micro-batch cannot be split over the mesh."""
    check_batch(mesh, self.batch_size // self.accumulate, f"{name}.batch_size / {name}.accumulate")


def check_split(rows: int, accumulate: int, name: str) -> None:
  """Raise ValueError if rows do not split evenly into the micro-batches of an update."""
  if rows % accumulate:
    raise ValueError(f"{name} {rows} is not divisible by accumulate {accumulate}")


FULL = LoRAConfig()  # no rank: all parameters are trained


class Start(TypedDict):
  """The arguments of every phase: it starts from `params`, or from fresh ones if None; `evaluate` scores parameters."""

  mesh: Mesh
  seed: int
  params: Params | None
  evaluate: Callable[[Params], Mapping[str, float]]


class GradientPhase(abc.ABC):
  """A phase whose step follows the gradient of `_loss`. `init(key)` draws fresh parameters.

  With `lora.rank` the state holds updates of the parameters that the phase starts from, which stay as they are.
  """

  best_metric: str | None = None
  contrasts_rows = False  # True: the loss needs the whole batch, and itself reads it `by_micro_batch`
  may_be_empty = False  # True: micro-batches can be without a token, and are left out then

  def __init__(self, name: str, init: Init, config: PhaseConfig, lora: LoRAConfig = FULL, **start: Unpack[Start]):
    self.name, self.total_steps = name, config.steps
    self._mesh, self._seed = start["mesh"], start["seed"]
    self._params, self._evaluate = start["params"], start["evaluate"]
    self._model_init, self._lora = init, lora
    self._init = partial(init_updates, init, lora.rank) if lora.rank else init
    loss = loss_of_updates(self._loss, lora) if lora.rank else self._loss
    self._optimizer = make_optimizer(config.optimizer, config.steps)
    shardings = state_shardings(self._init, self._optimizer, self._mesh)
    accumulate = 1 if self.contrasts_rows else config.accumulate
    count = self._count_tokens if self.may_be_empty else None
    self._update = make_update(loss, self._optimizer, accumulate, shardings, count)
    self._count = jax.jit(self._count_tokens)

  def abstract_state(self) -> TrainState:
    """Return the state as ShapeDtypeStructs with the shardings of the mesh, to restore a checkpoint into."""
    return abstract_state(self._init, self._optimizer, self._mesh)

  def initial_state(self) -> TrainState:
    """Make the state of step 0."""
    if self._lora.rank or self._params is None:
      return init_state(self._init, self._optimizer, self._mesh, self._seed)
    return state_from_params(self._params, self._optimizer, self._mesh, self._init, self._seed)

  def batches(self, start: int) -> Iterator[Any]:
    """Yield the batches from step `start` on, made in advance by a background thread."""
    return batches(self.batch, start, self.total_steps)

  def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Mapping[str, Any]]:
    """Update the state with this process's rows of a batch."""
    frozen, rows = (self._base_params,) if self._lora.rank else (), spread(batch, self._mesh)
    state, metrics = self._update(state, rows, *frozen)
    return state, metrics | {"tokens": self._count(rows)}

  def evaluate(self, state: TrainState) -> Mapping[str, float]:
    """Score the parameters of a state."""
    return self._evaluate(self.model_params(state.params))

  def model_params(self, params: Params) -> Params:
    """Return the parameters of the model, from those of a state."""
    return merge(self._base_params, params, self._lora) if self._lora.rank else params

  @property
  def _base_params(self) -> Params:
    """The parameters that updates are trained for. Raises ValueError if the phase starts without any."""
    if self._params is None:
      raise ValueError(f"{self.name}.lora.rank = {self._lora.rank} needs a model to adapt, and there is none yet")
    return self._params

  def metadata(self) -> dict[str, Any]:
    """Return the settings of the updates that a checkpoint holds, if it holds updates, and the model they are for."""
    if not self._lora.rank:
      return {}
    return {"lora": {**dataclasses.asdict(self._lora), "adapts": fingerprint(self._base_params)}}

  def watch(self, step: int, metrics: Mapping[str, float | None]) -> None:  # noqa: B027, most phases go on
    """Look at the metrics of a step; raise TrainingError to end the training."""

  @property
  def mesh(self) -> Mesh:
    """The devices that it trains on."""
    return self._mesh

  def trace(self) -> dict[str, jax.stages.Traced]:
    """Trace the programs of a step for the devices of the mesh, which need not exist."""
    return {"update": self._trace_update(self.batch(0))}

  def model_work(self) -> StepWork | None:
    """Return the work of the model in a step; None if not known."""
    return None

  @abc.abstractmethod
  def batch(self, step: int) -> Any:
    """Return the rows of a step's batch that this process makes: a function of the seed, the step and the row."""

  @abc.abstractmethod
  def _count_tokens(self, batch: Any) -> Array:
    """Count the tokens that an update by this batch reads, without padding."""

  @abc.abstractmethod
  def _loss(self, params: Params, batch: Any, *constants: Any) -> LossSums:
    """Sum the loss of a batch over its tokens."""

  def _rows(self, step: int, size: int) -> list[int]:
    """List the rows of a step's batch that this process makes, counted over the whole training."""
    return (step * size + own_rows(self._mesh, size)).tolist()

  def _trace_update(self, batch: Any, *constants: Any) -> jax.stages.Traced:
    frozen = (abstract_params(self._model_init, self._mesh),) if self._lora.rank else ()
    return self._update.trace(self.abstract_state(), spread(batch, self._mesh), *frozen, *constants)

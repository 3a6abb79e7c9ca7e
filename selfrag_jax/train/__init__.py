"""Training: verified checkpoints, telemetry, and one loop over phases."""

from typing import TYPE_CHECKING

from selfrag_jax.lazy import lazy_names

if TYPE_CHECKING:
  from selfrag_jax.train.checkpoint import Checkpointer as Checkpointer
  from selfrag_jax.train.checkpoint import CheckpointError as CheckpointError
  from selfrag_jax.train.load import LoadedModel as LoadedModel
  from selfrag_jax.train.load import load_model as load_model
  from selfrag_jax.train.loop import LoopConfig as LoopConfig
  from selfrag_jax.train.loop import NonFiniteLossError as NonFiniteLossError
  from selfrag_jax.train.loop import Phase as Phase
  from selfrag_jax.train.loop import Preempted as Preempted
  from selfrag_jax.train.loop import train as train
  from selfrag_jax.train.optimizer import OptimizerConfig as OptimizerConfig
  from selfrag_jax.train.optimizer import make_optimizer as make_optimizer
  from selfrag_jax.train.phases.base import GradientPhase as GradientPhase
  from selfrag_jax.train.phases.base import PhaseConfig as PhaseConfig
  from selfrag_jax.train.state import TrainState as TrainState
else:
  __getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
      "checkpoint": ["CheckpointError", "Checkpointer"],
      "load": ["LoadedModel", "load_model"],
      "loop": ["LoopConfig", "NonFiniteLossError", "Phase", "Preempted", "train"],
      "optimizer": ["OptimizerConfig", "make_optimizer"],
      "phases.base": ["GradientPhase", "PhaseConfig"],
      "state": ["TrainState"],
    },
  )

"""Optimizers and schedules from a config: AdamW or Muon, clipping, weight decay of matrices."""

import dataclasses
from typing import Any, Literal

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from selfrag_jax.checked import Checked, Decay, Natural, Share, Weight

# Norm scales, biases and the SSM's A_log, D and dt_bias are not matrices: decay would pull them to a meaningless zero.
MATRICES = ("q", "k", "v", "o", "gate", "up", "down", "in_proj", "out_proj", "embed", "unembed", "kernel", "embedding")


# (reduction axes, output axes) counted from the end, so that the stacked layer axis in front is a batch axis.
MATRIX_AXES = {
  **dict.fromkeys(("q", "k", "v"), ((-3,), (-2, -1))),
  "o": ((-3, -2), (-1,)),
  **dict.fromkeys(("gate", "up", "down", "in_proj", "out_proj"), ((-2,), (-1,))),
}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Checked):
  """The optimizer. `learning_rate` is the peak, reached after `warmup_steps`; `clip_norm` 0 does not clip."""

  name: Literal["adamw", "muon"] = "adamw"
  learning_rate: Weight = 3e-4
  schedule: Literal["constant", "cosine", "linear"] = "constant"
  warmup_steps: Natural = 0
  final_fraction: Share = 0.0  # of the peak, at the end of the schedule
  b1: Decay = 0.9
  b2: Decay = 0.95
  weight_decay: Weight = 0.0  # of matrices; with Muon, not of embeddings
  clip_norm: Weight = 1.0


def make_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
  """Return the learning rate as a function of the step."""
  peak, warmup = config.learning_rate, config.warmup_steps
  rest = max(total_steps - warmup, 1)
  if config.schedule == "cosine":
    main = optax.cosine_decay_schedule(peak, rest, config.final_fraction)
  elif config.schedule == "linear":
    main = optax.linear_schedule(peak, peak * config.final_fraction, rest)
  else:
    main = optax.constant_schedule(peak)
  if not warmup:
    return main
  # the first step has a learning rate above 0: peak * (step + 1) / warmup
  return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1)), main], [warmup])


def _leaf_name(path: tuple[Any, ...]) -> str:
  return next(str(part.key) for part in reversed(path) if hasattr(part, "key"))


def decay_mask(params: Any) -> Any:
  """Return a tree of bools: whether weight decay applies to a leaf."""
  return jax.tree_util.tree_map_with_path(lambda path, _: _leaf_name(path) in MATRICES, params)


def muon_dimensions(params: Any) -> Any:
  """Return the matrix axes of each leaf for Muon, None for leaves that AdamW updates (embeddings, norms, vectors)."""

  def dimensions(path: tuple[Any, ...], leaf: Any) -> MuonDimensionNumbers | None:
    axes = MATRIX_AXES.get(_leaf_name(path))
    if axes is None:
      return None
    reduction, output = (tuple(leaf.ndim + axis for axis in group) for group in axes)
    return MuonDimensionNumbers(reduction, output)

  return jax.tree_util.tree_map_with_path(dimensions, params)


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
  """Build the transformation: global-norm clipping, then AdamW (arXiv 1711.05101) or Muon for the hidden matrices."""
  schedule = make_schedule(config, total_steps)
  if config.name == "adamw":
    update = optax.adamw(schedule, config.b1, config.b2, weight_decay=config.weight_decay, mask=decay_mask)
  else:
    update = muon(
      schedule,
      weight_decay=config.weight_decay,
      adam_b1=config.b1,
      adam_b2=config.b2,
      # updates as large as AdamW's, so that one learning rate serves both kinds of leaves
      consistent_rms=0.2,
      muon_weight_dimension_numbers=muon_dimensions,
    )
  clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
  return optax.chain(clip, update)

"""The layout of an architecture in a file format: a table that maps config fields and tensors with their axes to ours.

A `Layout` is read from left to right on import and from right to left on export. Tensors are only rearranged, so a
round trip of a Hugging Face folder returns every byte.
"""

import dataclasses
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from selfrag_jax.model.config import ModelConfig, segments, unfit_size
from selfrag_jax.model.vocabulary import HEAD

ARCHITECTURE = "general.architecture"  # GGUF's name of the field


class Weight(NamedTuple):
  """A tensor under its name in the file and ours, with its axes in einops' notation; `{}` stands for the layer."""

  theirs: str
  ours: str
  their_axes: str
  our_axes: str
  blocks: str = "TLM"  # which have it
  part: tuple[int, int] = (0, 1)  # which of how many equal parts, along the first axis, of the file's tensor
  numbers: Literal["same", "-exp", "+1"] = "same"  # what is done to ours for the file
  neutral: float = 0.0  # the numbers that leave an MLP without effect

  @property
  def stacked(self) -> bool:
    return "{}" in self.theirs


def to_file(numbers: np.ndarray, how: str) -> np.ndarray:
  """Return the numbers that a file has for ours, see `Weight.numbers`; those that change are computed in float32."""
  numbers = numbers if how == "same" else numbers.astype(np.float32)
  return -np.exp(numbers) if how == "-exp" else numbers + 1 if how == "+1" else numbers


def from_file(numbers: np.ndarray, how: str) -> np.ndarray:
  """Return our numbers for those of a file: the inverse of `to_file`."""
  return np.log(-numbers) if how == "-exp" else numbers - 1 if how == "+1" else numbers


class Place(NamedTuple):
  """A weight of one layer (0 for those of no layer), and where it is among our parameters: its leaf and its row.

  leaf: None for a part of an MLP that our model does not have, whose numbers are `Weight.neutral`.
  """

  weight: Weight
  layer: int
  leaf: str | None
  row: int | None

  @property
  def theirs(self) -> str:
    """The name of the file's tensor."""
    return self.weight.theirs.format(self.layer)


@dataclasses.dataclass(frozen=True)
class Layout:
  """The layout of one architecture in one file format.

  blocks: those that it can have. fields: their config field -> attribute of ModelConfig. defaults: the values of absent
  fields. allowed: their fields without a counterpart in ModelConfig -> the values that we implement. implied:
  ModelConfig fields -> the only value that the architecture can have, or a function that finds it from their fields.
  written: further fields of an export.
  """

  blocks: str
  fields: Mapping[str, str]
  defaults: Mapping[str, Any]
  allowed: Mapping[str, tuple]
  implied: Mapping[str, Any]
  weights: tuple[Weight, ...]
  architecture: str | None = None  # the class in transformers; None: a GGUF file
  written: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}

  def implied_by(self, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the ModelConfig fields that their fields, or the architecture, leave no choice."""
    return {name: value(fields) if callable(value) else value for name, value in self.implied.items()}

  def places(self, config: ModelConfig) -> list[Place]:
    """List the tensors of a model with this config: without the head if its embeddings are tied."""
    found = []
    for weight in self.weights:
      if not weight.stacked:
        if not (config.tie_embeddings and weight.ours == HEAD):
          found.append(Place(weight, 0, weight.ours, None))
        continue
      rows = zip(config.block_pattern or (), _rows(config), strict=True)
      for layer, (block, (unit, row)) in enumerate(rows):
        if block in weight.blocks:
          lacks = block == "M" and not config.mamba_mlp and weight.ours.startswith("mlp")
          found.append(Place(weight, layer, None if lacks else f"{unit}/{weight.ours}", row))
    return found


# what most architectures cannot have
PLAIN: dict[str, Any] = {
  "window": None,
  "window_rope_base": None,
  "full_rope": True,
  "logit_softcap": None,
  "embedding_multiplier": 1.0,
  "residual_multiplier": 1.0,
  "attention_multiplier": None,
  "logits_scaling": 1.0,
  "norm_plus_one": False,
  "post_norms": False,
  "query_projection": False,
}


def all_of(kind: str, n_layers: str) -> Callable[[Mapping[str, Any]], str]:
  """Return the function to the pattern of an architecture whose layers are equal, from the field with their number."""
  return lambda fields: f"{kind}*{fields[n_layers]}"


def pattern_of(types: Any, blocks: Mapping[str, str]) -> str:
  """Return the pattern that a field `layer_types` spells by other names. Raises ValueError with the names we read."""
  if not isinstance(types, list) or not all(kind in tuple(blocks) for kind in types):
    raise ValueError(f"layer_types is {reprlib.repr(types)}; it must be a list of {', '.join(blocks)}")
  return "".join(blocks[kind] for kind in types)


def whole(fields: Mapping[str, Any], name: str) -> int:
  """Return a field that must be a positive whole number. Raises ValueError."""
  if problem := unfit_size(fields.get(name)):
    raise ValueError(f"{name} is {reprlib.repr(fields.get(name))}; it must be {problem}")
  return fields[name]


def _rows(config: ModelConfig) -> list[tuple[str, int]]:
  """Return where each layer's parameters lie: the path of the stacked block, and the row."""
  return [
    (f"segments_{s}/layer_{u}", row)
    for s, (unit, repeats) in enumerate(segments(config.layers))
    for row in range(repeats)
    for u in range(len(unit))
  ]


def axis_sizes(config: ModelConfig, vocab_size: int) -> dict[str, int]:
  """Return the length of every axis that the tables name; `vocab_size` is the number of rows in the file."""
  c = config
  attention = {"H": c.n_heads, "K": c.kv_heads, "E": c.head_width, "half": 2, "pair": c.head_width // 2}
  mamba = {"heads": c.ssm_heads, "inner": c.ssm_inner, "C": c.conv_channels, "W": c.ssm_conv}
  mamba |= {"G": c.ssm_groups, "per": c.ssm_inner // c.ssm_groups}
  mamba["projected"] = c.ssm_inner + c.conv_channels + c.ssm_heads
  return {"1": 1, "V": vocab_size, "D": c.d_model, "F": c.mlp_width, **attention, **mamba}


def _groups(axes: str) -> list[list[str]]:
  return [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", axes)]


def shape_of(axes: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
  """Return the shape of a tensor with these axes."""
  return tuple(math.prod(sizes[name] for name in group) for group in _groups(axes))


def rearrange(x: np.ndarray, source: str, target: str, sizes: Mapping[str, int]) -> np.ndarray:
  """Rearrange axes like `einops.rearrange(x, f"{source} -> {target}", **sizes)`."""
  before, after = ([name for group in _groups(axes) for name in group if name != "1"] for axes in (source, target))
  split = x.reshape([sizes[name] for name in before])
  return split.transpose([before.index(name) for name in after]).reshape(shape_of(target, sizes))

"""Low-rank adaptation: small updates of frozen weights are trained instead of the weights (LoRA, arXiv 2106.09685).

The updates are the collection `lora` beside the collection `params`, at the places of the weights that they adapt;
`merge` adds them to the weights, and the model is then as any other.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from selfrag_jax.checked import Checked, Natural, Positive
from selfrag_jax.mesh import fetch
from selfrag_jax.train.optimizer import MATRIX_AXES
from selfrag_jax.train.state import Init, LossSums
from selfrag_jax.typing import Array, Params, PRNGKey

SAMPLE = 64  # values of a weight by which it is recognised


@dataclasses.dataclass(frozen=True)
class LoRAConfig(Checked):
  """Updates of all projections of attention, MLP and Mamba-2, scaled by `alpha / rank`; `rank` 0: full training."""

  rank: Natural = 0
  alpha: Positive = 16.0

  @property
  def scale(self) -> float:
    return self.alpha / self.rank


def init_updates(init: Init, rank: int, key: PRNGKey) -> Params:
  """Draw the updates of the parameters that `init` would draw.

  `down` [..., in, rank] is normal with variance 1 / in, `up` [..., rank, out] is zero: the model starts unchanged.
  """
  updates, shapes = {}, nn.unbox(jax.eval_shape(init, key))
  weights = {path: leaf for path, leaf in flatten_dict(shapes["params"]).items() if path[-1] in MATRIX_AXES}
  for number, (path, leaf) in enumerate(sorted(weights.items())):
    axes = MATRIX_AXES[path[-1]]
    rows, columns = (math.prod(leaf.shape[axis] for axis in group) for group in axes)
    layers = leaf.shape[: leaf.ndim - sum(map(len, axes))]
    down = jax.random.normal(jax.random.fold_in(key, number), (*layers, rows, rank), leaf.dtype) * rows**-0.5
    updates[path] = {"down": down, "up": jnp.zeros((*layers, rank, columns), leaf.dtype)}
  return unflatten_dict(updates)


def fingerprint(params: Params) -> str:
  """Return a digest that tells models apart, of values that are spread over every weight."""
  digest = hashlib.sha256()
  for path, leaf in sorted(flatten_dict(params["params"]).items()):
    places = np.linspace(0, leaf.size - 1, min(SAMPLE, leaf.size)).astype(int)
    values = fetch(_values_at(leaf, np.unravel_index(places, leaf.shape)))
    digest.update(f"{path} {leaf.shape}".encode() + values.astype(np.float32).tobytes())
  return digest.hexdigest()


@jax.jit
def _values_at(leaf: Array, places: tuple[Array, ...]) -> Array:
  return leaf[places]


def loss_of_updates(loss: Callable[..., LossSums], config: LoRAConfig) -> Callable[..., LossSums]:
  """Turn a loss `(params, batch, *constants)` into one of the updates: `(updates, batch, params, *constants)`."""
  return lambda updates, batch, params, *constants: loss(join(params, updates, config), batch, *constants)


def join(params: Params, updates: Params, config: LoRAConfig) -> Params:
  """Put the scaled updates beside the parameters: the variables of the adapted model."""
  flat: dict[tuple[str, ...], Any] = dict(flatten_dict(updates))
  scaled = {path: leaf * config.scale if path[-1] == "up" else leaf for path, leaf in flat.items()}
  return {**params, "lora": unflatten_dict(scaled)}


def merge(params: Params, updates: Params, config: LoRAConfig) -> Params:
  """Add the updates to the weights; the result has the shapes and the dtypes of `params`."""
  flat: dict[tuple[str, ...], Any] = dict(flatten_dict(params["params"]))
  factors: dict[tuple[str, ...], Any] = dict(flatten_dict(updates))
  for path in [path for path in flat if (*path, "up") in factors]:
    product = factors[(*path, "down")] @ factors[(*path, "up")] * config.scale
    flat[path] += product.reshape(flat[path].shape).astype(flat[path].dtype)
  return {**params, "params": unflatten_dict(flat)}

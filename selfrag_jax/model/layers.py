"""The small parts that every block shares: projections, norm, rotary embedding and MLP."""

import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from selfrag_jax.mesh import constrain
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.products import product
from selfrag_jax.typing import Array, Params


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
  """Return the dtype of sums and exponentials over `dtype`: at least float32, and float64 stays float64."""
  return jnp.promote_types(dtype, jnp.float32)


MIXED = "mixed"  # the name of what attention and SSD yield, which a backward pass may keep; see `ModelConfig.remat`
# what `weight` declares: read in the compute dtype, whatever the dtype of the parameters
WEIGHTS = frozenset(
  ("embed", "unembed", "q", "k", "v", "o", "up", "gate", "down", "in_proj", "out_proj", "conv_kernel")
)


def weight(
  module: nn.Module,
  config: ModelConfig,
  name: str,
  shape: tuple[int, ...],
  axes: tuple[str, ...],
  scale: float | None = None,
  *,
  cast: bool = True,
) -> Any:
  """Declare a normal(0, `scale`) parameter with logical `axes`, `cast` to the compute dtype or as it is."""
  if isinstance(stored := module.get_variable("params", name), Turned):
    return Turned(jnp.asarray(stored.weight, config.dtype))
  init = nn.initializers.normal(config.init_scale if scale is None else scale)
  value: Any = module.param(name, nn.with_logical_partitioning(init, axes), shape, jnp.dtype(config.param_dtype))
  return jnp.asarray(value, config.dtype) if cast else value


@struct.dataclass
class Turned:
  """A weight [out ..., in ...]: `linear` reads it as if it were [in ..., out ...]."""

  weight: Array


# the number of axes that a product contracts, for the weights that `turn` turns
CONTRACTED = {**dict.fromkeys(("q", "k", "v", "up", "gate", "down", "in_proj", "out_proj"), 1), "o": 2}


def turn(params: Params) -> Params:
  """Turn the weights of `unstack`ed parameters, for decoding on CPUs.

  With few rows, XLA's CPU backend takes half as long if the weight is the first factor; that needs its output first.
  """

  def of(path: Any, x: Array) -> Any:
    n = CONTRACTED.get(path[-1].key)
    return x if n is None else Turned(jnp.moveaxis(x, range(n), range(x.ndim - n, x.ndim)))

  return jax.tree_util.tree_map_with_path(of, params)


class Adapted(NamedTuple):
  """A weight [in ..., out ...] with a low-rank update, the product of down [in, r] and up [r, out]."""

  weight: Array
  down: Array
  up: Array


def projection(
  module: nn.Module,
  config: ModelConfig,
  name: str,
  shape: tuple[int, ...],
  axes: tuple[str, ...],
  scale: float | None = None,
) -> Array | Adapted | Turned:
  """Declare a weight for `linear`, adapted where the collection `lora` has an update of its name."""
  value = weight(module, config, name, shape, axes, scale)
  if not module.has_variable("lora", name):
    return value
  update = module.get_variable("lora", name)
  return Adapted(value, *(jnp.asarray(update[part], config.dtype) for part in ("down", "up")))


def linear(x: Array, weight: Array | Adapted | Turned, contracted: int = 1, dtype: str | None = None) -> Array:
  """Contract the last `contracted` axes of x [..., in] with the first axes of weight [in, out ...] to [..., out ...].

  `dtype` is that of the product's inputs (`ModelConfig.matmul_dtype`).

  The product is one of two matrices, whatever the axes: with activations of three axes XLA's CPU backend takes twice as
  long for the gradients. On accelerators it makes no difference.
  """
  rows = x.shape[: x.ndim - contracted]
  flat = x.reshape(math.prod(rows), -1)
  if isinstance(weight, Turned):
    columns = weight.weight.shape[:-contracted]
    out = product(flat, weight.weight.reshape(math.prod(columns), -1), dtype, transposed=True)
    return out.reshape(*rows, *columns)
  matrix = weight.weight if isinstance(weight, Adapted) else weight
  columns = matrix.shape[contracted:]
  out = product(flat, matrix.reshape(-1, math.prod(columns)), dtype)
  if isinstance(weight, Adapted):
    out += (flat @ weight.down) @ weight.up
  return out.reshape(*rows, *columns)


def output_scale(config: ModelConfig) -> float:
  """Return the init scale of projections into the residual stream, whose variance must not grow with depth (GPT-2)."""
  return config.init_scale / (2 * config.n_layers) ** 0.5


class RMSNorm(nn.Module):
  """Root-mean-square norm over the last axis, or within `groups` of it, with a learned scale (arXiv 1910.07467)."""

  config: ModelConfig
  groups: int = 1

  @nn.compact
  def __call__(self, x: Array) -> Array:
    width = x.shape[-1]
    plus_one = self.config.norm_plus_one
    init = nn.initializers.zeros if plus_one else nn.initializers.ones
    scale: Any = self.param(
      "scale", nn.with_logical_partitioning(init, ("width",)), (width,), jnp.dtype(self.config.param_dtype)
    )
    # the mean of squares overflows float16 and loses digits in bfloat16
    grouped = x.astype(accumulation_dtype(x.dtype)).reshape(*x.shape[:-1], self.groups, width // self.groups)
    grouped *= jax.lax.rsqrt(jnp.mean(jnp.square(grouped), axis=-1, keepdims=True) + self.config.norm_eps)
    if plus_one:  # as Gemma does, in the wider dtype to the end: one more than a small number loses its digits
      return (grouped.reshape(x.shape) * jnp.broadcast_to(1 + scale.astype(grouped.dtype), x.shape)).astype(x.dtype)
    normed = grouped.reshape(x.shape).astype(x.dtype)
    return normed * jnp.broadcast_to(scale.astype(x.dtype), x.shape)


def rotary_embedding(x_BxHxTxE: Array, positions_BxT: Array, base: float) -> Array:
  """Rotate the pairs (i, i + E/2) of every head by position (arXiv 2104.09864, half-split order as in Hugging Face)."""
  half = x_BxHxTxE.shape[-1] // 2
  dtype = accumulation_dtype(x_BxHxTxE.dtype)  # angles at position 8,192 need more than 8 bits
  frequency = jnp.asarray(base, dtype) ** (-jnp.arange(half, dtype=dtype) / half)
  angle = positions_BxT[:, None, :, None].astype(dtype) * frequency[None, None, None, :]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  first, second = jnp.split(x_BxHxTxE.astype(dtype), 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BxHxTxE.dtype)


class MLP(nn.Module):
  """SwiGLU, GeGLU (arXiv 2002.05202) or squared ReLU (arXiv 2109.08668). [B, T, D] -> [B, T, D]."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x: Array) -> Array:
    c = self.config
    shape, axes = (c.d_model, c.mlp_width), ("embed", "mlp")
    multiply = functools.partial(linear, dtype=c.matmul_dtype)
    up = multiply(x, projection(self, c, "up", shape, axes))
    if c.mlp == "relu2":
      hidden = jnp.square(nn.relu(up))
    else:
      gate = multiply(x, projection(self, c, "gate", shape, axes))
      hidden = up * (nn.silu(gate) if c.mlp == "swiglu" else nn.gelu(gate, approximate=True))
    hidden = constrain(hidden, "batch", "time", "mlp")
    return multiply(hidden, projection(self, c, "down", (c.mlp_width, c.d_model), ("mlp", "embed"), output_scale(c)))

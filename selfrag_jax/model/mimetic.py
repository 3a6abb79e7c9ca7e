"""Weights drawn so that fresh attention sums up what is near, and finds what is like it.

In trained Transformers the product of the weights of values and outputs, and that of queries and keys, are near a
multiple of the identity plus noise. Drawn so, small models learn faster (Trockman and Kolter, arXiv 2305.09828).
"""

from typing import Any

import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from selfrag_jax.model.config import ModelConfig, segments
from selfrag_jax.typing import Array, Params

PASSED_ON = 0.5  # of what a layer of a window sees is added to what it reads
LIKENESS = 0.9  # the correlation of the weights of queries with those of keys, in layers that see everything


def mimetic(config: ModelConfig, params: Params) -> Params:
  """Return freshly drawn stacked parameters with mimetic attention; what was drawn stays as the noise.

  In a window, a query like its key would find its own token, and sum up nothing; these layers pass on what they see.
  """
  flat = flatten_dict(params)
  for s, (unit, _) in enumerate(segments(config.layers)):
    for u, spec in enumerate(unit):
      if spec.kind == "T":
        mixer = ("params", f"segments_{s}", f"layer_{u}", "mixer")
        drawn = {name: flat[*mixer, name].unbox() for name in "qkvo"}
        made = _finding(config, drawn) if spec.window is None else _summing(config, drawn)
        flat |= {(*mixer, name): flat[*mixer, name].replace_boxed(value) for name, value in made.items()}
  return unflatten_dict(flat)


def _finding(config: ModelConfig, drawn: dict[str, Any]) -> dict[str, Array]:
  """Return q [n, D, H, E] and k [n, D, K, E], whose product is near a multiple of the identity."""
  size = max(config.d_model, config.kv_heads * config.head_width) ** 0.5  # numbers as large as those that were drawn
  k = config.init_scale * size * _orthogonal(drawn["k"])
  return {"k": k, "q": LIKENESS * _of_heads(config, k) + (1 - LIKENESS**2) ** 0.5 * drawn["q"]}


def _summing(config: ModelConfig, drawn: dict[str, Any]) -> dict[str, Array]:
  """Return v [n, D, K, E] and o [n, H, E, D], whose product is near PASSED_ON times the identity."""
  v = PASSED_ON**0.5 * _orthogonal(drawn["v"])
  back = jnp.moveaxis(_of_heads(config, v), 1, 3) * (config.kv_heads / config.n_heads)
  return {"v": v, "o": drawn["o"] + back}


def _of_heads(config: ModelConfig, keys: Array) -> Array:
  """Return weights of keys or values [n, D, K, E] for every head that reads them: [n, D, H, E]."""
  return jnp.repeat(keys, config.n_heads // config.kv_heads, axis=2)


def _orthogonal(drawn: Array) -> Array:
  """Return the weights [n, D, K, E] nearest to the drawn ones whose columns, or rows if fewer, are orthonormal."""
  wide = drawn.reshape(*drawn.shape[:2], -1).astype(jnp.promote_types(drawn.dtype, jnp.float32))
  u, _, v = jnp.linalg.svd(wide, full_matrices=False)
  return (u @ v).reshape(drawn.shape).astype(drawn.dtype)

"""Products of activations with weights, in the dtype of the activations or with inputs rounded to a narrower one.

Rounded inputs with sums in float32 are what TPUs do with float32 products unless told otherwise, and what the matrix
units of recent CPUs (AMX) are made for.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from selfrag_jax.mesh import platform
from selfrag_jax.typing import Array

PARTS = 8  # of the rows that the gradient of a weight sums over
FEW = 32  # rows up to which XLA's CPU backend is faster if the weight is the first factor: twice as fast for 4 to 16


def product(
  x_NxI: Array, weight: Array, dtype: str | None = None, *, transposed: bool = False, out: DTypeLike | None = None
) -> Array:
  """Return x times weight [I, O], or with `transposed` times the transpose of weight [O, I]: [N, O] in `out`.

  `dtype` is that of the inputs (None: their own), `out` that of the result (None: that of x). With rounded inputs the
  gradients are products with rounded inputs too; no sum is rounded.
  """
  out = jnp.dtype(out or x_NxI.dtype)
  if dtype is None or jnp.dtype(dtype) == x_NxI.dtype:
    if transposed and 1 < len(x_NxI) <= FEW and platform() == "cpu":
      # without the barrier XLA would swap the factors again
      return jax.lax.optimization_barrier(_dot(weight, x_NxI, 1, 1, out)).T
    return _dot(x_NxI, weight, 1, 1 if transposed else 0, out)
  rounded: Any = _rounded(x_NxI, weight, jnp.dtype(dtype), transposed, out)
  return rounded


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _rounded(x_NxI: Array, weight: Array, dtype: jnp.dtype, transposed: bool, out: jnp.dtype) -> Array:
  return _dot(x_NxI.astype(dtype), weight.astype(dtype), 1, 1 if transposed else 0, out)


def _forward(x_NxI: Array, weight: Array, dtype: jnp.dtype, transposed: bool, out: jnp.dtype) -> tuple[Array, Any]:
  x, w = x_NxI.astype(dtype), weight.astype(dtype)
  of_dtype = jnp.zeros(0, x_NxI.dtype), jnp.zeros(0, weight.dtype)  # tell the dtypes of the gradients
  return _dot(x, w, 1, 1 if transposed else 0, out), (x, w, of_dtype)


def _backward(
  dtype: jnp.dtype, transposed: bool, out: jnp.dtype, saved: Any, gradient_NxO: Array
) -> tuple[Array, Array]:
  x, w, (of_x, of_w) = saved
  g = gradient_NxO.astype(dtype)
  dx = _dot(g, w, 1, 0 if transposed else 1, of_x.dtype)
  # XLA's CPU backend sums products over a first axis in float32 alone, but over two axes in any dtype; the first factor
  # it transposes, which takes long if it is wide or is computed on the way
  parts = PARTS if len(x) % PARTS == 0 else 1
  x, g = (y.reshape(-1, parts, y.shape[1]) for y in (x, g))
  by_gradient = x.shape[2] > g.shape[2]
  dw = _dot(*((g, x) if by_gradient else (x, g)), (0, 1), (0, 1), of_w.dtype)
  if by_gradient != transposed:
    dw = jax.lax.optimization_barrier(dw).T  # without the barrier XLA would swap the factors instead
  return dx, dw


def _dot(a: Array, b: Array, over_a: int | tuple[int, ...], over_b: int | tuple[int, ...], out: DTypeLike) -> Array:
  axes = lambda over: over if isinstance(over, tuple) else (over,)
  return jax.lax.dot_general(a, b, ((axes(over_a), axes(over_b)), ((), ())), preferred_element_type=out)


_rounded.defvjp(_forward, _backward)

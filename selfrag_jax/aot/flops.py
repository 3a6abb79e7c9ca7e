"""The FLOPs of a traced program: what its matrix products ask for, on all devices together, whatever the hardware."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr

Work = Counter  # the path of a loop ("" outside of all, "while/while" in an inner one) -> FLOPs of one iteration of it


def count(jaxpr: ClosedJaxpr | Any) -> Work:
  """Count the FLOPs (2 x multiply-adds) of the products of a program, given as `jitted.trace(…).jaxpr`.

  A scan counts as often as it runs, a Pallas kernel as often as its grid has places. How often a `while` runs, only
  running it tells: its body has an entry of its own, of one iteration. Of the branches of a condition, the one with the
  most work counts. Element-wise work does not count.
  """
  work: Work = Counter()
  for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    name = equation.primitive.name
    if name == "dot_general":
      work[""] += _dot(equation)
    elif name == "conv_general_dilated":
      work[""] += _convolution(equation)
    elif name == "cond":
      work += max((count(branch) for branch in equation.params["branches"]), key=Counter.total)
    elif name == "while":
      body = count(equation.params["body_jaxpr"])
      work += Counter({f"while/{path}".rstrip("/"): flops for path, flops in body.items()})
    else:
      times = equation.params["length"] if name == "scan" else 1
      if name == "pallas_call":
        times = math.prod(equation.params["grid_mapping"].grid)
      if name == "shard_map":  # traced for one device
        mesh = equation.params["mesh"]
        times = math.prod(mesh.shape[axis] for axis in equation.params["newly_manual_axes"])
      for inner in _inner(equation.params):
        work += Counter({path: times * flops for path, flops in count(inner).items()})
  return work


def _inner(params: dict[str, Any]) -> Iterator[Any]:
  """Yield the programs among the parameters of an equation."""
  for value in params.values():
    for one in value if isinstance(value, tuple | list) else (value,):
      if hasattr(one, "eqns") or hasattr(one, "jaxpr"):
        yield one


def _dot(equation: Any) -> int:
  (contracted, _), _ = equation.params["dimension_numbers"]
  left = equation.invars[0].aval.shape
  return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


def _convolution(equation: Any) -> int:
  kernel, of = equation.invars[1].aval.shape, equation.params["dimension_numbers"].rhs_spec
  return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // kernel[of[0]]

"""The FLOPs of matrix products: what a traced program asks for, and what a compiler makes of it.

Both count 2 for a multiply-add, and no element-wise work.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr

from selfrag_jax.aot.hlo import Instruction, Module, path_of

Work = Counter  # the path of a loop ("" outside of all, "while/while" in an inner one) -> FLOPs of one iteration of it
# the scores of cuDNN's attention, which are never written
_SCORES = re.compile(r'"intermediate_tensor_shape":.*?"dimensions": *\[([\d," ]*)\]')
_WINDOW = re.compile(r'"sliding_window_length": *"?(\d+)')
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)[\]}]')  # of XLA, of cuBLAS


def count(jaxpr: ClosedJaxpr | Any, *, kernels_alone: bool = False) -> Work:
  """Count the FLOPs of a program, on all devices together, given as `jitted.trace(…).jaxpr`.

  A scan counts as often as it runs, a Pallas kernel as often as its grid has places. How often a `while` runs, only
  running it tells: its body has an entry of its own, of one iteration. Of the branches of a condition, the one with the
  most work counts. With `kernels_alone`, only what Pallas kernels do.
  """
  work: Work = Counter()
  for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    name = equation.primitive.name
    if name in ("dot_general", "conv_general_dilated"):
      work[""] += 0 if kernels_alone else (_dot if name == "dot_general" else _convolution)(equation)
    elif name == "cond":
      branches = equation.params["branches"]
      work += max((count(branch, kernels_alone=kernels_alone) for branch in branches), key=Counter.total)
    elif name == "while":
      body = count(equation.params["body_jaxpr"], kernels_alone=kernels_alone)
      work += Counter({f"while/{path}".rstrip("/"): flops for path, flops in body.items()})
    else:
      times = equation.params["length"] if name == "scan" else 1
      if name == "pallas_call":
        times = math.prod(equation.params["grid_mapping"].grid)
      if name == "shard_map":  # traced for one device
        mesh = equation.params["mesh"]
        times = math.prod(mesh.shape[axis] for axis in equation.params["newly_manual_axes"])
      alone = kernels_alone and name != "pallas_call"
      for inner in _inner(equation.params):
        work += Counter({path: times * flops for path, flops in count(inner, kernels_alone=alone).items()})
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


def compiled(module: Module) -> Work:
  """Count the FLOPs of a compiled program on one device: paths are those of `count`.

  A loop of known length counts as often as it turns; of the branches of a condition, one counts: see `Module.walk`.
  The products of a Pallas kernel are not in the text. Those of cuDNN's attention follow from its settings.
  """
  work: Work = Counter()
  for where, one, loops in module.walk(one_branch=True):
    if one.kind in ("dot", "convolution") or (one.kind == "custom-call" and "__cublas$" in one.rest):
      path, times = path_of(loops)
      shapes = [module.types[where][name][0].shape for name in one.operands]
      work[path] += times * (_compiled_convolution if one.kind == "convolution" else _compiled_dot)(one, *shapes)
    elif one.kind == "custom-call" and "__cudnn$fmha" in one.rest:
      path, times = path_of(loops)
      work[path] += times * _compiled_attention(one)
  return work


def _compiled_attention(one: Instruction) -> int:
  """Count two products forward and five backward, of those pairs of a query and a key that see each other."""
  found, window = _SCORES.search(one.rest), _WINDOW.search(one.rest)
  assert found, one
  batch, heads, queries, keys = map(int, re.findall(r"\d+", found[1]))
  pairs = queries * keys
  if "CAUSAL" in one.rest:
    seen = int(window[1]) if window and int(window[1]) else keys
    pairs = sum(min(i + 1, seen) for i in range(queries))
  products = 5 if "Backward" in one.rest else 2
  return products * 2 * batch * heads * pairs * one.arrays[0].shape[-1]


def _compiled_dot(one: Instruction, left: tuple[int, ...], *_: tuple[int, ...]) -> int:
  contracted = _CONTRACTED.search(one.rest)
  axes = re.findall(r"\d+", contracted[1]) if contracted else []
  return 2 * math.prod(one.arrays[0].shape) * math.prod(left[int(axis)] for axis in axes)


def _compiled_convolution(one: Instruction, left: tuple[int, ...], kernel: tuple[int, ...]) -> int:
  """Count as multiply-adds the pairs of elements that meet: neither padding nor the zeros of a dilated operand.

  A TPU's compiler writes all products as convolutions, batches of them as windows in which one element meets another.
  """
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.rest)
  window = (
    dict(re.findall(r"(\w+)=([\dx_\-]+)", found[1])) if (found := re.search(r"window=\{(.*?)\}", one.rest)) else {}
  )
  assert labels, one
  of = [
    dict(zip(*pair, strict=True)) for pair in zip(labels.groups(), (left, kernel, one.arrays[0].shape), strict=True)
  ]
  sizes = lambda name: [int(n) for n in window[name].split("x")] if name in window else [1] * len(left)
  strides, dilated, apart = sizes("stride"), sizes("lhs_dilate"), sizes("rhs_dilate")
  before = [int(pad.split("_")[0]) for pad in window["pad"].split("x")] if "pad" in window else [0] * len(left)
  pairs = 1
  for axis in range(len(left) - 2):
    n_left, n_kernel, n_out = (part[str(axis)] for part in of)
    at = np.arange(n_out)[:, None] * strides[axis] + np.arange(n_kernel) * apart[axis] - before[axis]
    pairs *= int(np.sum((at >= 0) & (at <= (n_left - 1) * dilated[axis]) & (at % dilated[axis] == 0)))
  return 2 * of[2]["b"] * of[2]["f"] * of[1]["i"] * pairs

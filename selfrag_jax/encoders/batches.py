"""Batches of texts of about equal length, embedded on all devices with little padding and few shapes to compile."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from selfrag_jax.mesh import abstract, batch_sharding, fetch, local_devices, make_mesh, planning, replicated
from selfrag_jax.ragged import pad_rows, power_of_two
from selfrag_jax.typing import Array, ArrayLike, Params

RowFunction = Callable[[Params, ArrayLike, ArrayLike], Array]

ROW_TOKENS = 8192  # tokens of a batch, padding included
_report: ContextVar[Callable[[int], Any]] = ContextVar("report", default=lambda rows: None)


@contextlib.contextmanager
def reporting(report: Callable[[int], Any]) -> Iterator[None]:
  """Call `report` with the number of rows of every batch that an encoder embeds inside the `with` block."""
  token = _report.set(report)
  try:
    yield
  finally:
    _report.reset(token)


def embed_by_length(
  rows: Sequence[Sequence[int]],
  embed: Callable[[np.ndarray, np.ndarray], ArrayLike],
  width: int,
  rounded: Callable[[int], int],
) -> np.ndarray:
  """Embed N rows of token ids with `embed(tokens int32 [B, T], lengths int32 [B]) -> [B, width]`, as f32 [N, width].

  T is the length of a batch's longest row, `rounded` up. B is a power of two; rows that only fill it have length 0.
  In a plan for devices that are not there, all vectors are 0: their shape is all that matters.
  """
  if planning():
    return np.zeros((len(rows), width), np.float32)
  order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
  out, start = np.zeros((len(rows), width), np.float32), 0
  while start < len(order):
    size = ROW_TOKENS
    while size > 1 and size * rounded(len(rows[order[min(start + size, len(order)) - 1]])) > ROW_TOKENS:
      size //= 2
    left = min(size, len(order) - start)
    batch = power_of_two(left)
    if 4 * left < 3 * batch:  # 18 rows become batches of 16 and 2, not one of 32 with 14 empty rows
      batch //= 2
    part = order[start : start + batch]
    fill = [()] * (batch - len(part))
    tokens, lengths = pad_rows([*(rows[i] for i in part), *fill], rounded(len(rows[part[-1]])))
    out[part] = np.asarray(embed(tokens, lengths))[: len(part)]
    start += len(part)
    _report.get()(len(part))
  return out


class Spread:
  """A pure function `function(params, tokens [B, T], lengths [B]) -> [B, …]` that runs on all devices of this host.

  The parameters are copied to the devices once, at the first batch that can be split evenly over them.
  """

  def __init__(self, function: RowFunction, params: Params):
    self._alone, self._mesh = (make_mesh(devices=local_devices()[:n]) for n in (1, None))
    self._is_part = jax.process_count() > 1
    if self._is_part:  # each host embeds alone, and may hold a part of the parameters
      params = jax.device_put(fetch(params), jax.local_devices()[0])
    self.params, self._function, self._copies = params, function, None

  def __call__(self, tokens: np.ndarray, lengths: np.ndarray) -> Array:
    """Run the function; a batch whose size the number of devices does not divide runs on one device."""
    if len(tokens) % self._mesh.size or self._mesh.size == 1:
      # the mesh that is set may have devices of other hosts
      with jax.set_mesh(self._alone) if self._is_part else contextlib.nullcontext():
        return self._function(self.params, tokens, lengths)
    with jax.set_mesh(self._mesh):  # kernels ask for it: the compiler cannot split them
      if self._copies is None:
        self._copies = jax.device_put(self.params, replicated(self._mesh))
      shares = jax.device_put((tokens, lengths), batch_sharding(self._mesh))
      return self._function(self._copies, *shares)


def trace_spread(function: RowFunction, params: Params, time: int, mesh: Mesh) -> jax.stages.Traced:
  """Trace what `Spread` runs for a full batch of rows of `time` tokens, on every host of a mesh that need not exist."""
  rows, own = power_of_two(max(ROW_TOKENS // time, 1) + 1) // 2, len(local_devices())
  rows *= mesh.size if rows % own else mesh.size // own
  shapes = jax.ShapeDtypeStruct((rows, time), np.int32), jax.ShapeDtypeStruct((rows,), np.int32)
  return jax.jit(function).trace(abstract(params, replicated(mesh)), *abstract(shapes, batch_sharding(mesh)))

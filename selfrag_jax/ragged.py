"""Ragged rows: rows of different lengths in one array, padded on the right; masks, last entries, padding, few widths.

The functions that compute on arrays take the array module as `xp`: jax.numpy or numpy.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # importing it imports JAX
  from selfrag_jax.typing import ArrayLike


def length_mask(lengths: "ArrayLike", width: int, xp: ModuleType) -> Any:
  """Return a mask bool [..., width] that is True where an entry is real; `lengths` [...] are the rows' lengths."""
  lengths = xp.asarray(lengths)
  return xp.arange(width)[(None,) * lengths.ndim] < lengths[..., None]


def last_entries(rows_BxTxD: "ArrayLike", lengths_B: "ArrayLike", xp: ModuleType) -> Any:
  """Return the last real entry of each row, [B, D]; for an empty row, its first entry."""
  at = xp.maximum(xp.asarray(lengths_B) - 1, 0)
  return xp.take_along_axis(xp.asarray(rows_BxTxD), at[:, None, None], axis=1)[:, 0]


def kept_first(keep_BxT: "ArrayLike", xp: ModuleType) -> Any:
  """Return an order int [B, T] that moves each row's kept entries before its other entries, and is stable for both."""
  return xp.argsort(~xp.asarray(keep_BxT), axis=1, stable=True)


def pad_rows(rows: Sequence[Sequence[int]], width: int, pad: int = 0) -> tuple[np.ndarray, np.ndarray]:
  """Stack ragged id lists as (int32 [N, width], lengths int32 [N]). Raises ValueError for a row longer than `width`."""
  lengths = np.array([len(row) for row in rows], np.int32)
  if len(rows) and lengths.max() > width:
    raise ValueError(f"a row of {lengths.max()} tokens does not fit into {width}")
  tokens = np.full((len(rows), width), pad, np.int32)
  tokens[length_mask(lengths, width, np)] = np.concatenate([*rows, []]).astype(np.int32)
  return tokens, lengths


def pad_to_powers(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
  """Pad rows to powers of two: int32 [B, T] and lengths int32 [B]; rows that only fill the batch have length 0."""
  missing = power_of_two(len(rows)) - len(rows)
  return pad_rows([*rows, *[()] * missing], power_of_two(max(map(len, rows))))


def power_of_two(n: int) -> int:
  """Return the smallest power of two that is at least n: few shapes mean few compiled programs."""
  return 1 << max(n - 1, 0).bit_length()


def round_up(n: int, multiple: int) -> int:
  """Return the smallest multiple of `multiple` that is at least n."""
  return -(-n // multiple) * multiple

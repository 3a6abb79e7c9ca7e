"""Texts of about one length are embedded together: little padding, and few shapes to compile."""

import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from selfrag_jax.typing import ArrayLike

ROW_TOKENS = 8192  # of a batch, padding included


def embed_by_length(
  rows: Sequence[Sequence[int]],
  embed: Callable[[np.ndarray, np.ndarray], ArrayLike],
  width: int,
  rounded: Callable[[int], int],
  progress: bool = False,
) -> np.ndarray:
  """Embed token ids with `embed(tokens int32 [B, T], lengths int32 [B]) -> [B, width]`, as f32 [N, width].

  T is the longest row of a batch, `rounded` up; B a power of two, the rows that only fill it have length 0. `progress`
  says on standard error how far it is.
  """
  order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
  out, start, began = np.zeros((len(rows), width), np.float32), 0, time.monotonic()
  while start < len(order):
    size = ROW_TOKENS
    while size > 1 and size * rounded(len(rows[order[min(start + size, len(order)) - 1]])) > ROW_TOKENS:
      size //= 2
    part = order[start : start + size]
    tokens = np.zeros((1 << (len(part) - 1).bit_length(), rounded(len(rows[part[-1]]))), np.int32)
    lengths = np.zeros(len(tokens), np.int32)
    for at, i in enumerate(part):
      tokens[at, : len(rows[i])], lengths[at] = rows[i], len(rows[i])
    out[part] = np.asarray(embed(tokens, lengths))[: len(part)]
    start += len(part)
    if progress:
      rate = start / (time.monotonic() - began)
      left = (len(order) - start) / rate
      print(f"\rembedded {start:,} of {len(order):,}  {rate:,.0f}/s  ETA {left:.0f} s ", end="", file=sys.stderr)
  return out

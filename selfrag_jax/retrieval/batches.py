"""Texts of about one length are embedded together: little padding, and few shapes to compile."""

from collections.abc import Callable, Sequence

import numpy as np

from selfrag_jax.typing import ArrayLike

ROW_TOKENS = 8192  # of a batch, padding included


def embed_by_length(
  rows: Sequence[Sequence[int]],
  embed: Callable[[np.ndarray, np.ndarray], ArrayLike],
  width: int,
  rounded: Callable[[int], int],
) -> np.ndarray:
  """Embed token ids with `embed(tokens int32 [B, T], lengths int32 [B]) -> [B, width]`, as f32 [N, width].

  T is the longest row of a batch, `rounded` up; B a power of two, the rows that only fill it have length 0.
  """
  order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
  out, start = np.zeros((len(rows), width), np.float32), 0
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
  return out

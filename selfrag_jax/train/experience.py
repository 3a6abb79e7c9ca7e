"""What an update of a searching policy reads: rollouts, and demonstrations as rollouts, packed into rows.

A rollout is mostly shorter than it may be, and one whose group earned the same teaches nothing: rows hold only what
the loss counts, as many as fit. The first micro-batches are filled first; an update leaves out those without a token.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from selfrag_jax.generate.rollout import Rollout


class Trajectories(NamedTuple):
  """Rollouts on the host with what they are worth, [B] and [B, S].

  `kept`: the rewards of its group differ. `pulled`: the KL acts on it; None: on what is kept. `log_probs`: of the
  policy that sampled them; None: they are demonstrations, which none has sampled.
  """

  advantages: np.ndarray
  kept: np.ndarray
  pulled: np.ndarray | None
  lengths: np.ndarray
  sampled: np.ndarray
  tokens: np.ndarray
  log_probs: np.ndarray | None

  @classmethod
  def of(cls, rollout: Rollout, advantages: np.ndarray, kept: np.ndarray, pulled: np.ndarray | None) -> Self:
    """Make them of a rollout in host arrays."""
    columns = map(np.asarray, (rollout.lengths, rollout.sampled, rollout.tokens, rollout.log_probs))
    return cls(advantages, kept, pulled, *columns)


class Experience(NamedTuple):
  """Packed trajectories, all [R, W]: `tokens` and `segment_ids` int32 (0: padding), `log_probs` and `advantages` float.

  `rewarded` bool: the policy sampled it in a rollout whose advantage counts. `pulled` bool: the KL acts on it; None:
  on what is rewarded. `shown` bool: written in a demonstration whose advantage counts; None: there is none.
  """

  tokens: Any
  segment_ids: Any
  log_probs: Any
  advantages: Any
  rewarded: Any
  pulled: Any
  shown: Any

  @classmethod
  def empty(cls, shape: tuple[int, int], log_probs: Any, *, pulled: bool, shown: bool) -> Self:
    """Return rows without a token, whose log-probabilities have the dtype `log_probs`."""
    ints, bools = (lambda: np.zeros(shape, np.int32)), (lambda wanted: np.zeros(shape, bool) if wanted else None)
    floats = np.zeros(shape, log_probs), np.zeros(shape, np.float32)
    return cls(ints(), ints(), *floats, bools(True), bools(pulled), bools(shown))


def packed(parts: Sequence[Trajectories], n_rows: int, micro_batches: int) -> Experience:
  """Pack what the loss counts into rows that are as wide as the parts, the longest first, each where it fits first.

  `n_rows` must be as many as there are trajectories, or more. Micro-batches are those of `train.state.micro_batches`.
  """
  width = parts[0].tokens.shape[1]
  filled = Experience.empty(
    (n_rows, width),
    next(part.log_probs.dtype for part in parts if part.log_probs is not None),
    pulled=any(part.pulled is not None for part in parts),
    shown=any(part.log_probs is None for part in parts),
  )
  order = np.arange(n_rows).reshape(-1, micro_batches).T.ravel()
  ends, segments = np.zeros(n_rows, int), np.zeros(n_rows, int)
  counted = [
    (int(part.lengths[i]), part, i)
    for part in parts
    for i in range(len(part.lengths))
    if part.kept[i] or (part.pulled is not None and part.pulled[i])
  ]
  for length, part, i in sorted(counted, key=lambda each: -each[0]):
    row = order[np.argmax(ends[order] + length <= width)]
    here = row, slice(ends[row], ends[row] + length)
    written, kept = part.sampled[i, :length], bool(part.kept[i])
    ends[row], segments[row] = ends[row] + length, segments[row] + 1
    filled.tokens[here], filled.segment_ids[here] = part.tokens[i, :length], segments[row]
    filled.advantages[here] = part.advantages[i]
    if part.log_probs is None:
      filled.shown[here] = written & kept
      continue
    filled.log_probs[here] = part.log_probs[i, :length]
    filled.rewarded[here] = written & kept
    if part.pulled is not None:
      filled.pulled[here] = written & bool(part.pulled[i])
  return filled

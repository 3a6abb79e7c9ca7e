"""The acceptance of candidates: whether they replace the texts of the parameters."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from selfrag_jax.textgrad.variable import Variable


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Whether the candidates are accepted, and the score before and with them."""

  accepted: bool
  before: float | None = None
  after: float | None = None

  @property
  def delta(self) -> float | None:
    """Return the change of the score."""
    return None if self.before is None or self.after is None else self.after - self.before


class Accept(Protocol):
  """The protocol of a decision on the candidates of one step, one for each parameter."""

  def __call__(self, parameters: Sequence[Variable], candidates: Sequence[str]) -> Verdict:
    """Decide. The parameters have their old values before and after the call."""
    ...


class HeldOut:
  """A decision that accepts candidates unless they score less on held-out data; known scores are reused."""

  def __init__(self, score: Callable[[], float], tolerance: float = 0.0):
    """Decide by `score()`, which scores the parameters' values at the time of the call; higher is better."""
    self._score, self._tolerance = score, tolerance
    self._known: dict[tuple[str, ...], float] = {}

  def __call__(self, parameters: Sequence[Variable], candidates: Sequence[str]) -> Verdict:
    """Score the candidates against the present values."""
    old = tuple(p.get_value() for p in parameters)
    before = self._scored(old)
    try:
      for parameter, value in zip(parameters, candidates, strict=True):
        parameter.set_value(value)
      after = self._scored(tuple(candidates))
    finally:
      for parameter, value in zip(parameters, old, strict=True):
        parameter.set_value(value)
    return Verdict(after >= before - self._tolerance, before, after)

  def _scored(self, values: tuple[str, ...]) -> float:
    if values not in self._known:
      self._known[values] = self._score()
    return self._known[values]

"""An alarm for reinforcement that collapses: it compares the newest steps with the best ones before them."""

import collections
import dataclasses
import math
import statistics
from collections.abc import Mapping

from selfrag_jax.checked import Checked, Natural, Share, Weight
from selfrag_jax.train.loop import TrainingError


class CollapseError(TrainingError):
  """Reinforcement has collapsed; the best checkpoint stays."""


@dataclasses.dataclass(frozen=True)
class AlarmConfig(Checked):
  """The bounds of the alarm, each on means over the last `window` steps; a window of 0 turns it off.

  Few questions in a step make a mean that moves by itself: what has fallen must also exceed `errors` standard errors of
  the difference, by the spread of the steps.

  The likelihood of right rollouts falls early in a collapse, before the reward does (arXiv 2512.04220).
  """

  window: Natural = 10
  share_left: Share = 0.5  # of the best exact match, well-formed rollouts and searches so far
  least_best: Share = 0.2  # a best exact match below it is chance, whose share says nothing
  likelihood_fall: Weight = 1.5  # nats a token, of the rollouts that answer right
  surprise_rise: Weight = 2.0  # nats a token, above the least surprise so far
  errors: Weight = 3.0


class CollapseAlarm:
  """Follows the metrics of the steps of a phase."""

  def __init__(self, config: AlarmConfig):
    self._config = config
    self._newest: dict[str, collections.deque[float]] = {}
    self._best: dict[str, tuple[float, float]] = {}  # the mean, and its squared standard error

  def watch(self, step: int, metrics: Mapping[str, float | None]) -> None:
    """Take the metrics of a step. Raises CollapseError, with the numbers, if one of them has left its bound."""
    config = self._config
    if not config.window:
      return
    bounds = {
      "exact_match": lambda best: config.share_left * best if best >= config.least_best else -math.inf,
      "valid": lambda best: config.share_left * best,
      "searches": lambda best: config.share_left * best,
      "right_log_prob": lambda best: best - config.likelihood_fall,
      "surprise": lambda best: best - config.surprise_rise,
    }
    for name, bound in bounds.items():
      value = metrics.get(name)
      if value is None or not math.isfinite(value):
        continue
      newest = self._newest.setdefault(name, collections.deque(maxlen=config.window))
      newest.append(-value if name == "surprise" else value)  # so that more is better, as for the others
      if len(newest) < config.window:
        continue
      mean = statistics.fmean(newest)
      now = mean, statistics.pvariance(newest, mean) / max(len(newest) - 1, 1)
      best, error = self._best[name] = max(self._best.get(name, now), now)
      if mean < min(bound(best), best - config.errors * math.sqrt(error + now[1])):
        shown = [abs(x) if name == "surprise" else x for x in (best, mean)]
        raise CollapseError(
          f"the policy has collapsed: {name} was {shown[0]:.3g} over {config.window} steps and is {shown[1]:.3g} at "
          f"step {step}. The best checkpoint is kept; lower rl.optimizer.learning_rate, or raise rl.kl_weight. "
          "rl.alarm.window=0 turns this alarm off"
        )

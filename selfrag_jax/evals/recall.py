"""Recall by depth: score a reader on paired questions that differ only in where the needed fact stands."""

from typing import Any, NamedTuple

import jax
import numpy as np

from selfrag_jax.metrics.position import describe
from selfrag_jax.metrics.statistics import bootstrap_difference
from selfrag_jax.tasks.facts import Facts
from selfrag_jax.tasks.sequences import of_facts
from selfrag_jax.train.reading import Reader, Reading, Sight
from selfrag_jax.train.settings import RecallConfig
from selfrag_jax.typing import Params

_score = jax.jit(Reader.score, static_argnums=(0, 3))


class Curve(NamedTuple):
  """One condition: for each question and depth the loss, whether the answer was right, and whether the needed fact was
  seen first or at all, [N, depths]; and how many facts and tokens may be seen."""

  loss: np.ndarray
  right: np.ndarray
  first: np.ndarray
  found: np.ndarray
  budget: int
  budget_tokens: int

  def report(self) -> dict[str, Any]:
    """Describe the curve as JSON."""
    by_depth = lambda hits: hits.mean(axis=0).tolist()
    return {
      **describe(self.right),
      "recall_by_depth": by_depth(self.found),
      "recall_at_1_by_depth": by_depth(self.first),
      "loss_by_depth": by_depth(self.loss),
      "budget": self.budget,
      "budget_tokens": self.budget_tokens,
    }


def measure(
  reader: Reader, params: Params, task: Facts, sight: Sight, config: RecallConfig, *, changed: bool = False
) -> Curve:
  """Ask `config.questions` test questions at each depth; `changed` states and expects another value in each."""
  depths = task.depths(config.depths)
  width = task.lists("test", [0]).facts.shape[2] + 1  # [MEM] stands before each fact
  contexts = max(1, min(config.questions, config.tokens // (task.n_facts * width)))
  columns: list[Reading] = []
  for depth in depths:
    parts = []
    for start in range(0, config.questions, contexts):
      # the last batch is filled up with its last question: one program serves all
      indices = np.minimum(np.arange(start, start + contexts), config.questions - 1)
      batch = of_facts(task.episodes("test", indices, [depth] * contexts, changed=changed))
      read: Any = jax.device_get(_score(reader, params, batch, sight, jax.random.key(start)))
      parts.append(Reading(*(column[: config.questions - start] for column in read)))
    columns.append(Reading(*map(np.concatenate, zip(*parts, strict=True))))
  scores = Reading(*(np.stack(column, axis=1) for column in zip(*columns, strict=True)))
  budget = task.n_facts if sight == "full" else 0 if sight == "none" else reader.config.top_k
  return Curve(*scores, budget=budget, budget_tokens=budget * width + (budget > 0))


def variance_change(before: Curve, after: Curve) -> dict[str, Any]:
  """Compare how much the mean loss varies over depths: the variances, and their difference with its interval."""
  over_depth = lambda losses: float(np.var(losses.mean(axis=0)))
  interval = bootstrap_difference(after.loss, before.loss, over_depth)
  return {"before": over_depth(before.loss), "after": over_depth(after.loss), "interval": list(interval)}

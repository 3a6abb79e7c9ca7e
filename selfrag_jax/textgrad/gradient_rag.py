"""The choice of past critiques for an optimizer's prompt: those of similar cases, in a budget of tokens."""

import bisect
import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from selfrag_jax.memory.diversity import diverse_order
from selfrag_jax.textgrad.gradient_store import GradientStore, PastCritique
from selfrag_jax.textgrad.limits import Content, estimate_tokens

T = TypeVar("T")
MERGES = ("concatenate", "mmr", "cluster", "outcome")


@dataclasses.dataclass(frozen=True)
class RagConfig:
  """Settings of the choice of past critiques.

  Feedback takes at most `tokens` of a prompt: first this step's critiques, then the `window` critiques before them,
  then up to `k` retrieved critiques, then the optimizer's `gradient_memory`, its last steps first. The merge is
  `concatenate` (most similar first), `mmr` (Carbonell & Goldstein 1998), `cluster` (one critique for each group that
  says the same), or `outcome` (similarity, weighted by whether the change that followed helped).
  """

  k: int = 8
  window: int = 0
  tokens: int = 1500
  past_tokens: int = 500  # the most of `tokens` for window and retrieved critiques
  merge: str = "mmr"
  min_score: float = 0.1
  min_ratio: float = 0.75  # least similarity, relative to the best critique for the same sample
  diversity: float = 0.3  # for mmr: 0 is similarity alone
  same: float = 0.8  # for cluster: cosine from which two critiques say the same
  count_tokens: Callable[[Content | None], int] = estimate_tokens

  def __post_init__(self):
    if self.merge not in MERGES:
      raise ValueError(f"unknown merge {self.merge!r}; use one of {', '.join(MERGES)}")
    if min(self.k, self.window, self.past_tokens) < 0 or self.tokens < 1:
      raise ValueError("k, window and past_tokens must be at least 0, tokens at least 1")


@dataclasses.dataclass
class Past:
  """The chosen past critiques: lines for the prompt and their ids."""

  lines: list[str]
  ids: list[str]


def recall(store: GradientStore, rows: np.ndarray, role: str, config: RagConfig, budget: int) -> Past:
  """Choose past critiques of a role, in at most `budget` tokens, for the current critiques.

  `rows` [N, 2D] are the current critiques by `GradientStore.embed`; this must be called before they are stored.
  """
  window = store.recent(config.window, role=role) if config.window else []
  found: dict[str, PastCritique] = {}
  near = store.search(rows, 2 * config.k, role=role, min_score=config.min_score) if config.k else []
  near = [[c for c in past if c.similarity >= config.min_ratio * past[0].similarity] for past in near]
  for same_rank in itertools.zip_longest(*near):  # each sample's best first: no sample takes the room of another
    for critique in sorted(filter(None, same_rank), key=lambda c: -c.similarity):
      found.setdefault(critique.id, critique)
  for critique in window:
    found.pop(critique.id, None)
  chosen = merge(list(found.values()), config)
  past = Past([], [])
  for i, critique in enumerate([*window, *chosen]):
    line = format_past(critique, is_recent=i < len(window))
    cost = config.count_tokens(line)
    if cost <= budget and len(past.ids) < config.k + len(window):
      past.lines.append(line)
      past.ids.append(critique.id)
      budget -= cost
  return past


def merge(ranked: Sequence[PastCritique], config: RagConfig) -> list[PastCritique]:
  """Order past critiques by `config.merge`, most useful first; `ranked` has the best critique of each sample first."""
  if config.merge == "concatenate" or len(ranked) < 2:
    return list(ranked)
  if config.merge == "outcome":
    return sorted(ranked, key=lambda c: -c.similarity * _outcome_weight(c))
  vectors = np.stack([c.vector for c in ranked])
  alike = vectors @ vectors.T
  if config.merge == "cluster":
    return _representatives(ranked, alike, config.same)
  relevance = (1 - config.diversity) * np.array([c.similarity for c in ranked])
  relevance[0] = np.inf  # the best critique of the first sample always leads
  return [ranked[i] for i in diverse_order(relevance, config.diversity * alike, config.k)]


def _representatives(ranked: Sequence[PastCritique], alike: np.ndarray, same: float) -> list[PastCritique]:
  """Keep the first critique of each group that says the same, with the group's count; similar, frequent ones first."""
  leaders: list[int] = []
  counts: dict[int, int] = {}
  for i, critique in enumerate(ranked):
    leader = next((j for j in leaders if alike[i, j] >= same), i)
    if leader == i:
      leaders.append(i)
    counts[leader] = counts.get(leader, 0) + critique.count
  order = sorted(leaders, key=lambda i: (-ranked[i].similarity * np.log1p(counts[i]), i))
  return [dataclasses.replace(ranked[i], count=counts[i]) for i in order]


def _outcome_weight(critique: PastCritique) -> float:
  helped = (critique.helped + 1) / (critique.uses + 2)  # Laplace's rule of succession
  outcome = {True: 1.25, None: 1.0, False: 0.75}[critique.accepted]
  return outcome * (0.5 + helped)


def format_past(critique: PastCritique, is_recent: bool) -> str:
  """Return the line that shows a past critique to the optimizer."""
  similarity = 'recent="yes"' if is_recent else f'similarity="{critique.similarity:.2f}"'
  outcome = {True: "accepted", None: "unknown", False: "rejected"}[critique.accepted]
  change = "" if critique.delta is None else f" {critique.delta:+.3f}"
  facts = f'{similarity} count="{critique.count}" outcome="{outcome}{change}"'
  text = re.sub("<(/?PAST_FEEDBACK)", r"< \1", critique.text)  # a critique may quote the tag
  return f"<PAST_FEEDBACK {facts}>{text}</PAST_FEEDBACK>"


def fit(parts: Sequence[list[Any]], budget: int, count_tokens: Callable[[Content | None], int]) -> list[list[Any]]:
  """Keep as many of the newest parts as a budget of tokens allows, in order; the newest is cut if it is too long."""
  kept = newest(parts, budget, count_tokens)
  return kept if kept or not parts else [[cut(parts[-1][-1], budget, count_tokens)]]


def newest(items: Sequence[T], budget: int, count_tokens: Callable[[T], int]) -> list[T]:
  """Keep as many of the last items as a budget of tokens allows, each whole, in their order."""
  kept: list[T] = []
  for item in reversed(items):
    budget -= count_tokens(item)
    if budget < 0:
      break
    kept.append(item)
  return kept[::-1]


def cut(text: str, budget: int, count_tokens: Callable[[Content | None], int]) -> str:
  """Leave out the middle of a text until it has at most `budget` tokens."""
  if count_tokens(text) <= budget:
    return text
  return _ends(text, bisect.bisect(range(1, len(text)), budget, key=lambda length: count_tokens(_ends(text, length))))


def _ends(text: str, length: int) -> str:
  head = length // 2
  return text[:head] + " […] " + text[len(text) - (length - head) :] if length else ""

"""Batches for training with memory: inputs that continue a context which the model can only see through its memory."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from selfrag_jax.checked import Checked, Count
from selfrag_jax.ragged import kept_first, length_mask
from selfrag_jax.tasks.facts import ASKABLE, Demand, Episodes, Facts
from selfrag_jax.tasks.search_task import Indices


class ContextBatch(NamedTuple):
  """Inputs and the contexts that they continue: E contexts of n chunks, q inputs each.

  `chunks` int32 [E, n, X], `chunk_lengths` [E, n]; `inputs` int32 [E, q, T], their `lengths` [E, q]. The first
  `query_lengths` [E, q] tokens of an input are its query, the others are predicted. `gold` int32 [E, q, g]: the chunks
  that the prediction needs, the one to find first in front; `use_memory` bool [E, q]: whether the input sees chunks.
  """

  chunks: Any
  chunk_lengths: Any
  inputs: Any
  lengths: Any
  query_lengths: Any
  gold: Any
  use_memory: Any


def of_facts(episodes: Episodes) -> ContextBatch:
  """Make each fact a chunk, and each question with its answer an input."""
  questions, answers, needed = episodes.questions, episodes.answers, episodes.needed
  if questions.ndim == 2:  # one question per context
    questions, answers, needed = questions[:, None], answers[:, None], needed[:, None]
  asked = np.full(questions.shape[:2], questions.shape[2], np.int32)
  return ContextBatch(
    chunks=episodes.facts,
    chunk_lengths=episodes.lengths,
    inputs=np.concatenate([questions, answers], axis=2),
    lengths=asked + answers.shape[2],
    query_lengths=asked,
    gold=needed,
    use_memory=np.ones(asked.shape, bool),
  )


@dataclasses.dataclass(frozen=True)
class ListKind(Checked):
  """A kind of lists: `n_facts` facts, questions about the `last` facts (None: all), names that are `alike` or not.

  `variant`: the wording of another variant of the facts.
  """

  n_facts: Count
  last: Count | None = None
  alike: bool = False
  variant: str | None = None


def fact_text(
  task: Facts, split: str, indices: Indices, last: int | None = None, alike: bool = False
) -> dict[str, np.ndarray]:
  """Write lists as plain text to pretrain on: the facts, then questions with their answers in random order.

  Every fact is asked for, or only the `last` facts; in variants with one question per list, `last` asks for a fact near
  the end. Returns tokens and segment ids int32 [B, T] (0: padding at the end) and the mask of predicted tokens, bool
  [B, T]: answers, and in training also the words of a name after its first. Completing a name is the same skill with a
  shorter key: without it a model learns to recall by whole names three times later, at a step that depends on the seed.
  Randomly drawn words are not predicted, since nothing determines them.
  """
  askable = task.variant in ASKABLE
  demand: Demand = "recent" if last and not askable else "even"
  lists = task.lists(split, indices, task.n_facts if askable else 1, demand, alike=alike)
  asked = np.concatenate([lists.questions, lists.answers], axis=2)[:, -(last or 0) :]
  rows, q = asked.shape[:2]
  order = np.stack([np.random.default_rng([task.seed, int(index)]).permutation(q) for index in indices])
  asked = np.take_along_axis(asked, order[:, :, None], axis=1)
  first = task.first_determined if split == "train" else lists.questions.shape[2]
  predicted = np.broadcast_to(np.arange(asked.shape[2]) >= first, asked.shape)
  real = length_mask(lists.lengths, lists.facts.shape[2], np)
  whole = lambda facts, asked: np.concatenate([facts.reshape(rows, -1), asked.reshape(rows, -1)], axis=1)
  real, mask = whole(real, np.ones_like(asked, bool)), whole(np.zeros_like(real), predicted)
  to_front = kept_first(real, np)
  columns = {"tokens": whole(lists.facts, asked), "segment_ids": real.astype(np.int32), "mask": mask}
  return {name: np.take_along_axis(column, to_front, axis=1) for name, column in columns.items()}


class FactText:
  """Rows of text with lists of facts and questions about them; a row holds as many of the shorter lists as fit.

  The kinds of lists take turns, one row each. Models learn recall from short lists first, and learn to read search
  results from lists of names that are alike. A mix of questions about all facts (free recall) and about the last facts
  (running span) makes models neglect the middle (arXiv 2510.10276).
  """

  def __init__(self, variant: str, kinds: Sequence[ListKind], seed: int):
    self._kinds = kinds
    self._tasks = [Facts(kind.variant or variant, kind.n_facts, seed) for kind in self._kinds]
    longest = max(kind.n_facts for kind in self._kinds)
    self._side = [longest // kind.n_facts for kind in self._kinds]  # lists per row
    self._width = max(part["mask"].size for i in range(len(kinds)) for part in [self._part(i, "train", [0])])

  def rows(self, split: str, indices: Indices) -> dict[str, np.ndarray]:
    """Return rows to pretrain on: tokens, segment ids and mask as in `fact_text`, [B, T]."""
    order, parts = [], []
    for kind, side in enumerate(self._side):
      at = [i for i, index in enumerate(indices) if index % len(self._kinds) == kind]
      if at:
        part = self._part(kind, split, [indices[i] for i in at])
        part["segment_ids"] *= 1 + (np.arange(len(part["mask"])) % side)[:, None]
        order += at
        parts.append({name: self._filled(column.reshape(len(at), -1)) for name, column in part.items()})
    return {name: np.concatenate([part[name] for part in parts])[np.argsort(order)] for name in parts[0]}

  def _part(self, kind: int, split: str, indices: Indices) -> dict[str, np.ndarray]:
    side, of = self._side[kind], self._kinds[kind]
    lists = [index * side + j for index in indices for j in range(side)]
    return fact_text(self._tasks[kind], split, lists, of.last, of.alike)

  def _filled(self, rows: np.ndarray) -> np.ndarray:
    return np.pad(rows, ((0, 0), (0, self._width - rows.shape[1])))


class FactData:
  """Lists of facts as data for the phases of the Self-RAG memory: as text, and as contexts to remember."""

  def __init__(self, variant: str, n_facts: int, n_questions: int, text: Sequence[ListKind], seed: int):
    self.task, self.n_questions = Facts(variant, n_facts, seed), n_questions
    self.rows = FactText(variant, text, seed).rows
    self.tokenizer = self.task.tokenizer
    self.chunk_tokens = self.task.lists("train", [0]).facts.shape[2]

  def contexts(self, split: str, indices: Indices, demand: Demand) -> ContextBatch:
    """Return contexts of facts, with questions as their inputs."""
    return of_facts(self.task.lists(split, indices, self.n_questions, demand))

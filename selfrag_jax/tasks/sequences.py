"""Inputs that continue a context which does not stand before them: what training with memory is fed with."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from selfrag_jax.tasks.facts import ASKABLE, CUES, Demand, Episodes, Facts
from selfrag_jax.tasks.search import Indices


class Sequences(NamedTuple):
  """Inputs and the contexts that they continue: E contexts of n chunks, q inputs each.

  `chunks` int32 [E, n, X], `chunk_lengths` [E, n]; `inputs` int32 [E, q, T], their `lengths` [E, q], of which the first
  `query_lengths` are what is asked with and the others are predicted; `gold` int32 [E, q, g]: chunks that the
  prediction takes, the one to be found first; `use_memory` bool [E, q]: the others see no chunk.
  """

  chunks: Any
  chunk_lengths: Any
  inputs: Any
  lengths: Any
  query_lengths: Any
  gold: Any
  use_memory: Any


def of_facts(episodes: Episodes) -> Sequences:
  """Make each fact a chunk, and each question with its answer an input."""
  questions, answers, needed = episodes.questions, episodes.answers, episodes.needed
  if questions.ndim == 2:  # one question each
    questions, answers, needed = questions[:, None], answers[:, None], needed[:, None]
  asked = np.full(questions.shape[:2], questions.shape[2], np.int32)
  return Sequences(
    chunks=episodes.facts,
    chunk_lengths=episodes.lengths,
    inputs=np.concatenate([questions, answers], axis=2),
    lengths=asked + answers.shape[2],
    query_lengths=asked,
    gold=needed,
    use_memory=np.ones(asked.shape, bool),
  )


def fact_text(task: Facts, split: str, indices: Indices) -> dict[str, np.ndarray]:
  """Write lists down as plain text, questions and answers behind the facts in random order: rows to pretrain on.

  Returns tokens and segment ids int32 [B, T] (0: padding at the end) and which tokens are predicted, bool [B, T]: the
  answers, since nothing predicts what is drawn at random.
  """
  lists = task.lists(split, indices, task.n_facts if task.variant in ASKABLE else 1)
  rows, q = len(lists.questions), lists.questions.shape[1]
  order = np.stack([np.random.default_rng([task.seed, int(index)]).permutation(q) for index in indices])
  asked = np.concatenate([lists.questions, lists.answers], axis=2)
  asked = np.take_along_axis(asked, order[:, :, None], axis=1)
  answers = np.broadcast_to(np.arange(asked.shape[2]) >= lists.questions.shape[2], asked.shape)
  real = np.arange(lists.facts.shape[2]) < lists.lengths[:, :, None]
  whole = lambda facts, asked: np.concatenate([facts.reshape(rows, -1), asked.reshape(rows, -1)], axis=1)
  real, mask = whole(real, np.ones_like(asked, bool)), whole(np.zeros_like(real), answers)
  to_front = np.argsort(~real, axis=1, kind="stable")
  columns = {"tokens": whole(lists.facts, asked), "segment_ids": real.astype(np.int32), "mask": mask}
  return {name: np.take_along_axis(column, to_front, axis=1) for name, column in columns.items()}


def recitals(task: Facts, split: str, indices: Indices, span: int) -> Sequences:
  """Ask for lists to be recited: every second one whole (free recall), the others from the last `span` facts on.

  Free recall demands every fact alike, the running span what was read last: with both, models come to neglect the
  middle (arXiv 2510.10276). The input is a cue and the facts in their order.
  """
  lists = task.lists(split, indices)
  contexts, n, width = lists.facts.shape
  cues = np.array([task.tokenizer.encode(cue) for cue in CUES], np.int32)
  asked = cues[np.asarray(indices) % 2]
  wanted = np.arange(n) >= np.where(np.asarray(indices) % 2 == 0, 0, n - span)[:, None]
  real = ((np.arange(width) < lists.lengths[:, :, None]) & wanted[:, :, None]).reshape(contexts, -1)
  to_front = np.argsort(~real, axis=1, kind="stable")
  recited = np.take_along_axis(lists.facts.reshape(contexts, -1), to_front, axis=1)
  one = np.full((contexts, 1), asked.shape[1], np.int32)
  return Sequences(
    chunks=lists.facts,
    chunk_lengths=lists.lengths,
    inputs=np.concatenate([asked, recited], axis=1)[:, None],
    lengths=one + real.sum(axis=1, dtype=np.int32)[:, None],
    query_lengths=one,
    gold=np.zeros((contexts, 1, 1), np.int32),
    use_memory=np.ones((contexts, 1), bool),
  )


class FactData:
  """What the phases of the Self-RAG memory read: lists of facts as text, and as sequences that need a memory.

  Rows of text hold lists of `text_facts` facts in turn, as many of the shorter ones as fit beside each other: recall is
  learnt from short lists first.
  """

  def __init__(self, variant: str, n_facts: int, n_questions: int, text_facts: Sequence[int], seed: int):
    self.task, self.n_questions = Facts(variant, n_facts, seed), n_questions
    self._text = [Facts(variant, n, seed) for n in text_facts]
    self._side = [max(text_facts) // n for n in text_facts]  # lists of a row
    one = [fact_text(task, "train", [0])["mask"].shape[1] for task in self._text]
    self._width = max(side * width for side, width in zip(self._side, one, strict=True))
    self.tokenizer = self.task.tokenizer
    self.chunk_tokens = self.task.lists("train", [0]).facts.shape[2]

  def rows(self, split: str, indices: Indices) -> dict[str, np.ndarray]:
    """Return rows to pretrain on; their kinds take turns."""
    kinds, order, parts = len(self._text), [], []
    for kind, (task, side) in enumerate(zip(self._text, self._side, strict=True)):
      at = [i for i, index in enumerate(indices) if index % kinds == kind]
      if at:
        part = fact_text(task, split, [indices[i] // kinds * side + j for i in at for j in range(side)])
        part["segment_ids"] *= 1 + (np.arange(len(part["mask"])) % side)[:, None]
        order += at
        parts.append({name: self._filled(column.reshape(len(at), -1)) for name, column in part.items()})
    return {name: np.concatenate([part[name] for part in parts])[np.argsort(order)] for name in parts[0]}

  def _filled(self, rows: np.ndarray) -> np.ndarray:
    return np.pad(rows, ((0, 0), (0, self._width - rows.shape[1])))

  def sequences(self, split: str, indices: Indices, demand: Demand) -> Sequences:
    """Return contexts of facts, and questions about them."""
    return of_facts(self.task.lists(split, indices, self.n_questions, demand))

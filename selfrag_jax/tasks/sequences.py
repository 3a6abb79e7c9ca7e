"""Inputs that continue a context which does not stand before them: what training with memory is fed with."""

from typing import Any, NamedTuple

import numpy as np

from selfrag_jax.tasks.facts import ASKABLE, Episodes, Facts


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


def fact_text(task: Facts, split: str, indices: range) -> dict[str, np.ndarray]:
  """Write lists down as plain text, questions and answers behind the facts in random order: rows to pretrain on.

  Returns tokens and segment ids int32 [B, T] (0: padding at the end) and which tokens are predicted, bool [B, T].
  """
  lists = task.lists(split, indices, task.n_facts if task.variant in ASKABLE else 1)
  asked = np.concatenate([lists.questions, lists.answers], axis=2)
  order = np.stack([np.random.default_rng([task.seed, index]).permutation(asked.shape[1]) for index in indices])
  asked = np.take_along_axis(asked, order[:, :, None], axis=1).reshape(len(indices), -1)
  real = np.arange(lists.facts.shape[2]) < lists.lengths[:, :, None]
  tokens = np.concatenate([lists.facts.reshape(len(indices), -1), asked], axis=1)
  real = np.concatenate([real.reshape(len(indices), -1), np.ones_like(asked, bool)], axis=1)
  to_front = np.argsort(~real, axis=1, kind="stable")
  tokens, real = np.take_along_axis(tokens, to_front, axis=1), np.take_along_axis(real, to_front, axis=1)
  return {"tokens": tokens, "segment_ids": real.astype(np.int32), "mask": real}

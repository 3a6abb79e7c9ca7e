"""Experts: demonstrations of the questions of a step that join the groups of their rollouts (`RLConfig.experts`)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from selfrag_jax.ragged import pad_rows
from selfrag_jax.tasks.search_task import SearchBatch, SearchTask
from selfrag_jax.text.chat import document_body, render_conversation
from selfrag_jax.train.experience import Trajectories
from selfrag_jax.train.rewards import RolloutRewards


def demonstrations(
  task: SearchTask, batch: SearchBatch, max_hops: int, width: int, rewards: RolloutRewards
) -> tuple[Trajectories, np.ndarray]:
  """Render a demonstration of each question of training, without an advantage yet; a rollout can be too short for one.

  Returns their rewards, float32 [Q], too: what a rollout with this answer, these documents and searches would earn.
  """
  made = [task.demonstration("train", int(index), "gold", max_hops) for index in batch.indices]
  ids, masks = zip(*(render_conversation(task.tokenizer, shown, task.template) for shown in made), strict=True)
  fits, zeros = np.array([len(row) <= width for row in ids]), np.zeros(len(ids), np.float32)
  rows = lambda values: pad_rows([row[:width] for row in values], width)
  tokens, lengths = rows(ids)
  turns = [shown["messages"][-1]["content"] for shown in made]
  bodies = [[document_body(task.tokenizer, document) for document in _documents(turn)] for turn in turns]
  recalls = [_recall(batch, row, shown) for row, shown in enumerate(bodies)]
  searches = [min(sum(part["type"] == "search" for part in turn), max_hops) for turn in turns]
  said = [
    (turn[-1]["text"], list(map(task.tokenizer.decode, shown))) for turn, shown in zip(turns, bodies, strict=True)
  ]
  earned = rewards.of_right_answers(said, np.array(recalls), np.array(searches))
  return Trajectories(zeros, fits, None, lengths, rows(masks)[0].astype(bool), tokens, None), earned


def _documents(turn: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
  return [document for part in turn for document in part.get("documents", ())]


def _recall(batch: SearchBatch, row: int, bodies: list[list[int]]) -> float:
  """Return the share of a question's gold documents that are shown, which are told by their tokens."""
  corpus, gold = batch.corpus, batch.gold[row]
  found = [corpus.tokens[slot, : corpus.lengths[slot]].tolist() in bodies for slot in gold[gold >= 0]]
  return sum(found) / max(len(found), 1)

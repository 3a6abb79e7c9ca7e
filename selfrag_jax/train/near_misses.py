"""Near misses: rollouts whose own first search found a gold document, and which then answered wrongly, tried again.

They go on behind that search: the first of the rollout, or the second where a rule writes the first one, which is the
same in all rollouts of a question.
"""

import numpy as np

from selfrag_jax.generate.control import ControlTokens
from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.generate.transcript import read_transcripts
from selfrag_jax.ragged import pad_rows
from selfrag_jax.tasks.search_task import SearchBatch
from selfrag_jax.train.rollouts import Episodes


def searches_kept(config: RolloutConfig) -> int:
  """Return how many searches of a near miss stay as they are."""
  return 2 if config.first_query == "question" else 1


def near_misses(episodes: Episodes, exact_match_B: np.ndarray, kept: int) -> tuple[np.ndarray, np.ndarray]:
  """Return a rollout of each question, int [Q], and whether it is a near miss, bool [Q]: the first one, if any is.

  The search that found a gold document is the last of the `kept` ones.
  """
  gold, slots = np.repeat(episodes.batch.gold, episodes.repeats, axis=0), episodes.host.slots[:, kept - 1]
  found = ((slots[:, :, None] == gold[:, None, :]) & (gold >= 0)[:, None, :]).any(axis=(1, 2))
  missed = (found & (exact_match_B == 0)).reshape(-1, episodes.repeats)
  return np.arange(len(missed)) * episodes.repeats + missed.argmax(axis=1), missed.any(axis=1)


def behind_searches(
  episodes: Episodes, rows_Q: np.ndarray, kept: int, width: int, control: ControlTokens
) -> SearchBatch:
  """Return the questions with prompts of `width` tokens, their rollouts up to what the `kept` first searches found."""
  host = episodes.host
  tokens, starts = host.tokens[rows_Q], host.prompt_lengths[rows_Q]
  closing = (tokens == control.retrieval_end) & ~host.sampled[rows_Q]
  closing &= np.arange(tokens.shape[1]) >= starts[:, None]
  inside = np.where(closing & (closing.cumsum(axis=1) <= kept), np.arange(1, tokens.shape[1] + 1), 0)
  ends = np.maximum(inside.max(axis=1), starts)  # a row without a search is its prompt
  prompts, lengths = pad_rows([row[:end].tolist() for row, end in zip(tokens, ends, strict=True)], width)
  return episodes.batch._replace(prompts=prompts, lengths=lengths)


def as_whole(episodes: Episodes, rows_Q: np.ndarray, kept: int, again: Episodes, control: ControlTokens) -> Episodes:
  """Return rollouts that went on behind the `kept` first searches of `rows_Q` with all that came before, to be scored.

  The rollout on device stays as it is: what was sampled before is no part of it.
  """
  rows, before, host = np.repeat(rows_Q, again.repeats), episodes.host, again.host
  inside = np.arange(host.tokens.shape[1]) < host.prompt_lengths[:, None]
  whole = host.replace(
    sampled=np.where(inside, before.sampled[rows], host.sampled),
    prompt_lengths=before.prompt_lengths[rows],
    slots=np.concatenate([before.slots[rows, :kept], host.slots], axis=1),
    searches=host.searches + np.minimum(before.searches[rows], kept),
  )
  return Episodes(again.rollout, whole, read_transcripts(whole, control), episodes.batch, again.repeats)

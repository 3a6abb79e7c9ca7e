"""Transcripts of finished rollouts: the queries, the answer, and whether the rollout kept the format."""

from dataclasses import dataclass

import numpy as np

from selfrag_jax.generate.control import ControlTokens
from selfrag_jax.generate.rollout import Rollout


@dataclass(frozen=True)
class Transcript:
  """One rollout, parsed. `answer` is None if the rollout has no answer; `valid` says that every turn was well formed.

  A turn is well formed if the policy opened it, wrote a body without control tokens, and closed it by itself. After the
  notice, the opening of the answer is forced; such a turn can be well formed too. So can a search that a rule wrote.
  """

  queries: tuple[tuple[int, ...], ...]
  answer: tuple[int, ...] | None
  valid: bool


def read_transcripts(rollout: Rollout, control: ControlTokens) -> list[Transcript]:
  """Parse every row of a rollout (numpy arrays)."""
  fields = rollout.tokens, rollout.sampled, rollout.prompt_lengths, rollout.lengths
  rows = zip(*map(np.asarray, fields), strict=True)
  return [read_transcript(tokens[start:end], sampled[start:end], control) for tokens, sampled, start, end in rows]


def read_transcript(tokens: np.ndarray, sampled: np.ndarray, control: ControlTokens) -> Transcript:
  """Parse the part of a rollout after the prompt: `tokens` int [T] and `sampled` bool [T]."""
  closing = {control.search_start: control.search_end, control.answer_start: control.answer_end}
  specials = {*closing, *closing.values(), control.end, control.pad, control.retrieval_start, control.retrieval_end}
  specials |= {*control.doc_start, *control.doc_end}
  queries, valid = [], True
  at = 0
  while at < len(tokens):
    opening = int(tokens[at])
    if opening == control.retrieval_start and not sampled[at]:  # documents or notice, up to the next turn
      while at < len(tokens) and not sampled[at] and int(tokens[at]) != control.answer_start:
        at += 1
      continue
    if opening not in closing:
      break
    ends = np.flatnonzero(tokens[at + 1 :] == closing[opening])
    if not len(ends):
      break
    end = at + 1 + int(ends[0])
    body = tuple(int(token) for token in tokens[at + 1 : end])
    by_rule = opening == control.search_start and not sampled[at]
    valid &= bool(body) and not specials.intersection(body) and bool(sampled[end] or by_rule)
    if opening == control.answer_start:
      return Transcript(tuple(queries), body, valid and end == len(tokens) - 1)
    queries.append(body)
    at = end + 1
  return Transcript(tuple(queries), None, False)

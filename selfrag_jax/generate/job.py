"""The jobs of an engine: what the host knows of each text that is being written."""

from collections.abc import Sequence

import jax
import numpy as np

from selfrag_jax.generate.generation import Generation, GenerationSettings
from selfrag_jax.generate.grammar import Grammar
from selfrag_jax.generate.slots import Rows
from selfrag_jax.generate.step import Position
from selfrag_jax.ragged import pad_rows
from selfrag_jax.text.stream import TextStream
from selfrag_jax.text.tokenizer import Tokenizer

MOST_ENDS = 4  # tokens that can end a text or a query


class Prompt:
  """A prompt that is read once for all of its samples: its tokens, and the row that has read `n_read` of them.

  `reused` of them have been read for an earlier prompt.
  """

  def __init__(self, ids: list[int]):
    self.ids = ids
    self.row: Position | None = None
    self.n_read = self.reused = 0


class Job:
  """One sample of a prompt, and what its text has come to."""

  def __init__(
    self,
    generation: Generation,
    prompt: Prompt,
    settings: GenerationSettings,
    tokenizer: Tokenizer,
    grammar: Grammar | None,
  ):
    self.generation, self.prompt, self.settings, self.grammar = generation, prompt, settings, grammar
    self.stream = TextStream(tokenizer, settings.stop)
    key = jax.random.fold_in(jax.random.key(settings.seed), generation.sample)
    self.seed = np.asarray(jax.random.key_data(key))
    self.n_written = self.n_calls = 0
    self.query: list[int] | None = None  # the tokens of a query that is being written

  @property
  def left(self) -> int:
    """How many tokens it may still write."""
    return self.settings.max_new_tokens - self.n_written

  @property
  def needs(self) -> int:
    """How many tokens it may come to have, if no tool is asked."""
    return len(self.prompt.ids) + len(self.generation.tokens) + self.left


def rows_of(jobs: Sequence[Job | None], ends: Sequence[int], query_end: int) -> Rows:
  """Return how each slot goes on; one without a job writes nothing. `query_end` ends the turns of jobs with tools."""
  stops = [[*ends, *([query_end] if job.settings.tools else [])] if job else [] for job in jobs]
  of = lambda name, kind, other=0: np.array([getattr(job.settings, name) if job else other for job in jobs], kind)
  return Rows(
    left=np.array([job.left if job else 0 for job in jobs], np.int32),
    written=np.array([job.n_written if job else 0 for job in jobs], np.int32),
    seeds=np.array([job.seed if job else (0, 0) for job in jobs], np.uint32),
    stops=pad_rows(stops, MOST_ENDS, -1)[0],
    temperature=of("temperature", np.float32),
    top_k=of("top_k", np.int32),
    top_p=of("top_p", np.float32, 1),
  )

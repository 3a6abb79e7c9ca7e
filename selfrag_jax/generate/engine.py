"""The engine: many texts at once, each with its own beginning, end, settings and stream, from one batch of slots.

It schedules on the host. Each round reads a part of the prompts that wait, and lets all slots write; the programs are
those of `generate/slots.py` over the step that completions and rollouts share.
"""

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from selfrag_jax.generate.base import Base
from selfrag_jax.generate.batch import SlotBatch
from selfrag_jax.generate.generation import FinishReason, Generation, GenerationSettings, Piece
from selfrag_jax.generate.grammar import Grammar, Vocabulary
from selfrag_jax.generate.job import Job, Prompt, rows_of
from selfrag_jax.generate.prefixes import PrefixCache
from selfrag_jax.generate.tools import Reply
from selfrag_jax.mesh import platform
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.layers import turn
from selfrag_jax.model.lm import unstack
from selfrag_jax.text.chat import (
  COMPACT,
  ChatTemplate,
  end_ids,
  find_template,
  render_documents,
  render_for_completion,
  render_notice,
)
from selfrag_jax.text.rows import input_rows
from selfrag_jax.text.tokenizer import Tokenizer
from selfrag_jax.typing import Params

CONTEXT = 2048  # tokens, for a model that has no limit of its own
NOTHING, NO_MORE = "Nothing was found.", "No more searches."


class Engine:
  """Writes texts with a language model: `Engine(load_model("smollm2-135m")).generate_from_conversation(...)`.

  Whoever waits for a text does the work of a round for all, so threads may share an engine; `run` gives it a thread of
  its own. Texts do not depend on which others are written at the same time (but for the last digits of float32, which
  depend on the size of a batch).
  """

  def __init__(
    self,
    model: Base,
    tokenizer: Tokenizer | None = None,
    *,
    slots: int = 16,
    context_tokens: int | None = None,
    read_tokens: int = 512,
    steps: int = 1,
    prefix_cache_bytes: int = 1 << 29,
    template: ChatTemplate | None = None,
  ):
    """Lay out a model for decoding.

    Args:
      model: a result of `load_model`.
      tokenizer: None: the model's own.
      slots: the most texts that are written at once; others wait.
      context_tokens: the most tokens of a prompt and its answer (None: the model's own limit, or 2,048).
      read_tokens: the most tokens of waiting prompts that a round reads; more let prompts begin, and texts that are
        being written wait.
      steps: tokens that a round writes in one program; more than 1 spares accelerators a wait for the host.
      prefix_cache_bytes: the room for prompts and answers that later prompts may begin with (0: none).
      template: how conversations are rendered (None: by the tokenizer).

    Raises ValueError for a model without a tokenizer.
    """
    chosen = tokenizer or model.tokenizer
    if chosen is None:
      raise ValueError("the model was loaded without a tokenizer: Engine(model, tokenizer)")
    counts = {"slots": slots, "read_tokens": read_tokens, "steps": steps, "context_tokens": context_tokens}
    for name, value in counts.items():
      if value is not None and value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")
    self.config, self.tokenizer = model.config, chosen
    self.template = template or find_template(chosen) or COMPACT
    limits = [limit for limit in (context_tokens, model.context_tokens) if limit is not None]
    self.context_tokens = min(limits, default=CONTEXT)
    self.slots, self._read_tokens, self._steps = slots, read_tokens, steps
    self._ends = [*dict.fromkeys(i for i in end_ids(chosen, self.config.vocab_size)[:0:-1] if i is not None)]
    special = chosen.special
    self._query_start, self._query_end = special["<|search_start|>"], special["<|search_end|>"]
    self._prefixes = PrefixCache(prefix_cache_bytes, all(spec.kind == "T" for spec in self.config.layers))
    self._vocabulary: Vocabulary | None = None  # made for the first schema
    self._lock, self._arrived, self._closed = threading.RLock(), threading.Event(), False
    self._incoming: deque[Job] = deque()
    self._waiting: deque[Job] = deque()
    self._batch = SlotBatch[Job](model.config, _laid_out(model.config, model.params), slots, lambda job: job.needs)

  # --- what callers use ---

  def submit(
    self,
    prompt: str | Sequence[int],
    settings: GenerationSettings | None = None,
    *,
    num_samples: int = 1,
    listener: Callable[[Piece], None] | None = None,
    **changes: Any,
  ) -> list[Generation]:
    """Queue the samples of a prompt, a text or token ids, and return them; nothing is written yet.

    `changes` are fields of `GenerationSettings`. A `listener` gets the pieces, in the thread that does the work, in
    place of `Generation.pieces`. Raises ValueError for a prompt that is empty or leaves no room for an answer.
    """
    settings = dataclasses.replace(settings or GenerationSettings(), **changes)
    if num_samples < 1:
      raise ValueError(f"num_samples is {num_samples}; it must be at least 1")
    (ids,) = input_rows(self.tokenizer, [prompt], self.config.vocab_size)  # type: ignore[arg-type]
    if len(ids) + settings.max_new_tokens > self.context_tokens:
      raise ValueError(
        f"a prompt of {len(ids):,} tokens and max_new_tokens = {settings.max_new_tokens:,} are more than the "
        f"{self.context_tokens:,} tokens of the context: shorten the prompt, or lower max_new_tokens"
      )
    shared, jobs = Prompt(ids), []
    for n in range(num_samples):
      grammar = None if settings.schema is None else self._grammar(settings.schema)
      jobs.append(Job(Generation(self, ids, n, listener), shared, settings, self.tokenizer, grammar))
    if self._closed:
      raise RuntimeError("the engine is closed")
    self._incoming.extend(jobs)
    self._arrived.set()
    return [job.generation for job in jobs]

  def generate(
    self,
    prompt: str | Sequence[int],
    settings: GenerationSettings | None = None,
    *,
    num_samples: int = 1,
    **changes: Any,
  ) -> Iterator[Piece]:
    """Yield the pieces of all samples of a prompt as they are written; the prompt is read once. See `submit`."""
    generations = self.submit(prompt, settings, num_samples=num_samples, **changes)
    try:
      while self.advance(generations):
        for generation in generations:
          while generation.unread:
            yield generation.unread.popleft()
      for generation in generations:
        if generation.error is not None:
          raise generation.error
    finally:
      for generation in generations:
        generation.cancel()

  def generate_batch(
    self,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    settings: GenerationSettings | None = None,
    *,
    num_samples: int = 1,
    **changes: Any,
  ) -> tuple[list[list[int]], list[list[int]]]:
    """Return token ids and masks of the samples of each prompt, in the order of the prompts.

    A row is the prompt and what follows; its mask is 1 on the tokens that the model wrote, and 0 on the prompt and on
    forced tokens.
    """
    rows = [one for prompt in prompts for one in self.submit(prompt, settings, num_samples=num_samples, **changes)]
    for generation in rows:
      generation.wait()
    return [g.prompt + g.tokens for g in rows], [[0] * len(g.prompt) + g.mask for g in rows]

  def submit_conversation(
    self, conversation: Mapping[str, Any], settings: GenerationSettings | None = None, **options: Any
  ) -> list[Generation]:
    """Queue the assistant's next turn of a conversation, rendered in the template. See `submit`."""
    return self.submit(self.render(conversation), settings, **options)

  def generate_from_conversation(
    self, conversation: Mapping[str, Any], settings: GenerationSettings | None = None, **changes: Any
  ) -> str:
    """Return the assistant's next turn of a conversation `{"messages": [...]}` as `text/chat.py` renders it."""
    return self.submit_conversation(conversation, settings, **changes)[0].wait().text

  def render(self, conversation: Mapping[str, Any]) -> list[int]:
    """Return the prompt of the assistant's next turn as token ids."""
    return render_for_completion(self.tokenizer, conversation, self.template)

  def advance(self, generations: Sequence[Generation]) -> bool:
    """Do a round unless one of the generations has a piece that nobody has taken; False: all pieces are taken."""
    while not any(g.unread for g in generations):
      with self._lock:  # outside a round: none is between its end and its last piece
        if any(g.unread for g in generations):
          break
        if all(g.is_done for g in generations):
          return False
        # cancelled ones end in a round without work
        if not self.step() and not all(g.is_done for g in generations):
          raise RuntimeError("the engine was closed before the text was finished")
    return True

  # --- rounds ---

  def run(self) -> None:
    """Do rounds until `close`, for a thread of the engine's own."""
    while not self._closed:
      if not self.step():
        self._arrived.wait(timeout=1)
        self._arrived.clear()

  def close(self) -> None:
    """Cancel what is being written and refuse what comes."""
    self._closed = True
    with self._lock:
      for job in self._jobs():
        self._finish(job, "cancelled")
      self._batch.clear()
      self._prefixes.clear()
    self._arrived.set()

  def load(self) -> dict[str, int]:
    """Return how many texts are being written, and how many wait."""
    return {"active": len(self._batch), "waiting": len(self._waiting) + len(self._incoming)}

  def step(self) -> bool:
    """Do one round: read a part of the waiting prompts, then write; return whether there was anything to do.

    An error of the device ends the texts that are being written, with it as their `error`; the engine goes on.
    """
    with self._lock:
      for job in self._jobs():
        if job.generation.is_cancelled:
          self._finish(job, "cancelled")
      if not self._jobs():
        return False
      try:
        self._read_waiting()
      except Exception as error:
        self._fail(error, [self._waiting[0]])
      try:
        if len(self._batch):
          self._write()
      except Exception as error:
        self._fail(error)
      return True

  def _jobs(self) -> list[Job]:
    while self._incoming:
      self._waiting.append(self._incoming.popleft())
    return [*(job for job in self._batch.occupants if job is not None), *self._waiting]

  def _fail(self, error: Exception, others: Sequence[Job] = ()) -> None:
    for job in [*(job for job in self._batch.occupants if job is not None), *others]:
      self._end(job, "error", error)
    # what the device held may be half written
    self._batch.clear()
    self._prefixes.clear()

  def _read_waiting(self) -> None:
    budget = self._read_tokens
    while self._waiting and budget > 0 and not self._batch.is_full:
      job, prompt = self._waiting[0], self._waiting[0].prompt
      row = prompt.row
      if row is None:
        prompt.reused, known = self._prefixes.find(prompt.ids)
        prompt.n_read, row = prompt.reused, self._batch.begin(len(prompt.ids), known)
      part = prompt.ids[prompt.n_read : prompt.n_read + budget]
      prompt.row = row = self._batch.read(row, part)
      prompt.n_read += len(part)
      budget -= len(part)
      if prompt.n_read < len(prompt.ids):
        break
      if part:
        self._prefixes.keep(prompt.ids, row)
      job.generation.reused = prompt.reused
      self._batch.add(job, row)
      self._waiting.popleft()

  def _write(self) -> None:
    """Let every slot write, and hand out what it wrote."""
    allowed, jobs = self._allowed(), [*self._batch.occupants]
    rows = rows_of(jobs, self._ends, self._query_end)
    tokens, log_probs = self._batch.write(rows, allowed, self._steps if allowed is None else 1)
    for job, *written in zip(jobs, tokens.tolist(), log_probs.tolist(), strict=True):
      for token, log_prob in zip(*written, strict=True):
        if job is None or job.generation.is_done or token < 0:
          break
        self._take(job, token, log_prob)

  def _allowed(self) -> np.ndarray | None:
    """Return which tokens each slot may write next, as bits; None: every slot any."""
    allowed: dict[int, np.ndarray] = {}
    for slot, job in enumerate(self._batch.occupants):
      if job is not None and job.grammar is not None:
        try:
          allowed[slot] = job.grammar.allowed()
        except ValueError as error:
          self._end(job, "error", error)
    if not allowed or self._vocabulary is None:
      return None
    return np.stack([allowed.get(slot, self._vocabulary.everything) for slot in range(len(self._batch.occupants))])

  def _take(self, job: Job, token: int, log_prob: float) -> None:
    """Hand a written token out, and end the text or answer a query if it says so."""
    job.n_written += 1
    text, is_end = "", token in self._ends
    if job.settings.tools and token == self._query_start:
      job.query = []
    elif job.query is not None and token != self._query_end:
      job.query.append(token)
    elif not is_end:
      text = job.stream.add(token)
    job.generation.give(token, 1, text, log_prob)
    try:
      if job.grammar is not None:
        job.grammar.accept(token)
    except ValueError as error:  # a grammar has limits; the texts beside this one go on
      self._end(job, "error", error)
      return
    if is_end or job.stream.stopped or (job.grammar is not None and job.grammar.is_done):
      self._finish(job, "stop")
    elif token == self._query_end and job.query is not None:
      self._answer(job)
    elif job.left <= 0:
      self._finish(job, "length")

  def _answer(self, job: Job) -> None:
    """Answer a query: the tokens of the reply are forced, as a rollout's."""
    query, job.query = self.tokenizer.decode(job.query or [], skip_special=True), None
    try:
      reply = self._reply(job, query)
      block = (
        render_notice(self.tokenizer, reply) if isinstance(reply, str) else render_documents(self.tokenizer, reply)
      )
      if job.needs + len(block) > self.context_tokens:
        raise ValueError(f"what a tool found has {len(block):,} tokens, and the context is full: find fewer documents")
    except Exception as error:  # of a tool; the texts beside this one go on
      self._end(job, "error", error)
      return
    job.n_calls += 1
    if not isinstance(reply, str):
      job.generation.documents += reply
    row = self._batch.read(self._batch.take(job, job.needs + len(block)), block)
    self._batch.remove(job)
    for token in block:
      job.generation.give(token, 0, "")
    self._batch.add(job, row)

  def _reply(self, job: Job, query: str) -> Sequence[Mapping[str, Any]] | str:
    if job.n_calls >= job.settings.max_tool_calls:
      return NO_MORE
    replies: Iterator[Reply] = (tool(query) for tool in job.settings.tools)
    return next((reply for reply in replies if reply is not None), None) or NOTHING

  def _finish(self, job: Job, reason: FinishReason) -> None:
    if reason in ("stop", "length") and self._steps == 1:
      # the next prompt of a conversation begins with this one and its answer. With more steps a program, a slot may
      # have read more than the answer
      tokens = job.prompt.ids + job.generation.tokens
      self._prefixes.keep(tokens, self._batch.take(job, len(tokens)))
    self._end(job, reason)

  def _end(self, job: Job, reason: FinishReason, error: Exception | None = None) -> None:
    if job in self._batch.occupants:
      self._batch.remove(job)
    else:
      self._waiting.remove(job)
    job.generation.finish(reason, job.stream.end(), error)

  def _grammar(self, schema: Mapping[str, Any]) -> Grammar:
    if self._vocabulary is None:
      self._vocabulary = Vocabulary(self.tokenizer, self.config.padded_vocab, self._ends[0])
    return self._vocabulary.grammar(schema)


def _for_decoding(config: ModelConfig, params: Params) -> Params:
  layers = unstack(config, params)
  return turn(layers) if platform() == "cpu" else layers


_laid_out = jax.jit(_for_decoding, static_argnums=0)

"""The engine: many texts at once, each with its own beginning, end, settings and stream, from one batch of slots.

It schedules on the host. Each round reads a part of the prompts that wait, and lets all slots write; the programs are
those of `generate/slots.py` over the step that completions and rollouts share.
"""

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from selfrag_jax.generate.generation import Generation, GenerationSettings, Piece
from selfrag_jax.generate.grammar import Grammar, Vocabulary
from selfrag_jax.generate.prefixes import PrefixCache
from selfrag_jax.generate.slots import Rows, put, resized, write
from selfrag_jax.generate.step import Position, begin, read
from selfrag_jax.generate.tools import Reply
from selfrag_jax.mesh import fetch
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import unstack
from selfrag_jax.ragged import pad_rows, power_of_two
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
from selfrag_jax.text.stream import TextStream
from selfrag_jax.text.tokenizer import Tokenizer
from selfrag_jax.typing import Params

CONTEXT = 2048  # tokens, for a model that has no limit of its own
LEAST_ROOM = 128  # tokens of a slot; rooms are powers of two, so that a few compiled programs serve all lengths
WIDTHS = (16, 64, 256)  # tokens that one program reads
GROWTH = 4  # the number of slots is a power of it: half empty batches cost little, programs take seconds to compile
FIRST = np.zeros(1, np.int32)
NOTHING, NO_MORE = "Nothing was found.", "No more searches."


class Model(Protocol):
  """The protocol of a model, such as `train.load.LoadedModel`."""

  @property
  def config(self) -> ModelConfig: ...
  @property
  def params(self) -> Params: ...
  @property
  def tokenizer(self) -> Tokenizer | None: ...
  @property
  def context_tokens(self) -> int | None: ...


class _Prompt:
  """A prompt that is read once for all of its samples."""

  def __init__(self, ids: list[int]):
    self.ids: list[int] = ids
    self.row: Position | None = None
    self.n_read = self.reused = 0


class _Job:
  """One sample: its prompt, its state on the host and, while it is in a slot, all tokens that the slot has read."""

  def __init__(self, generation: Generation, prompt: _Prompt, settings: GenerationSettings, stream: TextStream):
    self.generation, self.prompt, self.settings, self.stream = generation, prompt, settings, stream
    key = jax.random.fold_in(jax.random.key(settings.seed), generation.sample)
    self.seed = np.asarray(jax.random.key_data(key))
    self.grammar: Grammar | None = None
    self.n_written = self.n_calls = 0
    self.query: list[int] | None = None  # the tokens of a query that is being written

  @property
  def left(self) -> int:
    return self.settings.max_new_tokens - self.n_written


class Engine:
  """Writes texts with a language model: `Engine(load_model("smollm2-135m")).generate_from_conversation(...)`.

  Whoever waits for a text does the work of a round for all, so threads may share an engine; `run` gives it a thread of
  its own. Texts do not depend on which others are written at the same time (but for the last digits of float32, which
  depend on the size of a batch).
  """

  def __init__(
    self,
    model: Model,
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
      steps: tokens that a round writes in one program; more than 1 pays on accelerators.
      prefix_cache_bytes: the room for prompts and answers that later prompts may begin with (0: none).
      template: how conversations are rendered (None: by the tokenizer).

    Raises ValueError for a model without a tokenizer.
    """
    chosen = tokenizer or model.tokenizer
    if chosen is None:
      raise ValueError("the model was loaded without a tokenizer: Engine(model, tokenizer)")
    for name, value in {"slots": slots, "read_tokens": read_tokens, "steps": steps}.items():
      if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")
    self.config, self.tokenizer = model.config, chosen
    self.template = template or find_template(chosen) or COMPACT
    self.context_tokens = min(context_tokens or CONTEXT * 1024, model.context_tokens or context_tokens or CONTEXT)
    self.slots = slots
    self._read_tokens, self._steps = read_tokens, steps
    self._params = jax.jit(unstack, static_argnums=0)(model.config, model.params)
    self._ends = {i for i in end_ids(chosen, self.config.vocab_size)[1:] if i is not None}
    special = chosen.special
    self._query_start, self._query_end = special["<|search_start|>"], special["<|search_end|>"]
    self._prefixes = PrefixCache(prefix_cache_bytes, all(spec.kind == "T" for spec in self.config.layers))
    self._vocabulary: Vocabulary | None = None  # made for the first schema
    self._lock, self._arrived, self._closed = threading.RLock(), threading.Event(), False
    self._incoming: deque[_Job] = deque()
    self._waiting: deque[_Job] = deque()
    self._active: list[_Job | None] = []  # by slot
    self._position: Position | None = None
    self._room = 0
    self.rounds = 0

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
    settings = _settings(settings, changes)
    if num_samples < 1:
      raise ValueError(f"num_samples is {num_samples}; it must be at least 1")
    (ids,) = input_rows(self.tokenizer, [prompt], self.config.vocab_size)  # type: ignore[arg-type]
    if len(ids) + settings.max_new_tokens > self.context_tokens:
      raise ValueError(
        f"a prompt of {len(ids):,} tokens and max_new_tokens = {settings.max_new_tokens:,} are more than the "
        f"{self.context_tokens:,} tokens of the context: shorten the prompt, or lower max_new_tokens"
      )
    jobs, shared = [], _Prompt(ids)
    for n in range(num_samples):
      generation = Generation(self, ids, n, listener)
      job = _Job(generation, shared, settings, TextStream(self.tokenizer, settings.stop or ()))
      if settings.schema is not None:
        job.grammar = self._grammar(settings.schema)
      jobs.append(job)
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
          while generation._pieces:
            yield generation._pieces.popleft()
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
    while not any(g._pieces for g in generations):
      if all(g.is_done for g in generations):
        return False
      with self._lock:
        if not any(g._pieces or g.is_done for g in generations) and not self.step():
          raise RuntimeError("the engine was closed before the text was finished")
    return True

  # --- the rounds ---

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
      for job in [*self._jobs()]:
        job.generation.cancel()
      self._drop_cancelled()
      self._position, self._room, self._active = None, 0, []
      self._prefixes.clear()
    self._arrived.set()

  def load(self) -> dict[str, int]:
    """Return how many texts are being written, and how many wait."""
    return {"active": sum(job is not None for job in self._active), "waiting": len(self._waiting) + len(self._incoming)}

  def step(self) -> bool:
    """Do one round: read a part of the waiting prompts, then write; return whether there was anything to do.

    An error of the device ends all texts that are being written, with it as their `error`; the engine goes on.
    """
    with self._lock:
      self._drop_cancelled()
      if not any(True for _ in self._jobs()):
        return False
      self.rounds += 1
      try:
        self._read_waiting()
        if any(self._active):
          self._write()
      except Exception as error:
        self._fail(error)
      return True

  def _jobs(self) -> Iterator[_Job]:
    while self._incoming:
      self._waiting.append(self._incoming.popleft())
    yield from [job for job in self._active if job is not None]
    yield from [*self._waiting]

  def _drop_cancelled(self) -> None:
    for job in [*self._jobs()]:
      if job.generation.is_cancelled and not job.generation.is_done:
        self._finish(job, "cancelled")

  def _fail(self, error: Exception) -> None:
    for job in [*self._jobs()]:
      job.generation._finish("error", error=error)
    self._waiting.clear()
    # what the device held may be half written
    self._position, self._room, self._active = None, 0, []
    self._prefixes.clear()

  def _read_waiting(self) -> None:
    budget = self._read_tokens
    while self._waiting and budget > 0 and sum(job is not None for job in self._active) < self.slots:
      job, prompt = self._waiting[0], self._waiting[0].prompt
      row = prompt.row
      if row is None:
        prompt.n_read, row = self._prefixes.find(prompt.ids)
        prompt.reused = prompt.n_read
        room = self._bucket(len(prompt.ids))
        row = _begin(self.config, 1, room) if row is None else _resized(row, FIRST, room)
      part = prompt.ids[prompt.n_read : prompt.n_read + budget]
      prompt.row = row = self._read(row, part)
      prompt.n_read += len(part)
      budget -= len(part)
      if prompt.n_read < len(prompt.ids):
        break
      if part:
        self._prefixes.keep(prompt.ids, row)
      self._waiting.popleft()
      job.generation.reused = prompt.reused
      self._place(job, row)

  def _read(self, row: Position, ids: Sequence[int]) -> Position:
    """Extend a row of batch 1 by tokens, in programs of a few widths."""
    ids = list(ids)
    while ids:
      width = next((w for w in WIDTHS if w >= len(ids)), WIDTHS[-1])
      tokens, lengths = pad_rows([ids[:width]], width)
      row, ids = _read(self.config, self._params, row, tokens, lengths), ids[width:]
    return row

  def _bucket(self, tokens: int) -> int:
    return max(power_of_two(tokens), LEAST_ROOM)

  def _place(self, job: _Job, row: Position) -> None:
    """Put a job's row into a free slot."""
    self._fit([*(each for each in self._active if each), job])
    slot = self._active.index(None)
    self._position = _put(self._position, row, slot)
    self._active[slot] = job

  def _fit(self, jobs: Sequence[_Job]) -> None:
    """Give the slots room for these jobs, of which the last may have none yet; far too much room is given back."""
    needs = [len(job.prompt.ids) + len(job.generation.tokens) + max(job.left, 0) for job in jobs]
    n, room = 1, self._bucket(max(needs))
    while n < len(jobs):
      n *= GROWTH
    n = min(n, self.slots)
    if self._position is None:
      self._position, self._room, self._active = _begin(self.config, n, room), room, [None] * n
      return
    held = len(self._active)
    n = n if n > held or n * GROWTH < held else held
    room = room if room > self._room or room * GROWTH < self._room else self._room
    if (n, room) == (held, self._room):
      return
    order = [slot for slot, job in enumerate(self._active) if job is not None]
    kept = [self._active[slot] for slot in order]
    order = np.array([*order, *[0] * (n - len(order))], np.int32)
    self._position = _resized(self._position, order, room)
    self._active, self._room = [*kept, *[None] * (n - len(kept))], room

  def _write(self) -> None:
    """Let every slot write, and hand out what it wrote."""
    allowed = self._allowed()
    jobs, n = self._active, len(self._active)
    steps = self._steps if allowed is None else 1
    stops = [[*self._ends, *([self._query_end] if job.settings.tools else [])] if job else [] for job in jobs]
    of = lambda name, kind: np.array([getattr(job.settings, name) if job else 0 for job in jobs], kind)
    rows = Rows(
      left=np.array([job.left if job else 0 for job in jobs], np.int32),
      written=np.array([job.n_written if job else 0 for job in jobs], np.int32),
      seeds=np.array([job.seed if job else (0, 0) for job in jobs], np.uint32),
      stops=pad_rows(stops, 4, -1)[0],
      temperature=of("temperature", np.float32),
      top_k=of("top_k", np.int32),
      top_p=np.where(of("top_p", np.float32) > 0, of("top_p", np.float32), 1),
    )
    self._position, *written = _write(self.config, self._params, self._position, rows, allowed, steps=steps)
    tokens, log_probs = fetch(tuple(written))
    for slot in range(n):
      job = jobs[slot]
      for token, log_prob in zip(tokens[slot].tolist(), log_probs[slot].tolist(), strict=True):
        if job is None or job.generation.is_done or token < 0:
          break
        self._take(job, token, log_prob)

  def _allowed(self) -> np.ndarray | None:
    """Return which tokens each slot may write next, as bits; None: every slot any."""
    allowed: dict[int, np.ndarray] = {}
    for slot, job in enumerate(self._active):
      if job is not None and job.grammar is not None:
        try:
          allowed[slot] = job.grammar.allowed()
        except ValueError as error:  # a grammar has limits; the texts beside this one go on
          self._break(job, error)
    if not allowed or self._vocabulary is None:
      return None
    return np.stack([allowed.get(slot, self._vocabulary.everything) for slot in range(len(self._active))])

  def _take(self, job: _Job, token: int, log_prob: float) -> None:
    """Hand a written token out, and end the text or answer a query if it says so."""
    job.n_written += 1
    text, is_end = "", token in self._ends
    if job.settings.tools and token == self._query_start:
      job.query = []
    elif job.query is not None and token != self._query_end:
      job.query.append(token)
    elif not is_end:
      text = job.stream.add(token)
    job.generation._give(token, 1, text, log_prob)
    if job.grammar is not None:
      job.grammar.accept(token)
    if is_end or job.stream.stopped or (job.grammar is not None and job.grammar.is_done):
      self._finish(job, "stop")
    elif token == self._query_end and job.query is not None:
      self._answer(job)
    elif job.left <= 0:
      self._finish(job, "length")

  def _answer(self, job: _Job) -> None:
    """Answer a query: the tokens of the reply are forced, as a rollout's."""
    query, job.query = self.tokenizer.decode(job.query or [], skip_special=True), None
    try:
      reply: Reply = NO_MORE if job.n_calls >= job.settings.max_tool_calls else None
      replies = (tool(query) for tool in job.settings.tools)
      reply = reply if reply is not None else next((r for r in replies if r is not None), None)
      reply = reply if reply is not None and len(reply) else NOTHING
      block = (
        render_notice(self.tokenizer, reply) if isinstance(reply, str) else render_documents(self.tokenizer, reply)
      )
      n_tokens = len(job.prompt.ids) + len(job.generation.tokens) + len(block)
      if n_tokens + job.left > self.context_tokens:
        raise ValueError(f"what a tool found has {len(block):,} tokens, and the context is full: find fewer documents")
    except Exception as error:  # of a tool; the texts beside this one go on
      self._break(job, error)
      return
    job.n_calls += 1
    if not isinstance(reply, str):
      job.generation.documents += reply
    slot = self._active.index(job)
    room = self._bucket(n_tokens)
    row = _resized(self._position, np.array([slot], np.int32), max(room, self._room))
    row = self._read(row, block)
    self._active[slot] = None
    for token in block:
      job.generation._give(token, 0, "")
    self._place(job, row)

  def _finish(self, job: _Job, reason: Any) -> None:
    text = job.stream.end()
    if job in self._active and reason in ("stop", "length"):
      self._keep(job)
    job.generation._finish(reason, text)
    self._release(job)

  def _break(self, job: _Job, error: Exception) -> None:
    job.generation._finish("error", job.stream.end(), error)
    self._release(job)

  def _keep(self, job: _Job) -> None:
    """Keep the prompt with its answer, with which the next prompt of a conversation begins."""
    tokens, slot = job.prompt.ids + job.generation.tokens, self._active.index(job)
    # a slot has read more if a stop string came amid the steps of a program
    if self._steps == 1:
      self._prefixes.keep(tokens, _resized(self._position, np.array([slot], np.int32), self._bucket(len(tokens))))

  def _release(self, job: _Job) -> None:
    if job in self._active:
      self._active[self._active.index(job)] = None
    elif job in self._waiting:
      self._waiting.remove(job)

  def _grammar(self, schema: Mapping[str, Any]) -> Grammar:
    if self._vocabulary is None:
      self._vocabulary = Vocabulary(self.tokenizer, self.config.padded_vocab, min(self._ends))
    return Grammar(self._vocabulary, schema)


def _settings(settings: GenerationSettings | None, changes: Mapping[str, Any]) -> GenerationSettings:
  return dataclasses.replace(settings or GenerationSettings(), **changes)


_begin = jax.jit(begin, static_argnums=(0, 1, 2))
_read = jax.jit(read, static_argnums=0)
_write = jax.jit(write, static_argnames=("model", "steps"), donate_argnames="position")
_put = jax.jit(put, donate_argnums=0)
_resized = jax.jit(resized, static_argnames="capacity")

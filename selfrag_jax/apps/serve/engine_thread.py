"""The engine in a thread of its own, for the requests of an event loop."""

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from selfrag_jax.apps.serve.errors import APIError, invalid
from selfrag_jax.apps.serve.metrics import Metrics
from selfrag_jax.apps.serve.texts import Delta, Texts, failure, late, stopping
from selfrag_jax.generate.engine import Engine
from selfrag_jax.generate.generation import Generation, GenerationSettings, Piece

T = TypeVar("T")
RETRY_SECONDS = "2"  # a guess: how long a full queue takes to move


class Writing(Texts):
  """Texts that the engine writes: `generations[i * n + j]` is sample j of prompt i."""

  def __init__(self, count: int, began: float):
    super().__init__(count, began)
    self.generations: list[Generation] = []
    self._early: list[tuple[int, Piece]] = []

  @property
  def usage(self) -> tuple[int, int, int]:
    prompts = [each for each in self.generations if each.sample == 0]  # read once for all samples
    written = sum(sum(each.mask) for each in self.generations)
    return sum(len(each.prompt) for each in prompts), sum(each.reused for each in prompts), written

  def cancel(self) -> None:
    super().cancel()
    for generation in self.generations:
      generation.cancel()

  def take(self, generations: list[Generation]) -> None:
    """Take the texts of the next prompt, which the engine may have begun already."""
    self.generations += generations
    if self.is_cancelled:
      self.cancel()
    early, self._early = self._early, []
    for number, piece in early:
      self.add(number, piece)

  def add(self, number: int, piece: Piece) -> None:
    """Take a piece of the text with this number."""
    if number >= len(self.generations):
      self._early.append((number, piece))
      return
    if piece.token >= 0:
      self.give(Delta(number, piece.text, piece.token if piece.mask else None, piece.log_prob))
      return
    generation = self.generations[number]
    if generation.finish_reason in ("stop", "length"):
      self.give(Delta(number, piece.text, finish_reason=generation.finish_reason))
    else:
      self.give(failure(generation.error))


class EngineThread:
  """An engine that works in a thread of its own."""

  def __init__(self, engine: Engine, places: int, request_seconds: float):
    """places: texts that may be written or wait. request_seconds: the time of a request."""
    self.engine, self.open = engine, 0  # texts that are not finished
    self.places, self.is_stopping = places, False
    self.metrics = Metrics(engine.load)
    self.seconds = request_seconds
    self._readers = ThreadPoolExecutor(2, thread_name_prefix="prompts")  # tokenization takes CPU time
    self._compiler = ThreadPoolExecutor(1, thread_name_prefix="schemas")  # seconds for some; other prompts do not wait
    self._thread = threading.Thread(target=engine.run, name="engine", daemon=True)

  def start(self) -> None:
    """Start the thread."""
    self._thread.start()

  def stop(self) -> None:
    """End all texts, and the thread."""
    self.is_stopping = True
    self.engine.close()
    if self._thread.ident is not None:
      self._thread.join()
    for threads in (self._readers, self._compiler):
      threads.shutdown(cancel_futures=True)

  @property
  def is_alive(self) -> bool:
    """Whether the thread works."""
    return self._thread.is_alive()

  async def in_background(self, function: Callable[..., T], *args: Any) -> T:
    """Call a function that takes CPU time, in another thread than the event loop's."""
    return await asyncio.get_running_loop().run_in_executor(self._readers, function, *args)

  def reserve(self, count: int) -> None:
    """Take the places of texts, which `open` counts until they are finished.

    Raises APIError: 400 for more texts than there are places, 429 if the places are taken, 503 if the engine has ended.
    """
    if count > self.places:
      raise APIError(400, f"{count} texts at once; this server has room for {self.places}", param="n")
    if self.open + count > self.places:
      message = f"{self.open} texts are written or wait, of at most {self.places}: ask again a little later"
      raise APIError(429, message, code="queue_full", headers={"Retry-After": RETRY_SECONDS})
    if not self.is_alive:
      raise stopping()
    self.open += count

  @contextlib.contextmanager
  def timed(self, texts: Texts) -> Iterator[None]:
    """Give texts their time; they are cancelled at the end, or when it is over."""
    timer = asyncio.get_running_loop().call_later(self.seconds, texts.expire, self.seconds)
    try:
      yield
    finally:
      timer.cancel()
      if texts.left and texts.is_queued:
        self.metrics.cancelled.inc(texts.left)
      texts.cancel()

  def has_begun(self, texts: Texts) -> None:
    """Count the time to the first token of a request."""
    if not texts.has_begun:
      texts.has_begun = True
      self.metrics.first_token.observe(time.perf_counter() - texts.began)

  @contextlib.asynccontextmanager
  async def write(
    self, prompts: Sequence[Sequence[int]], settings: GenerationSettings, n: int, began: float
  ) -> AsyncIterator[Writing]:
    """Yield n samples of each prompt as they are written; those that are not finished at the end are cancelled.

    Raises APIError as `reserve`, 400 for what the engine refuses, and 504 if it is not queued in time.
    """
    writing = Writing(n * len(prompts), began)
    self.reserve(n * len(prompts))
    with self.timed(writing):
      try:
        async with asyncio.timeout(self.seconds):
          await self._submit(writing, prompts, settings, n)
      except TimeoutError:
        raise late(self.seconds) from None
      writing.is_queued = True
      self.metrics.prompt_tokens.inc(sum(map(len, prompts)))
      try:
        yield writing
      finally:
        self.metrics.reused_tokens.inc(writing.usage[1])

  async def _submit(
    self, writing: Writing, prompts: Sequence[Sequence[int]], settings: GenerationSettings, n: int
  ) -> None:
    loop, threads = asyncio.get_running_loop(), self._readers if settings.schema is None else self._compiler
    for i, prompt in enumerate(prompts):
      listener = functools.partial(self._listen, loop, writing, i * n)
      call = functools.partial(self.engine.submit, prompt, settings, num_samples=n, listener=listener)
      future = loop.run_in_executor(threads, call)
      future.add_done_callback(functools.partial(self._queued, writing, n))
      try:
        await asyncio.shield(future)  # a client that goes now must not leave texts that nobody knows of
      except BaseException as error:
        self.open -= n * (len(prompts) - i - 1)
        if isinstance(error, ValueError):
          raise invalid(error) from None
        if isinstance(error, RuntimeError):  # closed
          raise stopping() from None
        raise

  def _queued(self, writing: Writing, n: int, future: "asyncio.Future[list[Generation]]") -> None:
    if future.cancelled() or future.exception() is not None:
      self.open -= n
      return
    writing.take(future.result())

  def _listen(self, loop: asyncio.AbstractEventLoop, writing: Writing, first: int, piece: Piece) -> None:
    """Pass a piece on, in the thread of the engine."""
    with contextlib.suppress(RuntimeError):  # the loop has ended, and whoever waited with it
      loop.call_soon_threadsafe(self._deliver, writing, first + piece.sample, piece)

  def _deliver(self, writing: Writing, number: int, piece: Piece) -> None:
    if piece.token < 0:
      self.open -= 1
    elif piece.mask:
      self.metrics.tokens.inc()
      self.has_begun(writing)
    writing.add(number, piece)

"""Answers with sources: `selfrag_jax.answers` in a thread for each of them, for the event loop."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from selfrag_jax.answers import AnswerStream, Source, stream_answer
from selfrag_jax.apps.serve.engine_thread import EngineThread
from selfrag_jax.apps.serve.errors import APIError
from selfrag_jax.apps.serve.texts import Delta, Texts, failure, late
from selfrag_jax.generate.generation import GenerationSettings


class Answering(Texts):
  """An answer that is being written."""

  def __init__(self, began: float):
    super().__init__(1, began)
    self.stream: AnswerStream | None = None

  @property
  def usage(self) -> tuple[int, int, int]:
    answer = self.stream.answer if self.stream else None
    return (answer.prompt_tokens, 0, answer.tokens) if answer else (0, 0, 0)

  def cancel(self) -> None:
    super().cancel()
    if self.stream is not None:
      self.stream.cancel()


class Answerer:
  """Answers questions from whatever finds texts, with the engine of an `EngineThread`."""

  def __init__(self, writer: EngineThread):
    self._writer = writer
    # as many as there are places: an answer that has one must not wait for a thread
    self._threads = ThreadPoolExecutor(writer.places, thread_name_prefix="answers")

  @contextlib.asynccontextmanager
  async def answer(
    self,
    question: str,
    place: Any,
    *,
    top_k: int,
    history: Sequence[Mapping[str, Any]],
    settings: GenerationSettings,
    began: float,
  ) -> AsyncIterator[Answering]:
    """Yield an answer as it is written; it is cancelled if it is not finished at the end.

    place: what `stream_answer` searches. Raises APIError as `EngineThread.reserve`, and 400 for a question that does
    not fit, 504 if what it searches takes too long.
    """
    loop, answering = asyncio.get_running_loop(), Answering(began)
    self._writer.reserve(1)
    with self._writer.timed(answering):
      begin = functools.partial(stream_answer, question, place, self._writer.engine)
      begin = functools.partial(begin, top_k=top_k, history=history, settings=settings)
      begun: asyncio.Future[None] = loop.create_future()
      self._threads.submit(self._work, loop, answering, begin, begun)
      try:
        async with asyncio.timeout(self._writer.seconds):
          await begun
      except TimeoutError:
        raise late(self._writer.seconds) from None
      answering.is_queued = True
      yield answering

  def _work(
    self,
    loop: asyncio.AbstractEventLoop,
    answering: Answering,
    begin: Callable[[], AnswerStream],
    begun: "asyncio.Future[None]",  # its error is an APIError
  ) -> None:
    """Write an answer, in a thread."""

    def tell(function: Callable[..., Any], *args: Any) -> None:
      with contextlib.suppress(RuntimeError):  # the loop has ended, and whoever waited with it
        loop.call_soon_threadsafe(function, *args)

    try:
      answering.stream = stream = begin()
      if answering.is_cancelled:  # before there was a stream to cancel
        stream.cancel()
      tell(_settle, begun, None)
      for piece in stream:
        tell(self._deliver, answering, Delta(0, piece))
    except BaseException as error:  # whoever waits is told, whatever it was
      tell(self._end, answering, begun, error)
    else:
      tell(self._end, answering, begun)

  def _deliver(self, answering: Answering, delta: Delta) -> None:
    self._writer.has_begun(answering)
    answering.give(delta)

  def _end(self, answering: Answering, begun: "asyncio.Future[None]", error: BaseException | None = None) -> None:
    self._writer.open -= 1  # first: a client that has read the end of an answer may ask at once
    if error is not None:
      told = failure(None if self._writer.is_stopping else error)
      _settle(begun, told)
      answering.give(told)
      return
    assert answering.stream is not None
    answer = answering.stream.answer
    assert answer is not None  # the stream has been read to its end
    self._writer.metrics.prompt_tokens.inc(answer.prompt_tokens)
    self._writer.metrics.tokens.inc(answer.tokens)
    if answer.finish_reason in ("stop", "length"):
      sources = [*map(as_source, answer.sources)]
      answering.give(Delta(0, finish_reason=answer.finish_reason, sources=sources))
    else:
      answering.give(failure(None))

  def close(self) -> None:
    """Wait for the threads, once the engine has ended."""
    self._threads.shutdown(cancel_futures=True)


def _settle(future: "asyncio.Future[None]", error: APIError | None) -> None:
  if future.done():  # whoever waited has gone, or it had begun already
    return
  if error is None:
    future.set_result(None)
  else:
    future.set_exception(error)


def as_source(source: Source) -> dict[str, Any]:
  """Return a source as it is written to clients."""
  return {**vars(source), "metadata": dict(source.metadata)}

"""The texts of one request, on their way from the threads that write them to the event loop that sends them."""

import abc
import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from selfrag_jax.apps.serve.errors import APIError, invalid


@dataclasses.dataclass(frozen=True)
class Delta:
  """What has been added to the text with the number `index`; at its end with `finish_reason`, and maybe `sources`.

  `token` is None unless the model wrote one; `log_prob` is the natural logarithm of its probability.
  """

  index: int
  text: str = ""
  token: int | None = None
  log_prob: float = 0.0
  finish_reason: str | None = None
  sources: Sequence[Mapping[str, Any]] | None = None


class Texts(abc.ABC):
  """The texts of one request."""

  def __init__(self, count: int, began: float):
    """count: how many texts. began: the `time.perf_counter` at which the request came."""
    self.began, self.left = began, count
    self.is_queued = self.has_begun = self.is_cancelled = False  # the engine has them; a token has come; nobody waits
    self._given: asyncio.Queue[Delta | APIError] = asyncio.Queue()

  @property
  @abc.abstractmethod
  def usage(self) -> tuple[int, int, int]:
    """The number of tokens of the prompts, of those that had been read before, and of the texts."""

  def cancel(self) -> None:
    """End the texts that are not finished; may be called at any time."""
    self.is_cancelled = True

  def give(self, delta: Delta | APIError) -> None:
    """Take a delta, or an error that ends the texts, in the event loop."""
    self._given.put_nowait(delta)

  def expire(self, seconds: float) -> None:
    """End the texts because their time is over."""
    self.give(late(seconds))
    self.cancel()

  async def deltas(self) -> AsyncIterator[Delta]:
    """Yield the deltas of all texts as they come. Raises APIError for a text that failed, or that takes too long."""
    while self.left:
      given = await self._given.get()
      if isinstance(given, APIError):
        raise given
      self.left -= given.finish_reason is not None
      yield given


def late(seconds: float) -> APIError:
  """Return the error of texts whose time is over."""
  headers = {"x-should-retry": "false"}  # openai's client would ask for the same again, twice
  return APIError(504, f"not finished within {seconds:g} s: ask for less", code="timeout", headers=headers)


def stopping() -> APIError:
  """Return the error of a server that ends, or whose engine has ended."""
  return APIError(503, "the server is being stopped", code="stopping", headers={"Retry-After": "5"})


def failure(error: BaseException | None) -> APIError:
  """Return why a text did not come to its end, other than by being finished; None: it was cancelled."""
  if error is None:
    return stopping()
  if isinstance(error, ValueError):  # a schema that no text can follow
    return invalid(error)
  logging.error("a text failed", exc_info=error)
  return APIError(500, "the server failed; its log says why", code="internal_error")

"""The sending of texts: as events while they are written, or whole; a client that goes cancels what it asked for."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from selfrag_jax.apps.serve.errors import APIError
from selfrag_jax.apps.serve.gate import GONE

T = TypeVar("T")
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the second lets nginx pass events on


class EventStream(StreamingResponse):
  """A response of server-sent events, which closes what they come from however it ends."""

  def __init__(self, events: AsyncIterator[Mapping[str, Any]], resources: contextlib.AsyncExitStack):
    super().__init__(_encoded(events), media_type="text/event-stream", headers=HEADERS)
    self._resources = resources

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    # not in the generator of the events: a client may go before its first step, and none of it would run
    async with self._resources:
      await super().__call__(scope, receive, send)


async def _encoded(events: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[str]:
  """Yield events as their lines, up to `[DONE]`, or to an error."""
  try:
    async for event in events:
      yield f"data: {json.dumps(event, allow_nan=False, separators=(',', ':'))}\n\n"
  except APIError as error:
    yield f"data: {json.dumps(error.body)}\n\n"
    return
  except Exception as error:  # the status has been sent: this is the one way to tell
    logging.error("a stream failed", exc_info=error)
    yield f"data: {json.dumps(APIError(500, 'the server failed; its log says why', code='internal_error').body)}\n\n"
    return
  yield "data: [DONE]\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
  """Return the result of work, or cancel it because the client has gone; then APIError is raised, for nobody."""
  task = asyncio.create_task(work)
  gone = asyncio.create_task(_gone(request))
  try:
    await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
      return task.result()
    raise APIError(GONE, "the client has gone")
  finally:
    task.cancel()
    gone.cancel()
    await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
  while (await request.receive())["type"] != "http.disconnect":
    pass

"""The gate before the routes: who may ask, from where, and how much; and the counting of what was asked."""

import asyncio
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from selfrag_jax.apps.serve.errors import APIError
from selfrag_jax.apps.serve.keys import Keys
from selfrag_jax.apps.serve.metrics import Metrics
from selfrag_jax.apps.serve.settings import ServerSettings

LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}
NEED_KEY = ("/v1/", "/metrics")  # the page asks for the key itself
GONE = 499  # the status that is counted for a client that did not wait for its answer
DRAINED = 4  # times the limit of a body that is read and dropped, so that its sender gets to see the refusal
SECURE = {
  b"x-content-type-options": b"nosniff",
  b"x-frame-options": b"DENY",
  b"cross-origin-resource-policy": b"same-origin",
  b"referrer-policy": b"no-referrer",
}


class Gate:
  """Middleware that refuses requests before anything of them is parsed."""

  def __init__(self, app: ASGIApp, *, settings: ServerSettings, keys: Keys, metrics: Metrics):
    self._app, self._settings, self._keys, self._metrics = app, settings, keys, metrics

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
      await self._app(scope, receive, send)
      return
    began, status = time.perf_counter(), GONE

    async def counted(message: Message) -> None:
      nonlocal status
      if message["type"] == "http.response.start":
        status = message["status"]
        message = {**message, "headers": [*message["headers"], *SECURE.items()]}
      await send(message)

    try:
      await self._admitted(scope, receive, counted)
    except Exception:
      status = 500  # the handler of the app answers
      raise
    finally:
      route = _route(scope)
      self._metrics.requests.labels(_method(scope), route, str(status)).inc()
      self._metrics.request_seconds.labels(route).observe(time.perf_counter() - began)

  async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
    try:
      headers = Headers(scope=scope)
      self._check_sender(scope["path"], headers)
      body = await self._read(headers, receive)
    except APIError as error:
      await error.response()(scope, receive, send)
      return
    if body is not None:
      await self._app(scope, _replayed(body, receive), send)

  def _check_sender(self, path: str, headers: Headers) -> None:
    host = headers.get("host", "")
    if self._settings.is_loopback and _name(host) not in LOOPBACK_NAMES:
      # a page of another site whose name was pointed at this machine
      raise APIError(403, "this server answers to localhost alone; a proxy before it must send Host: localhost")
    if not self._keys:
      origin = headers.get("origin")
      if origin is not None and origin.partition("://")[2].lower() != host.lower():
        raise APIError(403, "pages of other sites may not ask this server, as it has no API key")
    elif path.startswith(NEED_KEY) and not self._keys.admits(headers.get("authorization", "")):
      message = "no API key, or a wrong one: send Authorization: Bearer KEY"
      raise APIError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

  async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
    """Return the body; None if the client has gone. Raises APIError for one that is too long, or too slow."""
    most = self._settings.max_body_bytes
    length = headers.get("content-length", "0")
    if length.isdecimal() and len(length) < 20 and int(length) > DRAINED * most:
      raise self._too_long()
    body, size = bytearray(), 0
    try:
      async with asyncio.timeout(self._settings.body_seconds):
        is_whole = False
        while not is_whole:
          message = await receive()
          if message["type"] == "http.disconnect":
            return None
          part, is_whole = message.get("body", b""), not message.get("more_body", False)
          size += len(part)
          if size <= most:
            body += part
          elif size > DRAINED * most:
            raise self._too_long()
    except TimeoutError:
      seconds = self._settings.body_seconds
      raise APIError(408, f"the body did not arrive within {seconds:g} s", headers={"Connection": "close"}) from None
    if size > most:
      raise self._too_long()
    return bytes(body)

  def _too_long(self) -> APIError:
    message = f"the body is longer than the {self._settings.max_body_bytes:,} bytes that this server takes"
    return APIError(413, message, code="body_too_long", headers={"Connection": "close"})


def _replayed(body: bytes, receive: Receive) -> Receive:
  """Return a function that gives a body that was read, and then what comes after it."""
  is_given = False

  async def replay() -> Message:
    nonlocal is_given
    if is_given:
      return await receive()
    is_given = True
    return {"type": "http.request", "body": body, "more_body": False}

  return replay


def _name(host: str) -> str:
  """Return the name in a header `Host`, without its port and the brackets of an IPv6 address."""
  if host.startswith("["):
    return host[1:].partition("]")[0]
  return host.partition(":")[0].lower().rstrip(".")


def _route(scope: MutableMapping[str, Any]) -> str:
  """Return the route of a request, not its path: whoever asks for made-up paths must not make up counters."""
  return getattr(scope.get("route"), "path", "other")


def _method(scope: MutableMapping[str, Any]) -> str:
  method = scope["method"]
  return method if method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH") else "other"

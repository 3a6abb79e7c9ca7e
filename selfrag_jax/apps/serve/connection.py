"""Connections of the server, of which there is a limit, and which say in time what they want."""

import asyncio
import sys

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

if sys.platform != "win32":
  import resource

HEADER_SECONDS = 15.0  # from the first byte of a request, or the beginning of a connection, to the end of the headers
RESERVED = 64  # file descriptors that connections leave to everything else
MOST = 1000  # connections


class Connection(H11Protocol):
  """A connection that is closed if there are too many, or if the headers of a request do not arrive in time.

  uvicorn limits what is behind the headers alone: whoever sent half of them could keep connections until nobody gets
  one.
  """

  _deadline: asyncio.TimerHandle | None = None

  def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
    """Take a connection, or close it at once."""
    super().connection_made(transport)
    if len(self.connections) > _most():
      transport.abort()
    else:
      self._watch()

  def data_received(self, data: bytes) -> None:
    """Take a part of a request."""
    super().data_received(data)
    self._watch()

  def connection_lost(self, exc: Exception | None) -> None:
    """End."""
    self._unwatch()
    super().connection_lost(exc)

  def _watch(self) -> None:
    # idle: no request, or a part of its headers
    if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
      self._unwatch()
    elif self._deadline is None:
      self._deadline = self.loop.call_later(HEADER_SECONDS, self._end)

  def _unwatch(self) -> None:
    if self._deadline is not None:
      self._deadline.cancel()
      self._deadline = None

  def _end(self) -> None:
    self._deadline = None
    if self.conn.their_state is h11.IDLE:
      self.transport.abort()


def _most() -> int:
  if sys.platform == "win32":
    return MOST
  soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  return MOST if soft == resource.RLIM_INFINITY else max(1, min(MOST, soft - RESERVED))

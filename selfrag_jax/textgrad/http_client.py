"""An HTTP client for untrusted servers: no redirects, bounded answers, no headers that are meant for another host."""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

LARGEST = 16 << 20  # bytes of an answer
ENCODINGS = ("", "identity", "gzip")


class TooLargeError(httpx.TransportError):
  """The server sent more than the longest answer can have."""


class BoundedClient(httpx.Client):
  """A client that reads an answer within `seconds` and `LARGEST` bytes, and follows no redirect.

  A redirect could take a prompt to a host that nobody named. The environment's headers for OpenAI go to OpenAI alone.
  """

  def __init__(self, key: str, seconds: float, *, is_openai: bool):
    """Make a client; the proxies of the environment are used."""
    super().__init__(timeout=seconds, follow_redirects=False)
    self._key, self._seconds, self._is_openai = key, seconds, is_openai

  def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
    """Send a request and read the whole answer. Raises httpx.TransportError or httpx.DecodingError."""
    if not self._is_openai:
      for name in ("OpenAI-Organization", "OpenAI-Project", *_custom_headers()):
        request.headers.pop(name, None)
      request.headers["Authorization"] = f"Bearer {self._key}"
    request.headers["Accept-Encoding"] = "gzip"
    # in a thread that can be abandoned: nothing else limits the time if headers come slowly or never end
    outcomes: queue.SimpleQueue[httpx.Response | BaseException] = queue.SimpleQueue()
    end = time.monotonic() + self._seconds
    threading.Thread(target=self._read, args=(request, options, end, outcomes.put), daemon=True).start()
    try:
      outcome = outcomes.get(timeout=min(self._seconds, threading.TIMEOUT_MAX))
    except queue.Empty:
      raise httpx.ReadTimeout("the answer did not end in time") from None
    if isinstance(outcome, BaseException):
      raise outcome
    return outcome

  def _read(self, request: httpx.Request, options: dict[str, Any], end: float, done: Callable[[Any], None]) -> None:
    try:
      done(self._answer(request, options, end))
    except BaseException as error:  # raised in the thread that waits for the answer
      done(error)

  def _answer(self, request: httpx.Request, options: dict[str, Any], end: float) -> httpx.Response:
    response = super().send(request, **{**options, "stream": True, "follow_redirects": False})
    data = bytearray()
    try:
      encoding = response.headers.get("content-encoding", "identity").strip().lower()
      if encoding not in ENCODINGS:  # a few bytes that were compressed twice can become gigabytes
        raise httpx.DecodingError(f"the answer is encoded as {encoding[:40]!r}, gzip was asked for")
      response.stream = _Timed(response.stream, end)
      for chunk in response.iter_bytes():  # decompressed: a small answer may become a large one
        data += chunk
        if len(data) > LARGEST:
          raise TooLargeError(f"more than {LARGEST >> 20} MiB were sent")
    finally:
      response.close()
    # a charset may name any codec of Python; JSON is UTF-8
    told = (b"content-encoding", b"content-length", b"transfer-encoding", b"content-type")
    headers = [(name, value) for name, value in response.headers.raw if name.lower() not in told]
    kind = response.headers.get("content-type", "").partition(";")[0].encode("ascii", "replace")
    headers.append((b"Content-Type", kind + b"; charset=utf-8"))
    return httpx.Response(response.status_code, headers=headers, content=bytes(data), request=request)


class _Timed(httpx.SyncByteStream):
  """A stream that raises ReadTimeout after `end`, however slowly its bytes come."""

  def __init__(self, stream: Any, end: float):
    self._stream, self._end = stream, end

  def __iter__(self) -> Iterator[bytes]:
    for chunk in self._stream:
      if time.monotonic() > self._end:
        raise httpx.ReadTimeout("the answer did not end in time")
      yield chunk

  def close(self) -> None:
    self._stream.close()


def _custom_headers() -> list[str]:
  """Return the names of the headers that the package openai takes from the environment; they may hold a key."""
  lines = os.environ.get("OPENAI_CUSTOM_HEADERS", "").split("\n")
  own = ("content-type", "content-length", "host", "accept")
  return [name for line in lines if (name := line.partition(":")[0].strip()) and name.lower() not in own]

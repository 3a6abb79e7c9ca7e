"""Connections that say nothing, or not enough, or are too many."""

import contextlib
import socket
import time

import httpx
import pytest

from selfrag_jax.apps.serve import connection
from tests.serving import running


@pytest.fixture
def server(monkeypatch):
  monkeypatch.setattr(connection, "HEADER_SECONDS", 0.3)
  monkeypatch.setattr(connection, "MOST", 4)
  with running() as (url, _):
    yield url


def connect(url):
  return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 10)


def is_closed(connected):
  with contextlib.suppress(ConnectionResetError):
    return connected.recv(1) == b""
  return True


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: local"])
def test_headers_that_do_not_come_are_not_waited_for(server, sent):
  with connect(server) as idle:
    idle.sendall(sent)
    began = time.monotonic()
    assert is_closed(idle)
    assert time.monotonic() - began < 5


def test_headers_that_come_drop_by_drop_are_late_all_the_same(server):
  with connect(server) as slow, contextlib.suppress(BrokenPipeError, ConnectionResetError):
    slow.sendall(b"GET /health HTTP/1.1\r\nHost: ")
    for _ in range(100):
      time.sleep(0.05)
      slow.sendall(b"x")
    pytest.fail("it was kept for 5 s")


def test_a_second_request_of_a_connection_has_its_time_too(server):
  request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
  with connect(server) as kept:
    for part in (request, request[:20]):
      kept.sendall(part)
      if part is request:
        assert b" 200 " in kept.recv(4096)
        time.sleep(0.5)  # a connection that waits for its next request is kept
    assert is_closed(kept)


def test_connections_over_the_limit_are_closed_and_the_others_served(server):
  with contextlib.ExitStack() as stack:
    for _ in range(3):
      stack.enter_context(connect(server))
    assert httpx.get(f"{server}/health").status_code == 200
    stack.enter_context(connect(server))
    assert is_closed(stack.enter_context(connect(server)))
  for _ in range(100):  # until the server has seen that they are closed
    with contextlib.suppress(httpx.TransportError):
      assert httpx.get(f"{server}/health").status_code == 200
      return
    time.sleep(0.05)
  pytest.fail("nobody is served any more")

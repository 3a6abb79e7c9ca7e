"""Images from untrusted servers."""

import contextlib
import socket
import threading
import time

import pytest

from selfrag_jax.textgrad import images
from selfrag_jax.textgrad.images import read_image


@contextlib.contextmanager
def image_server(*parts):
  def talk():
    with contextlib.suppress(OSError), listener.accept()[0] as connection:
      connection.recv(1 << 16)
      for part in parts:
        connection.sendall(part)
        time.sleep(0.05)

  with socket.create_server(("127.0.0.1", 0)) as listener:
    threading.Thread(target=talk, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/a.png"


@pytest.mark.parametrize(
  ("parts", "message"),
  [
    ([b"\x00garbage\r\n\r\n"], "could not be read: BadStatusLine"),
    ([b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500 + b"\r\n"], "could not be read: HTTPException"),
    ([b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n\x89PNG"], "996 bytes too early"),
    ([b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", *[b"a"] * 20], "was not sent within 0.3 s"),
  ],
)
def test_images_of_hostile_servers_are_errors_in_words(monkeypatch, parts, message):
  monkeypatch.setattr(images, "SECONDS", 0.3 if "0.3 s" in message else 20)
  with image_server(*parts) as url, pytest.raises(OSError, match=message):
    read_image(url)


def test_an_image_that_comes_in_parts_is_read():
  parts = [b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n\x89PNG", b" abc"]
  with image_server(*parts) as url:
    assert read_image(url) == b"\x89PNG abc"

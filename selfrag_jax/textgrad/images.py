"""Images, from a file or an http(s) address."""

import http.client
import time
import urllib.request
from typing import Any

LARGEST_IMAGE = 20 << 20  # bytes
SECONDS = 60.0  # that an image may take, once its headers are there


def read_image(path: str) -> bytes:
  """Read an image from a file or an http(s) address. Raises ValueError when it is larger than 20 MiB, OSError."""
  if path.startswith(("http://", "https://")):
    request = urllib.request.Request(path, headers={"User-Agent": "selfrag_jax"})
    try:
      with urllib.request.urlopen(request, timeout=SECONDS) as file:
        data = _read(file)
    except http.client.HTTPException as error:
      raise OSError(f"{path} could not be read: {error!r}") from None
  else:
    with open(path, "rb") as file:
      data = file.read(LARGEST_IMAGE + 1)
  if len(data) > LARGEST_IMAGE:
    raise ValueError(f"{path} is larger than {LARGEST_IMAGE >> 20} MiB")
  return data


def _read(file: Any) -> bytes:
  """Read what a server sends. Raises TimeoutError where it drips, OSError where it ends too early."""
  data, end = bytearray(), time.monotonic() + SECONDS
  while len(data) <= LARGEST_IMAGE:
    if not (part := file.read1(1 << 16)):
      if missing := getattr(file, "length", None):  # of HTTP; another protocol does not tell
        raise OSError(f"the image ends {missing:,} bytes too early")
      break
    data += part
    if time.monotonic() > end:
      raise TimeoutError(f"the image was not sent within {SECONDS:g} s")
  return bytes(data)

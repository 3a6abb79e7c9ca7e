"""A reader of images from files and http(s) addresses."""

import http.client
import time
import urllib.request
from typing import Any

LARGEST_IMAGE = 20 << 20  # bytes
SECONDS = 60.0  # for an image to arrive, once its headers are there


def read_image(path: str) -> bytes:
  """Read an image from a file or address. Raises ValueError if it is larger than 20 MiB, OSError if unreadable."""
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
  """Read a server's response. Raises TimeoutError if it is too slow, OSError if it ends too early."""
  data, end = bytearray(), time.monotonic() + SECONDS
  while len(data) <= LARGEST_IMAGE:
    if not (part := file.read1(1 << 16)):
      if missing := getattr(file, "length", None):  # HTTP knows the length, other protocols do not
        raise OSError(f"the image ends {missing:,} bytes too early")
      break
    data += part
    if time.monotonic() > end:
      raise TimeoutError(f"the image was not sent within {SECONDS:g} s")
  return bytes(data)

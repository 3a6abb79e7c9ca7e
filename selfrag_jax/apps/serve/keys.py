"""The API keys of the server: read from a file or the environment, never from a flag, and never written anywhere."""

import hashlib
import hmac
import os
import stat
from pathlib import Path

from absl import logging

VARIABLE = "SELFRAG_API_KEYS"
SHORTEST = 16  # characters: a shorter key can be guessed


class Keys:
  """The keys that open the server; without any, it is open to all who reach it."""

  def __init__(self, keys: tuple[str, ...] = ()):
    """Raises ValueError, which does not quote the key, for a key that no header holds or that can be guessed."""
    for key in keys:
      if not (key.isascii() and key.isprintable() and " " not in key):
        raise ValueError("an API key holds characters that no HTTP header may have; use letters and digits")
      if len(key) < SHORTEST:
        raise ValueError(f"an API key has {len(key)} characters; at least {SHORTEST}, as `openssl rand -hex 16` makes")
    # digests have one length, so that comparing them tells nothing of a key's
    self._digests = [_digest(key) for key in keys]

  def __bool__(self) -> bool:
    return bool(self._digests)

  def admits(self, authorization: str) -> bool:
    """Tell whether the header `Authorization: Bearer KEY` has one of the keys. All are compared, in constant time."""
    scheme, _, key = authorization.partition(" ")
    given = _digest(key.strip())
    matches = [hmac.compare_digest(given, digest) for digest in self._digests]
    return scheme.lower() == "bearer" and any(matches)


def _digest(key: str) -> bytes:
  return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def read_keys(file: str | None) -> Keys:
  """Return the keys of a file, one a line, or else of the environment's SELFRAG_API_KEYS, with commas between them.

  Raises OSError for a file that cannot be read, ValueError for one without keys and for keys that `Keys` refuses.
  """
  if file is None:
    return Keys(tuple(key for part in os.environ.get(VARIABLE, "").split(",") if (key := part.strip())))
  try:
    lines = Path(file).read_text(encoding="utf-8").splitlines()
  except UnicodeDecodeError:
    raise ValueError(f"{file} is no text in UTF-8; it should hold one API key a line") from None
  keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
  if not keys:
    raise ValueError(f"{file} has no API key; write one a line, as `openssl rand -hex 16` makes")
  if os.name == "posix" and Path(file).stat().st_mode & stat.S_IROTH:
    logging.warning("every user of this machine can read the API keys in %s: chmod o-r %s", file, file)
  return Keys(keys)

"""Untrusted text, made safe for a terminal."""

import unicodedata

_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str, keep: str = "") -> str:
  """Escape characters that a terminal would obey: control characters, line breaks, changes of the writing direction.

  The characters in `keep` stay as they are, such as the newlines of an answer.
  """
  obeyed = lambda c: c in _DIRECTIONS or unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")
  return "".join(ascii(c)[1:-1] if obeyed(c) and c not in keep else c for c in text)

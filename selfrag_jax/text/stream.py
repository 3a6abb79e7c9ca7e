"""Text that grows by one token at a time, up to the first stop string."""

import re
from collections.abc import Sequence

from selfrag_jax.text.tokenizer import Tokenizer

# what the next token may change: the first bytes of a character, and an apostrophe that joins a contraction
_OPEN = re.compile("(?:\ufffd{1,3}| ')$")


class TextStream:
  """Turn token ids into pieces of text that are never taken back; together they are the decoded ids.

  Control tokens are left out. `stopped` tells that a stop string has come; it and what follows are left out.
  """

  def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
    """stop: texts of at least one character."""
    self._tokenizer, self._stop = tokenizer, tuple(stop)
    self._ids: list[int] = []
    self._start = self._known = 0  # the window that is decoded anew, and its part whose text is known
    self._held = ""  # text that may begin a stop string
    self.stopped = False

  def add(self, token: int) -> str:
    """Take the next token; return the text that has become certain."""
    if self.stopped:
      return ""
    self._ids.append(token)
    whole = self._decoded(len(self._ids))
    if _OPEN.search(whole):
      return ""
    return self._release(whole)

  def end(self) -> str:
    """Return the text that was held back; no token follows."""
    if self.stopped:
      return ""
    text = self._release(self._decoded(len(self._ids))) + self._held
    self._held = ""
    return text

  def _decoded(self, end: int) -> str:
    return self._tokenizer.decode(self._ids[self._start : end], skip_special=True)

  def _release(self, whole: str) -> str:
    """Return what is certain of a window's text, of which the known part has been released."""
    new = whole[len(self._decoded(self._known)) :]
    # what was new stays in the window: whether a space comes before the next token depends on it
    self._start, self._known = self._known if new else self._start, len(self._ids)
    self._held += new
    text = self._held
    if ends := [at for stop in self._stop if (at := text.find(stop)) >= 0]:
      self.stopped, self._held = True, ""
      return text[: min(ends)]
    longest = max((_overlap(text, stop) for stop in self._stop), default=0)
    self._held = text[len(text) - longest :]
    return text[: len(text) - longest]


def _overlap(text: str, stop: str) -> int:
  """Return how many of the last characters of a text begin a stop string."""
  return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

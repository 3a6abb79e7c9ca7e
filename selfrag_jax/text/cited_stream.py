"""A text that is checked while it is written: its citations name documents that were shown, or they are taken out."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from selfrag_jax.metrics.citations import find_citations, remove_citations
from selfrag_jax.metrics.sentences import sentence_spans, split_words

# a bracket that may become a citation, or belong to the sentence before it
_OPEN = re.compile(r"\[(?:[^\[\]\n]{0,40}|[\sdocument_0-9,;-]*+)", re.IGNORECASE)
_UNFINISHED = re.compile(r"\[\s*+(?:doc(?:ument)?[\s_]*+)?-?[0-9][\sdocument_0-9,;-]*+", re.IGNORECASE)

_JOINED = " \t\n\r.,;:!?…)]}\"'”’"  # no space is missing before these


class Citation(NamedTuple):
  """A citation of a text: the number of the document, the statement that cites it, and whether a rule added it."""

  number: int
  statement: str
  is_attributed: bool


class CitedStream:
  """Turn pieces of a text into pieces of the same text with checked citations, which are never taken back.

  Documents have the numbers from 1 to `n_documents`. Citations become `[1][2]`, however they are written; other numbers
  are taken out, and are kept in `removed`. At the end of each statement `attribute(statement, numbers)` may return the
  numbers of documents that it shall cite besides; they are written behind it. `citations` are those of the text so far.
  """

  def __init__(self, n_documents: int, attribute: Callable[[str, Sequence[int]], Sequence[int]]):
    self._n, self._attribute = n_documents, attribute
    self._raw = ""  # the statement that is being written, with what is before and behind it
    self._done = 0  # characters of it that have been read
    self._sentence: tuple[int, int] | None = None  # where its sentence begins and ends
    self._last = 0  # where the last sentence that was found begins
    self._numbers: list[int] = []  # that it cites
    self._is_open = False  # whether a bracket is open
    self._is_cut = False  # whether a citation was taken out where the text goes on
    self.text = ""
    self.citations: list[Citation] = []
    self.removed: list[int] = []

  def add(self, text: str) -> str:
    """Take the next piece; return the text that has become certain."""
    self._raw += text
    return self._advance(self._before(_OPEN))

  def end(self) -> str:
    """Return the rest of the text, without a citation that it ends amid; no piece follows."""
    return self._advance(self._before(_UNFINISHED), is_end=True)

  def _before(self, bracket: re.Pattern[str]) -> int:
    """Return where the white space and the bracket begin that the text may end with."""
    at = self._raw.rfind("[")
    return len((self._raw[:at] if at >= 0 and bracket.fullmatch(self._raw, at) else self._raw).rstrip())

  def _advance(self, limit: int, is_end: bool = False) -> str:
    """Read the text up to `limit`, and close the statements that are complete there."""
    before = len(self.text)
    while (following := self._next_statement(limit)) is not None:
      self._close(following)
      limit -= following
    if is_end:
      self._close(limit)
    else:
      # marks and citations behind the end of a statement belong to it, so they wait until it is complete
      self._write(self._read(max(self._sentence[1] if self._sentence else limit, self._done)))
    return self.text[before:]

  def _next_statement(self, limit: int) -> int | None:
    """Find the sentence of the statement; return where the next sentence with a word begins, None if none has begun."""
    start = self._last
    for begin, end in sentence_spans(self._raw[start:limit]):
      begin, end = start + begin, start + end
      self._last = begin
      if not split_words(remove_citations(self._raw[begin:end])):
        continue
      if self._sentence is not None and self._sentence[0] != begin:
        return begin
      self._sentence = begin, end
    return None

  def _close(self, end: int) -> None:
    """Write the statement with what follows it, and the citations of both; the next one begins at `end`."""
    begin, stop = self._sentence or (0, 0)
    self._write(self._read(max(stop, self._done)))
    rest = self._read(max(end, self._done))
    written, statement = list(dict.fromkeys(self._numbers)), remove_citations(self._raw[begin:stop])
    added = [n for n in self._attribute(statement, written) if n not in written] if statement else []
    self._write((" " + "".join(f"[{number}]" for number in added) if added else "") + rest)
    self.citations += [Citation(number, statement, number in added) for number in [*written, *added]]
    self._raw, self._done, self._last = self._raw[end:], 0, 0
    self._sentence, self._numbers = None, []

  def _read(self, end: int) -> str:
    """Return the text up to `end` with checked citations."""
    part, self._done, pieces, at = self._raw[self._done : end], end, [], 0
    for begin, stop, numbers in find_citations(part):
      pieces.append(self._plain(part[at:begin]))
      shown, at = [number for number in numbers if 1 <= number <= self._n], stop
      self._numbers += shown
      self.removed += [number for number in numbers if number not in shown]
      if shown:
        pieces.append("".join(f"[{number}]" for number in shown))
        self._is_open = self._is_cut = False
      elif self._is_open:  # without it, what stands around it could become a citation
        pieces.append("()")
      else:
        pieces[-1], self._is_cut = pieces[-1].rstrip(" \t"), True
    return "".join([*pieces, self._plain(part[at:])])

  def _plain(self, text: str) -> str:
    if self._is_cut and text:
      text, self._is_cut = " " * (text[0] not in _JOINED) + text, False
    if "[" in text or "]" in text:
      self._is_open = text.rfind("[") > text.rfind("]")
    return text

  def _write(self, text: str) -> None:
    self.text += text if self.text else text.lstrip()

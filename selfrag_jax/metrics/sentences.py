"""Sentences and words of English text, found by rules that take linear time and never fail."""

import re
from collections.abc import Iterator, Sequence
from typing import Protocol

# Brackets after the end mark belong to the sentence before them: "Paris is large.[1] London is larger." The look-behind
# keeps the search linear: a long row of end marks is tried once.
_END = re.compile(r"""(?<![.!?…])[.!?…]++["'”’)]*+(?:(?:[ \t]*+\[[^\[\]\n]{1,40}\])++|(?=\s|$))|\n""")
_TITLES = "Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|Lt|Col|Gen|No|vs|etc|e\\.g|i\\.e|cf|al|approx|ca?"
_ABBREVIATION = re.compile(rf"""(?:^|[\s("'“‘\[])(?:(?:[A-Z]\.)*[A-Z]|{_TITLES})\.$""")
_LONGEST = 16  # characters of an abbreviation
_WORD = re.compile(r"\d+(?:[.,]\d+)*\w*|\w+(?:['’]\w+)*")


class HasText(Protocol):
  """An object with a text, as a `Document` is."""

  @property
  def text(self) -> str: ...


def texts_of(documents: Sequence[str | HasText]) -> list[str]:
  """Return the texts of documents, which may be texts themselves."""
  return [document if isinstance(document, str) else document.text for document in documents]


def split_sentences(text: str) -> list[str]:
  """Split a text after end marks and at line breaks; abbreviations and initials end no sentence."""
  return [text[begin:end] for begin, end in sentence_spans(text)]


def sentence_spans(text: str) -> list[tuple[int, int]]:
  """Return where the sentences of `split_sentences` begin and end, without the white space around them."""
  spans, begin = [], 0
  for end in [*_ends(text), len(text)]:
    sentence = text[begin:end]
    if bare := sentence.strip():
      start = begin + len(sentence) - len(sentence.lstrip())
      spans.append((start, start + len(bare)))
    begin = end
  return spans


def _ends(text: str) -> Iterator[int]:
  begin = 0
  for match in _END.finditer(text):
    end = match.end()
    if match[0] == "." and _ABBREVIATION.search(text[max(begin, end - _LONGEST) : end]):
      continue
    yield end
    begin = end


def split_words(text: str) -> list[str]:
  """Return the words and numbers of a text, without punctuation."""
  return _WORD.findall(text)

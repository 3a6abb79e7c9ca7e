"""The parsing of an optimizer's answers (the text between two tags), and the limit on how much a text may change."""

import collections
import difflib
import itertools
import re
from collections.abc import Iterable, Sequence

from selfrag_jax.textgrad.checks import clip

MOST_PAIRS = 100_000  # pairs of equal words in two texts that are compared
LONGEST = 200_000  # characters of a variable; a model that does not stop writes more


class ReplyError(ValueError):
  """The answer is not one text between the two tags."""


def parse_tags(reply: str, tags: Sequence[str]) -> str:
  """Return the text between an opening and a closing tag, without the spaces around it.

  Tags inside the text belong to it, as long as each one that opens is closed. Raises ReplyError for an answer without
  the tags, with several texts between tags, an empty text, or one of more than 200,000 characters.
  """
  (start, end), shown = tags, repr(clip(reply))
  depth, opened, texts = 0, 0, []
  for found in re.finditer(f"{re.escape(start)}|{re.escape(end)}", reply):
    if found[0] == start and (depth == 0 or start != end):
      opened, depth = (found.end() if depth == 0 else opened), depth + 1
    elif depth:
      depth -= 1
      if depth == 0:
        texts.append(reply[opened : found.start()].strip())
    elif texts:  # the text may have continued up to this tag
      raise ReplyError(f"{end} stands once too often in the answer {shown}")
  if depth or not texts:
    what = f"{end} is missing" if depth else f"there is no {start} … {end}"
    raise ReplyError(f"{what} in the answer {shown}; a model that follows instructions better may help")
  if len(set(texts)) > 1:
    raise ReplyError(f"the answer has {len(texts)} texts between {start} and {end}, one was expected: {shown}")
  if not texts[0]:
    raise ReplyError(f"the text between {start} and {end} is empty: {shown}")
  if len(texts[0]) > LONGEST:
    raise ReplyError(f"the text between {start} and {end} has {len(texts[0]):,} characters, more than {LONGEST:,}")
  return texts[0]


def changed_share(old: str, new: str) -> float:
  """Return the share of a text that has changed, from 0 to 1: words removed and added, over the words of both texts."""
  a, b = _words(old), _words(new)
  common = sum(a1 - a0 for name, a0, a1, _, _ in _operations(a, b) if name == "equal")
  return 1 - 2 * common / (len(a) + len(b)) if a or b else 0.0


def limit_edit(old: str, new: str, budget: float) -> str:
  """Return `old` with as many of the changes that lead to `new`, from the front, as `budget` (0 to 1) allows.

  A change that is too large by itself is left out whole; later ones that fit are made.
  """
  a, b = _words(old), _words(new)
  kept: list[str] = []
  removed = added = 0  # words, by the changes made so far
  for name, a0, a1, b0, b1 in _operations(a, b):
    more, less = added + b1 - b0, removed + a1 - a0
    # the share of `changed_share`, if this change is the last: 1 - 2 * common / (words of both)
    if name != "equal" and less + more <= budget * (2 * len(a) - less + more):
      removed, added = less, more
      kept += b[b0:b1]
    else:
      kept += a[a0:a1]
  return "".join(kept)


def _operations(a: Sequence[str], b: Sequence[str]) -> list[tuple[str, int, int, int, int]]:
  """Return the opcodes of difflib that lead from a to b.

  Between the common beginning and end, words that occur too often are matched only beside other matches: difflib's time
  grows with their count in a times their count in b, again and again, and a model that does not stop repeats itself.
  """
  start = _common(zip(a, b, strict=False))
  end = _common(zip(a[start:][::-1], b[start:][::-1], strict=False))
  left, right = a[start : len(a) - end], b[start : len(b) - end]
  count_a, count_b = collections.Counter(left), collections.Counter(right)
  pairs, frequent = 0, set()
  for n, word in sorted((count_a[word] * count_b[word], word) for word in count_a.keys() & count_b.keys()):
    pairs += n
    if pairs > MOST_PAIRS:
      frequent.add(word)
  matcher = difflib.SequenceMatcher(frequent.__contains__, left, right, autojunk=False)
  middle = [(name, start + i, start + j, start + k, start + n) for name, i, j, k, n in matcher.get_opcodes()]
  return [("equal", 0, start, 0, start), *middle, ("equal", len(a) - end, len(a), len(b) - end, len(b))]


def _common(pairs: Iterable[tuple[str, str]]) -> int:
  return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _words(text: str) -> list[str]:
  """Split a text into words, each with the space before it."""
  return re.findall(r"\s*\S+|\s+$", text)

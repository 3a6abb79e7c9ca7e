"""What an optimizer's answer is taken for: the text between its tags, and as much of a change as the budget allows."""

import difflib
import re
from collections.abc import Sequence

LONGEST = 200_000  # characters of a variable; a model that runs on writes more


class ReplyError(ValueError):
  """The answer is not one text between the two tags."""


def parse_tags(reply: str, tags: Sequence[str]) -> str:
  """Return the text between an opening and a closing tag, without the spaces around it.

  Tags inside the text belong to it, as long as each one that opens is closed. Raises ReplyError for an answer without
  the tags, with several texts between tags, an empty text, or one of more than 200,000 characters.
  """
  start, end = tags
  depth, opened, texts = 0, 0, []
  for found in re.finditer(f"{re.escape(start)}|{re.escape(end)}", reply):
    if found[0] == start and (depth == 0 or start != end):
      opened, depth = (found.end() if depth == 0 else opened), depth + 1
    elif depth:
      depth -= 1
      if depth == 0:
        texts.append(reply[opened : found.start()].strip())
    elif texts:  # the text may have gone on to here
      raise ReplyError(f"{end} stands once too often in the answer {_shown(reply)}")
  shown = _shown(reply)
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


def _shown(reply: str) -> str:
  return repr(reply if len(reply) <= 300 else reply[:300] + " …")


def changed_share(old: str, new: str) -> float:
  """Return how much of a text has changed, from 0 to 1: words removed and added, of the words of both."""
  a, b = _words(old), _words(new)
  return 1 - difflib.SequenceMatcher(None, a, b, autojunk=False).ratio() if a or b else 0.0


def limit_edit(old: str, new: str, budget: float) -> str:
  """Return `old` with as many of the changes that lead to `new`, from the front, as `budget` (0 to 1) allows.

  A change that is too large by itself is left out whole; later ones that fit are made.
  """
  a, b = _words(old), _words(new)
  operations = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
  kept: list[str] = []
  made: list[tuple[int, int]] = []  # words removed and added by the changes that are made
  for name, a0, a1, b0, b1 in operations:
    if name == "equal":
      kept += a[a0:a1]
      continue
    removed, added = (sum(column) for column in zip(*made, (a1 - a0, b1 - b0), strict=True))
    # the share of `changed_share`, if this change is the last: 1 - 2 * common / (words of both)
    if removed + added <= budget * (2 * len(a) - removed + added):
      made.append((a1 - a0, b1 - b0))
      kept += b[b0:b1]
    else:
      kept += a[a0:a1]
  return "".join(kept)


def _words(text: str) -> list[str]:
  """Split a text into words, each with the space before it."""
  return re.findall(r"\s*\S+|\s+$", text)

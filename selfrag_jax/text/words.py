"""A splitter of texts into words."""

import re

WORDS = re.compile(r"(?u)\b\w\w+\b")


def words(text: str) -> list[str]:
  """Split a text into its words of two letters or more, in lower case."""
  return WORDS.findall(text.lower())

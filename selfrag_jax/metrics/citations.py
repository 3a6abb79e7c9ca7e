"""Citations of a response, and their recall and precision by the definitions of ALCE (arXiv 2305.14627).

A statement is a sentence of the response; it cites documents by their number, from 1 on. Its recall is 1 if it cites
something and its cited documents together support it. A citation is precise if its statement has recall 1 and it is
not irrelevant: an irrelevant one does not support the statement alone, and the others support it without this one.
Recall is the mean over statements, precision the mean over citations. As in the authors' `eval.py`, the first three
citations of a statement count, and a statement that cites a document that does not exist has recall 0.

Three things differ from that script. The citations of such a statement count, as wrong ones, while the script leaves
them out of the precision. A document that is cited twice in one statement counts once. A citation behind the full stop
belongs to the sentence before it; the script's splitter gives it to the next one.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from selfrag_jax.metrics.rule_checker import THRESHOLD, RuleChecker, supports
from selfrag_jax.metrics.sentences import HasText, split_sentences, split_words, texts_of

Supports = Callable[[str, str], bool]  # does a premise support a claim?

_NUMBER = r"(?:doc(?:ument)?[\s_]*+)?-?[0-9]++"
_CITATION = re.compile(rf"\[\s*+{_NUMBER}\s*+(?:[,;]\s*+{_NUMBER}\s*+)*+\]", re.IGNORECASE)
_DIGITS = re.compile(r"-?[0-9]++")
_LARGEST = 10**9  # stands for all larger numbers: Python refuses to read thousands of digits


class Statement(NamedTuple):
  """A sentence without its citations, and the numbers that it cites, each once, in their order."""

  text: str
  citations: tuple[int, ...]


class CitationScores(NamedTuple):
  """Recall and precision of the citations of a response, and of how many statements and citations."""

  recall: float
  precision: float
  statements: int
  citations: int


def remove_citations(text: str) -> str:
  """Return a text without its citations and the white space before them."""
  pieces = _CITATION.split(text)
  return "".join([*(piece.rstrip() for piece in pieces[:-1]), pieces[-1]]).strip()


def find_citations(text: str) -> Iterator[tuple[int, int, list[int]]]:
  """Yield where each citation of a text begins and ends, and its numbers."""
  for citation in _CITATION.finditer(text):
    yield citation.start(), citation.end(), list(map(_read_number, _DIGITS.findall(citation[0])))


def extract_citations_from_response(response: str) -> list[Statement]:
  """Return the statements of a response, each with the numbers that it cites.

  Citations are `[1]`, `[1][2]`, `[1, 2]`, `[DOC_1]` and `[Document 1]`; numbers of any sign are returned, those above
  10**9 as 10**9. Citations on a line of their own belong to the statement before them, or to the first one.
  """
  found: list[tuple[str, list[int]]] = []
  for sentence in split_sentences(response):
    text, numbers = remove_citations(sentence), [n for _, _, cited in find_citations(sentence) for n in cited]
    if found and not (split_words(text) and split_words(found[-1][0])):
      before, cited = found.pop()
      text, numbers = (text if split_words(text) else before or text), cited + numbers
    found.append((text, numbers))
  return [Statement(text, tuple(dict.fromkeys(numbers))) for text, numbers in found]


def citation_scores(
  response: str, documents: Sequence[str | HasText], supports: Supports = supports, *, limit: int | None = 3
) -> CitationScores:
  """Score the citations of a response to `documents`, which it cites as 1, 2, ...; both scores lie in [0, 1].

  `supports(premise, claim)` decides whether texts, joined by line breaks, support a statement; the default is the
  rule-based `rule_checker.supports`. The first `limit` citations of a statement count (None: all). A number that no
  document has is a wrong citation. A response without a statement, or without a citation, scores 0.
  """
  texts, statements = texts_of(documents), extract_citations_from_response(response)
  recalled = precise = total = 0
  for statement in statements:
    cited = statement.citations[:limit]
    total += len(cited)
    if not (cited and statement.text) or not all(1 <= number <= len(texts) for number in statement.citations):
      continue
    holds = lambda numbers, claim=statement.text: supports("\n".join(texts[i - 1] for i in numbers), claim)
    if holds(cited):
      recalled += 1
      precise += sum(_is_relevant(number, cited, holds) for number in cited)
  recall = recalled / len(statements) if statements else 0.0
  return CitationScores(recall, precise / total if total else 0.0, len(statements), total)


def find_support(statement: str, documents: Sequence[str | HasText], *, limit: int = 3) -> list[int]:
  """Return the numbers of the documents that support a statement, the best first, or of two that do so together.

  These are citations for a statement without any (the post-hoc citations of ALCE), by `rule_checker.RuleChecker`.
  """
  texts, checker = texts_of(documents), RuleChecker()
  scores = {number: checker.score(statement, [text]) for number, text in enumerate(texts, 1)}
  by_score = sorted(scores, key=lambda number: -scores[number])
  if alone := [number for number in by_score if scores[number] >= THRESHOLD][:limit]:
    return alone
  if limit < 2 or not by_score or not scores[by_score[0]]:
    return []
  first = by_score[0]
  together = {other: checker.score(statement, [texts[first - 1], texts[other - 1]]) for other in by_score[1:]}
  best = max(together, key=together.__getitem__, default=None)
  return [first, best] if best is not None and together[best] >= THRESHOLD else []


def _is_relevant(number: int, cited: Sequence[int], holds: Callable[[Sequence[int]], bool]) -> bool:
  """Tell whether a citation supports the statement alone, or the others do not support it without this one."""
  return len(cited) == 1 or holds([number]) or not holds([other for other in cited if other != number])


def _read_number(digits: str) -> int:
  # a number of more than 11 digits is cut, and is still larger than the largest
  size = min(int(digits.lstrip("-0")[:11] or "0"), _LARGEST)
  return -size if digits.startswith("-") else size

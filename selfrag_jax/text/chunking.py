"""The chunking of texts at words, at sentences, or at the coarsest boundaries that keep chunks short enough."""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

Method = Literal["word", "sentence", "recursive"]
Count = Callable[[Sequence[str]], Sequence[int]]  # the length of each text; a chunk's length is the sum over its words

WORD, SENTENCE, LINE, PARAGRAPH = range(4)  # the coarsest unit that ends with a word
COARSEST: dict[Method, int] = {"word": WORD, "sentence": SENTENCE, "recursive": PARAGRAPH}

_WORD = re.compile(r"\S+")
_ENDS = re.compile(r"[.!?…。！？][\"'”’)\]]*$")
_ABBREVIATION = re.compile(r"^[(\"']?(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|No|vs|etc|e\.g|i\.e|cf|al|approx)\.$")


class Span(NamedTuple):
  """The chunk `text[start:end]`, in characters.

  `text[start:new]` is the overlap with the chunk before. The parts `text[new:end]` of all chunks are the whole text.
  """

  start: int
  new: int
  end: int


def count_words(texts: Sequence[str]) -> list[int]:
  """Count the words of each text, which white space separates."""
  return [len(text.split()) for text in texts]


def chunk(
  text: str, size: int, overlap: int = 0, *, method: Method = "recursive", count: Count = count_words
) -> list[Span]:
  """Cut a text into chunks of length at most `size`, of which up to `overlap` repeats the end of the chunk before.

  `count` measures texts: in words, or in tokens (`lambda texts: map(len, tokenizer.encode_batch(texts))`).
  `word` fills chunks with words; `sentence` cuts between sentences; `recursive` cuts between paragraphs, else lines,
  else sentences. The last two cut inside a unit only if it is too long by itself. A word that is too long is cut
  between characters. White space goes with the word after it. An empty text has no chunk.
  Raises ValueError for a size below 1, an overlap outside [0, size), and an unknown method.
  """
  if size < 1 or not 0 <= overlap < size:
    raise ValueError(f"size = {size} must be at least 1, overlap = {overlap} in [0, size)")
  if method not in COARSEST:
    raise ValueError(f"method is {method!r}; one of {', '.join(COARSEST)}")
  words = _words(text, size - overlap, count)
  if not words:
    return []
  lengths = list(accumulate((n for _, _, n in words), initial=0))
  ends, strength = [end for _, end, _ in words], _boundaries(text, words)
  spans, last = [], 0
  for first, behind in _cut(0, len(words), COARSEST[method], lengths, strength, size - overlap):
    kept = first if not spans else max(last, bisect_right(lengths, lengths[first] - 1 - overlap))
    new = 0 if not spans else ends[first - 1]
    spans.append(Span(0 if not kept else ends[kept - 1], new, ends[behind - 1]))
    last = first
  return [*spans[:-1], spans[-1]._replace(end=len(text))]


def _words(text: str, size: int, count: Count) -> list[tuple[int, int, int]]:
  """Return begin, end and length of every word with the white space before it; words over `size` are cut in pieces."""
  ends = [match.end() for match in _WORD.finditer(text)]
  # one pattern for white space and word together would scan the white space again and again
  places = list(zip([0, *ends], ends, strict=False))
  words = []
  for (begin, end), n in zip(places, count([text[begin:end] for begin, end in places]), strict=True):
    words += [(begin, end, n)] if n <= size else _pieces(text, begin, end, size, count)
  return words


def _pieces(text: str, begin: int, end: int, size: int, count: Count) -> list[tuple[int, int, int]]:
  """Halve a word until its pieces are short enough, or single characters."""
  [n] = count([text[begin:end]])
  if n <= size or end - begin == 1:
    return [(begin, end, n)]
  middle = (begin + end) // 2
  return [*_pieces(text, begin, middle, size, count), *_pieces(text, middle, end, size, count)]


def _boundaries(text: str, words: Sequence[tuple[int, int, int]]) -> list[int]:
  """Return the coarsest unit that ends with each word, from WORD to PARAGRAPH."""
  strength = []
  for (begin, end, _), (_, after, _) in zip(words, [*words[1:], (0, len(text), 0)], strict=True):
    gap = text[end:after]
    breaks = gap[: len(gap) - len(gap.lstrip())].count("\n")
    word = text[begin:end].strip()
    ends = gap[:1].isspace() and _ENDS.search(word) and not _ABBREVIATION.match(word)
    strength.append(PARAGRAPH if breaks > 1 else LINE if breaks else SENTENCE if ends else WORD)
  return strength


def _cut(
  first: int, behind: int, level: int, lengths: Sequence[int], strength: Sequence[int], size: int
) -> list[tuple[int, int]]:
  """Cut words [first, behind) into few chunks at boundaries of `level` or coarser; finer where a part is too long."""
  if lengths[behind] - lengths[first] <= size or behind - first == 1:
    return [(first, behind)]
  cuts = [i + 1 for i in range(first, behind - 1) if strength[i] >= level]
  chunks: list[tuple[int, int]] = []
  begin = end = first  # of the chunk that is being filled
  for cut in [*cuts, behind]:
    if lengths[cut] - lengths[begin] > size and end > begin:
      chunks.append((begin, end))
      begin = end
    if lengths[cut] - lengths[begin] > size and level > WORD:
      chunks += _cut(begin, cut, level - 1, lengths, strength, size)
      begin = cut
    end = cut
  return [*chunks, (begin, end)] if end > begin else chunks

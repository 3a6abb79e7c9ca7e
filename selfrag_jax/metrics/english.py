"""Words of English sentences that have a meaning of their own, each with the negation and other words before it."""

import re
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from selfrag_jax.metrics.sentences import split_sentences, split_words

NEGATIONS = frozenset(
  split_words("""not no never none nobody nothing nowhere neither nor without cannot hardly scarcely
  barely unable fail fails failed failing lack lacks lacked lacking refuse refuses refused deny denies denied false
  untrue""")
)
PRONOUNS = frozenset(("he", "him", "she", "it", "they", "them"))  # those that stand for a name
FUNCTION_WORDS = PRONOUNS | frozenset(
  split_words("""a an the his her hers its their theirs this that these those we
  us our i me my you your who whom whose which what there
  here is are was were be been being am has have had having do does did done will would shall should can could may might
  must able of in on at by for from to into onto upon with within as than and or but if then so because since although
  though while when where after before during until about over under between among through against also both either each
  such some any all more most other only very too just however therefore thus according""")
)
NUMBERS = frozenset(
  split_words("""two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty
  hundred thousand million billion half first second third fourth fifth""")
)
NAMES = ("May", "Will")  # they are function words if they are written small
ENDINGS = ("ations", "ation", "ments", "ment", "ings", "ing", "ies", "ed", "es", "ly", "s", "y", "e")


class Word(NamedTuple):
  """A word with a meaning of its own, and what the words before it say about it."""

  stem: str
  is_name: bool  # or a number
  is_denied: bool
  after_by: bool
  after_pronoun: bool


class Sentence(NamedTuple):
  """The words of a sentence, the places of each stem, and what its passage named before: see `is_known`."""

  words: list[Word]
  places: dict[str, list[int]]
  number: int
  first: dict[str, int]  # the number of the first sentence of the passage with a stem

  def is_known(self, stem: str) -> bool:
    """Tell whether a sentence before this one has a word, so that a pronoun may stand for it."""
    return self.first.get(stem, self.number) < self.number


class Passage(NamedTuple):
  """The sentences of a passage, its words that are written small, and its pairs of neighbouring words."""

  sentences: list[Sentence]
  small: frozenset[str]
  pairs: frozenset[tuple[str, str]]


def read_words(text: str, small: frozenset[str]) -> list[Word]:
  """Return the words of a sentence with a meaning; a first word that is among the `small` ones is no name."""
  words, denied, by, pronoun = [], False, False, False
  first_is_plain = re.match(r"\W*\w+(?:ly\b|,)", text)  # "Lately", "Overall,"
  for i, word in enumerate(split_words(_open_contractions(text))):
    lower = word.lower()
    if lower in NEGATIONS:
      denied = not denied
    elif lower not in FUNCTION_WORDS or (len(word) > 1 and word.isupper()) or (i and word in NAMES):
      is_name = word[0].isupper() and (i > 0 or not (first_is_plain or lower in small))
      is_number = word[0].isdigit() or lower in NUMBERS
      words.append(Word(stem(lower), is_name or is_number, denied, by and not is_number, pronoun))
      denied = by = pronoun = False
    by, pronoun = by or lower == "by", pronoun or lower in PRONOUNS
  if denied and words:
    words[-1] = words[-1]._replace(is_denied=not words[-1].is_denied)
  return words


def stem(word: str) -> str:
  """Cut common English endings off a word in small letters."""
  word = re.sub(r"['’]s?$", "", word)
  if word[:1].isdigit():
    return word
  for ending in ENDINGS:
    if word.endswith(ending) and len(word) - len(ending) >= 3:
      return word.removesuffix(ending)
  return word


def _open_contractions(text: str) -> str:
  return re.sub(r"n['’]t\b", " not", text)


@lru_cache(maxsize=64)
def read_passage(text: str) -> Passage:
  """Read the sentences of a passage; the last passages that were read are kept."""
  everything = split_words(text)
  small = frozenset(word for word in everything if word.islower())
  read = [read_words(sentence, small) for sentence in split_sentences(text)]
  first: dict[str, int] = {}
  for number, words in enumerate(read):
    for word in words:
      first.setdefault(word.stem, number)
  pairs = frozenset(pairwise(word.lower() for word in everything))
  return Passage([index_words(words, number, first) for number, words in enumerate(read)], small, pairs)


def index_words(words: list[Word], number: int, first: dict[str, int]) -> Sentence:
  """Return the words as a sentence with an index of their places."""
  places: dict[str, list[int]] = {}
  for place, word in enumerate(words):
    places.setdefault(word.stem, []).append(place)
  return Sentence(words, places, number, first)

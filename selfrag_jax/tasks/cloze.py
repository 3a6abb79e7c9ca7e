"""Questions that are made of passages: which words a sentence lacks, of one passage or by way of another that names it.

Nobody has to write them, and they never run out: the inverse cloze task of ORQA (arXiv 1906.00300), with an answer.
"""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from selfrag_jax.tasks.datasets import Question

CLOZE = "Which words are missing? {sentence}"
BRIDGE = "Which words are missing in what is said of …? {sentence} Of the same it is said: {named}"
CLOZE_WORDS = (6, 30)  # fewest and most words of a sentence in a question
TRIES = 100

# not at the start of a sentence, where every word has a capital
_NAME_OR_NUMBER = re.compile(r"(?<=[^.!?] )(?:[A-Z]\w+(?: [A-Z]\w+)*|\d+(?:[,.]\d+)*)\b")
_NAME_BEFORE, _NAME_AFTER = re.compile(r"\S [A-Z]\w*[ -]$"), re.compile(r"[ -][A-Z]")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def cloze_question(texts: Sequence[str], rng: np.random.Generator) -> Question:
  """Ask for a name or a number that is left out of a sentence of a random passage.

  Raises ValueError if the passages seem to have none.
  """
  for _ in range(TRIES):
    passage = int(rng.integers(len(texts)))
    if found := _gap(split_sentences(texts[passage]), rng):
      sentence, answer = found
      return Question("", CLOZE.format(sentence=sentence), (answer,), (passage,))
  raise ValueError(f"{TRIES} random passages have no sentence with a name or a number: set data.cloze = 0")


def bridge_question(
  names: Sequence[str], texts: Sequence[str], pairs: Sequence[tuple[int, int]], rng: np.random.Generator
) -> Question:
  """Ask for what a passage says whose name must first be found in another one.

  `names[i]` is the name of the passage `texts[i]`, and `pairs` are those of `bridges`. Both sentences lack the name, so
  the first search can only find the passage that has it, and the second is for that name. Raises ValueError if the
  pairs seem to have no such sentences.
  """
  for _ in range(TRIES if pairs else 0):
    first, second = pairs[int(rng.integers(len(pairs)))]
    name, naming = named(names[second]), _naming(names[second], texts[first])
    without = [name.sub("…", sentence) for sentence in split_sentences(texts[second])]
    if found := _gap(without, rng):
      sentence, answer = found
      said = name.sub("…", naming[rng.integers(len(naming))])
      if answer not in said:
        return Question("", BRIDGE.format(sentence=sentence, named=said), (answer,), (first, second))
  raise ValueError(
    f"{len(pairs)} passages that name another one, without those of held-out questions, have no such sentences: "
    "set data.bridge = 0"
  )


def bridges(names: Sequence[str], texts: Sequence[str]) -> list[tuple[int, int]]:
  """List the pairs of passages of which the first names the second, by a name that no other passage has."""
  words = [tuple(re.findall(r"\w+", name)) for name in names]
  counts = Counter(words)
  places = {name: i for i, name in enumerate(words) if counts[name] == 1 and "".join(name)[:1].isupper()}
  longest = max(map(len, places), default=0)
  pairs = []
  for first, text in enumerate(texts):
    said = re.findall(r"\w+", text)
    runs = {tuple(said[i : i + n]) for n in range(1, longest + 1) for i in range(len(said) - n + 1)}
    found = sorted(places[run] for run in runs & places.keys())
    pairs += [(first, i) for i in found if i != first and _naming(names[i], text)]
  return pairs


def named(name: str) -> re.Pattern[str]:
  """Return a pattern of a name as whole words, in capitals or not."""
  return re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE)


def split_sentences(text: str) -> list[str]:
  """Split a text behind full stops, question marks and exclamation marks."""
  return _SENTENCE.split(text)


def has_query_length(sentence: str) -> bool:
  """Tell whether a sentence is neither too short nor too long to ask for a passage."""
  return CLOZE_WORDS[0] <= len(sentence.split()) <= CLOZE_WORDS[1]


def _naming(name: str, text: str) -> list[str]:
  """Return the sentences of a text that have a name, and not only as a part of a longer one: "United" of a state."""
  pattern, found = named(name), []
  for sentence in filter(has_query_length, split_sentences(text)):
    match = pattern.search(sentence)
    longer = match and (_NAME_BEFORE.search(sentence[: match.start()]) or _NAME_AFTER.match(sentence[match.end() :]))
    found += [sentence] if match and not longer else []
  return found


def _gap(sentences: Sequence[str], rng: np.random.Generator) -> tuple[str, str] | None:
  """Leave a name or a number out of one of the sentences; return the sentence and what it lacks."""
  for sentence in rng.permutation(sentences):
    gaps = list(_NAME_OR_NUMBER.finditer(sentence))
    if gaps and has_query_length(sentence):
      gap = gaps[rng.integers(len(gaps))]
      return f"{sentence[: gap.start()]}___{sentence[gap.end() :]}", gap[0]
  return None

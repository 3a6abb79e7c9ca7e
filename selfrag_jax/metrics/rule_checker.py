"""A checker of claims by rules: a claim is compared with the sentences of the passages that say it best.

The words of the claim are aligned with those of a sentence, or of two. The score is a product of numbers in [0, 1]:

- *coverage* is the share of the words of the claim that the sentence has;
- *order* falls with the neighbours in the claim that are none in the sentence; one moved clause is free;
- *fluency* is low if few pairs of neighbours, articles included, are pairs of the passage;
- *names* falls with the names and numbers that the sentence has not, or has beside other words;
- *polarity* falls with the words that are denied on one side only, and where a passive exchanges who acts and who is
  acted upon.

The rules know function words, negations and pronouns of English, and no other words. So a paraphrase in other words
scores low, and a false claim that has one common word in the place of another scores high. The numbers below were
chosen on the tuning half of `benchmarks/hallucination.py`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from heapq import nlargest
from itertools import pairwise
from typing import NamedTuple

from selfrag_jax.metrics.english import Sentence, Word, index_words, read_passage, read_words
from selfrag_jax.metrics.sentences import split_words

THRESHOLD = 0.5  # a claim that scores at least this is called supported
CANDIDATES = 3  # sentences that are compared with a claim
ADDS = 3  # words that a second sentence must add
FLUENT = 0.3  # share of word pairs that even free paraphrases keep

OPPOSITES = ("un", "dis", "non", "in", "im", "ir")


class Match(NamedTuple):
  """The place of a word in the claim and in the sentence, and whether the sentence has its opposite ("unable")."""

  claimed: int
  place: int
  is_opposite: bool


class RuleChecker:
  """The checker by rules, which needs no weights and keeps no state."""

  def score(self, claim: str, passages: Sequence[str]) -> float:
    """Return how well the passages support a claim, in [0, 1]; 0 if the claim or the passages have no words."""
    read = [read_passage(passage) for passage in passages]
    words = read_words(claim, frozenset().union(*(passage.small for passage in read)))
    candidates = _candidates({word.stem for word in words}, [each for passage in read for each in passage.sentences])
    fluency = min(_share_of_pairs(claim, [passage.pairs for passage in read]) / FLUENT, 1.0)
    return fluency * max((agreement(words, sentence) for sentence in candidates), default=0.0)


def supports(premise: str, claim: str) -> bool:
  """Tell whether a premise supports a claim by the rules."""
  return RuleChecker().score(claim, [premise]) >= THRESHOLD


def agreement(claim: Sequence[Word], sentence: Sentence) -> float:
  """Return how well a sentence supports the words of a claim in all but fluency."""
  matches = align(claim, sentence)
  if not matches:
    return 0.0
  runs, turned = _runs(matches), _is_turned(claim, sentence, matches)
  breaks = len(runs) - (4 if turned else 2)  # a moved clause makes two runs, an exchange of subject and object four
  order = 1 - min(1.5 * max(breaks, 0) / len(matches), 1.0)
  moved = 0 if turned else _moved_names(claim, runs)
  wrong = _missing_names(claim, sentence, matches) + _contradictions(claim, sentence, matches)
  return len(matches) / len(claim) * order * 0.4**moved * 0.3**wrong


def align(claim: Sequence[Word], sentence: Sentence) -> list[Match]:
  """Align each word with the same word of the sentence, the next one after the word before if there is one."""
  matches, expected = [], 0
  for i, word in enumerate(claim):
    same = word.stem in sentence.places
    stem = word.stem if same else next(filter(sentence.places.__contains__, _opposites(word.stem)), None)
    if stem is not None:
      places = sentence.places[stem]
      place = places[bisect_left(places, expected) % len(places)]
      matches.append(Match(i, place, not same))
      expected = place + 1
  return matches


def _opposites(stem: str) -> Iterable[str]:
  for prefix in OPPOSITES:
    yield prefix + stem
    if stem.startswith(prefix) and len(stem) > len(prefix) + 2:
      yield stem.removeprefix(prefix)


def _follows(before: Match, match: Match) -> bool:
  """Tell whether a match goes on in the sentence where the one before ended, or one word later."""
  return 1 <= match.place - before.place <= 2


def _runs(matches: Sequence[Match]) -> list[list[Match]]:
  """Cut matches into runs that go on in the sentence."""
  runs = [[matches[0]]]
  for before, match in pairwise(matches):
    if _follows(before, match):
      runs[-1].append(match)
    else:
      runs.append([match])
  return runs


def _missing_names(claim: Sequence[Word], sentence: Sentence, matches: Sequence[Match]) -> int:
  """Count the names that the sentence has not, except those for which it has a pronoun."""
  missing, following = 0, len(matches)
  found = {match.claimed: at for at, match in enumerate(matches)}
  for i in reversed(range(len(claim))):
    following = found.get(i, following)
    if claim[i].is_name and i not in found:
      missing += not (sentence.is_known(claim[i].stem) and _is_pronoun_before(matches[following:], sentence))
  return missing


def _is_pronoun_before(matches: Sequence[Match], sentence: Sentence) -> bool:
  """Tell whether the sentence has a pronoun shortly before the first match."""
  place = matches[0].place if matches else 0
  return any(word.after_pronoun for word in sentence.words[max(place - 1, 0) : place + 1])


def _is_turned(claim: Sequence[Word], sentence: Sentence, matches: Sequence[Match]) -> bool:
  """Tell whether one seems to be the passive of the other, since more words come after "by" in it."""
  claimed = sum(claim[match.claimed].after_by for match in matches)
  return claimed != sum(sentence.words[match.place].after_by for match in matches)


def _moved_names(claim: Sequence[Word], runs: Sequence[Sequence[Match]]) -> int:
  """Count the names that stand apart from their neighbours in the sentence.

  A date may be first or last, and the name that comes first may have lost its apposition.
  """
  alone = [all(claim[match.claimed].is_name for match in run) for run in runs]
  is_date = [each and claim[run[0].claimed].stem[0].isdigit() for each, run in zip(alone, runs, strict=True)]
  has_lost = alone[0] and len(runs) > 1 and runs[0][-1].place < runs[1][0].place
  return sum(alone) - (is_date[0] or is_date[-1] or has_lost) if len(runs) > 1 else 0


def _contradictions(claim: Sequence[Word], sentence: Sentence, matches: Sequence[Match]) -> int:
  """Count the matches that an odd number of negations tells apart, and those who act in one and suffer in the other.

  The negation of a word that has no match goes to the next match.
  """
  count, before = 0, Match(-1, -9, False)
  for match in matches:
    follows, word, other = _follows(before, match), claim[match.claimed], sentence.words[match.place]
    here = claim[before.claimed + 1 : match.claimed + 1]
    there = sentence.words[before.place + 1 if follows else match.place : match.place + 1]
    count += (sum(each.is_denied for each in [*here, *there]) + match.is_opposite) % 2
    count += follows and word.is_name and word.after_by != other.after_by  # "by" came or went, but the order stayed
    before = match
  return count


def _candidates(stems: set[str], sentences: Sequence[Sentence]) -> list[Sentence]:
  """Return the sentences with most of the stems, and the best one together with what it lacks most."""
  if not sentences or not stems:
    return []
  best = nlargest(CANDIDATES, sentences, key=lambda sentence: len(stems & sentence.places.keys()))
  rest = stems - best[0].places.keys()
  other = max(sentences, key=lambda sentence: len(rest & sentence.places.keys()))
  if len(rest & other.places.keys()) < ADDS:
    return best
  return [*best, index_words([*best[0].words, *other.words], best[0].number, best[0].first)]


def _share_of_pairs(claim: str, known: Sequence[frozenset[tuple[str, str]]]) -> float:
  pairs = list(pairwise(split_words(claim.lower())))
  return sum(any(pair in each for each in known) for pair in pairs) / len(pairs) if pairs else 1.0

"""The wordings of the invented countries: how a fact is stated and asked for, in each split.

Training states facts in many constructions, active, passive, fronted and cleft, each with several ways to call a
country, and as seven authors did. From many wordings, whose words stand at many distances from each other, a model
learns to read a statement that it has not seen. What authors wrote, and all of the other splits, is in
`data/countries`. An author is an instance of a language model that was told the four facts, the words that it might
use and, for training, a manner: an encyclopedia's, a storyteller's, a friend's with a lawyer's, a traveller's, a
gossip's, a poet's or a riddler's. None saw a sentence of another, and all that they wrote is there but for what other
splits have.

Of `valid`, the first statements and questions are ours, the next an author's, the others those of two former tests, by
three authors; `test` is by two. Tests have neither statements by the noun nor questions without it or with a telling
word of a statement; in the third, each statement is more than one word away from those of training, and three that
state no plain fact are left out. In both splits, BM25 finds 998 of 1,000 documents or more beside each question, and
each word stands in a training without authors, too.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from selfrag_jax.tasks.facts import FIRST, LAST

UNKNOWN = "I don't know"
PLACES = ("{c}", "the country {c}", "the land {c}")  # what {C} of a statement of training stands for
AUTHORED = Path(__file__).resolve().parents[1] / "data" / "countries"


class Wording(NamedTuple):
  """The ways to state a fact of a country `c` with the value `v`, and to ask for it."""

  statements: tuple[str, ...]
  questions: tuple[str, ...]


# what is said of every relation by its noun
STATEMENTS = (
  "The {r} of {C} is {v}.", "In {C} the {r} is {v}.", "The {r} in {C} is {v}.", "{C} has the {r} {v}.",
  "As {r} {C} has {v}.", "The {r} that {C} has is {v}.", "The {r} {C} has is {v}.", "{C} has now as {r} {v}.",
  "The {r} of {C} is now {v}.",
)  # fmt: skip
QUESTIONS = (
  "What is the {r} of {c}?", "Name the {r} of {c}.", "In {c}, what is the {r}?", "Which {r} does {c} have?",
  "{c} has which {r}?", "Tell me the {r} of {c}.", "What is the {r} of the country {c}?",
)  # fmt: skip
# Training also asks the other way round. To answer, the place of a value must know its country: an easy lesson, as one
# word of the question is that of the document, without which a model is slow to learn to choose by the country.
REVERSED = ("Whose {r} is {v}?", "{v} is whose {r}?", "Whose is the {r} {v}?", "Name whose {r} is {v}.")


def _placed(statement: str) -> list[str]:
  """Return a statement with each way to call the country."""
  placed = [statement.replace("{C}", place) for place in PLACES] if "{C}" in statement else [statement]
  return [text[0].upper() + text[1:] for text in placed]


def _authored(split: str) -> dict[str, Wording]:
  """Read what authors wrote about each relation for a split."""
  relations = json.loads((AUTHORED / f"{split}.json").read_text(encoding="utf-8"))
  return {noun: Wording(tuple(of["statements"]), tuple(of["questions"])) for noun, of in relations.items()}


AUTHORS, VALID, TEST = _authored("train"), _authored("valid"), _authored("test")


def _wordings(noun: str, statements: tuple[str, ...], questions: tuple[str, ...]) -> dict[str, Wording]:
  """Return the wordings of a relation in each split, and those for training that authors wrote.

  Training states and asks by the noun and by verbs. The other splits state by verbs and ask by the noun: such a
  statement and such a question share no word that tells relations apart, and only training tells which answers which.
  """
  by_noun = lambda texts: tuple(text.replace("{r}", noun) for text in texts)
  stated = [text for statement in (*by_noun(STATEMENTS), *statements) for text in _placed(statement)]
  train = Wording(tuple(stated), (*by_noun(QUESTIONS), *questions))
  return {"train": train, "authors": AUTHORS[noun], "valid": VALID[noun], "test": TEST[noun]}


RELATIONS = {
  "capital": _wordings(
    "capital",
    (
      "{C} is ruled from the city {v}.", "{C} is now ruled from {v}.", "From the city {v} {C} is ruled.",
      "The city {v} is ruling {C}.", "The city {v} rules {C}.", "The city ruling {C} is {v}.",
      "All of {C} is ruled from the city {v}.", "It is the city {v} that rules {C}.",
      "It is {v} from which {C} is ruled.", "Those who rule {C} live in the city {v}.",
      "Whoever rules {C} rules from {v}.", "{C} is a country which the city {v} rules.",
    ),
    (
      "From which city is {c} ruled?", "{c} is ruled from which city?", "Name the city from which {c} is ruled.",
      "Which city is ruling {c}?",
    ),
  ),
  "currency": _wordings(
    "currency",
    (
      "People pay with {v} in {C}.", "In {C} people pay with {v}.", "With {v} people in {C} pay.",
      "In {C} all people pay with {v}.", "All who live in {C} now pay with {v}.",
      "People who live in {C} pay with {v}.",
      "It is {v} that people in {C} pay with.", "It is {v} with which people pay in {C}.",
      "Those who live in {C} now pay with {v}.", "To pay in {C} people take {v}.",
      "Whoever pays in {C} pays with {v}.", "{C} is a country where people pay with {v}.",
    ),
    (
      "With what do people in {c} pay?", "People in {c} pay with what?", "What do people pay with in {c}?",
      "In {c}, people pay with what?",
    ),
  ),
  "language": _wordings(
    "language",
    (
      "People speak {v} in {C}.", "In {C} people speak {v}.", "People who speak {v} live in {C}.",
      "In {C} all people speak {v}.", "All who live in {C} now speak {v}.", "People who live in {C} speak {v}.",
      "It is {v} that people in {C} speak.", "It is {v} which people speak in {C}.",
      "Those who live in {C} now speak {v}.", "To speak in {C} people take {v}.",
      "Whoever speaks in {C} speaks {v}.", "{C} is a country where people speak {v}.",
    ),
    (
      "What do people in {c} speak?", "People in {c} speak what?", "What do people speak in {c}?",
      "In {c}, people speak what?",
    ),
  ),
  "river": _wordings(
    "river",
    (
      "The water of {v} flows in {C}.", "In {C} the water of {v} flows.", "In {C} flows the water of {v}.",
      "All water that flows in {C} is now of {v}.", "Water flows in {C}, which is {v}.",
      "It is the water of {v} that flows in {C}.", "It is {v} which flows in {C}.",
      "Those who live in {C} have the water of {v}.", "To flow in {C} all water takes to {v}.",
      "Whoever lives in {C} has the water of {v}.", "The water flowing in {C} is of {v}.",
      "{C} is a country where the water of {v} flows.",
    ),
    (
      "Which water flows in {c}?", "In {c} flows which water?", "Name the water which flows in {c}.",
      "What flows in {c}?",
    ),
  ),
}  # fmt: skip


def _words(texts: Iterable[str]) -> set[str]:
  return set(re.findall(r"\w+", re.sub(r"\{\w\}", " ", " ".join(texts)).lower()))


def fillers() -> list[str]:
  """List the words of training, in small letters, that belong to several relations: they tell none from another."""
  of_each = [_words([*splits["train"].statements, *splits["train"].questions]) for splits in RELATIONS.values()]
  return sorted(word for word in set().union(*of_each) if sum(word in words for words in of_each) > 1)


FILLERS = fillers()
HELD_OUT = frozenset(
  text.lower() for of in RELATIONS.values() for split in ("valid", "test") for kind in of[split] for text in kind
)


def vocabulary() -> list[str]:
  """List the distinct words and marks of every document, question and answer; noise begins with any word.

  In alphabetical order: which split has a wording changes no token, so checkpoints outlive an author of no new word.
  """
  texts = [text for splits in RELATIONS.values() for wording in splits.values() for kind in wording for text in kind]
  pieces = lambda texts: re.findall(r"\w+|[^\w\s]", re.sub(r"\{\w\}", " ", " ".join(texts)))
  said = pieces([*texts, *REVERSED, *RELATIONS, UNKNOWN, "Title: Content:", "retrieval user assistant system"])
  spoken = {word.lower() for word in pieces([*texts, *REVERSED, *RELATIONS]) if word.isalpha()}
  return sorted({*said, *FIRST, *LAST, *spoken, *map(str.capitalize, spoken)})


def noisy(template: str, share: float, rng: np.random.Generator) -> str:
  """Leave out half a share of the words that tell no relation, and put others in place of the other half.

  In a share of the sentences, what stands before a random word comes behind the rest. So most templates come as
  wordings, and names in orders, that no training has read before (EDA, arXiv 1901.11196, which swaps single words).
  None becomes one that is held out: it stays as it is then.
  """
  if not share:
    return template
  words, mark = [], template[-1]
  opening, *others = template[:-1].split()
  for word in (opening if opening == "I" else opening[0].lower() + opening[1:], *others):
    if word not in FILLERS or rng.random() >= share:
      words.append(word)
    elif rng.random() < 0.5:
      words.append(FILLERS[int(rng.integers(len(FILLERS)))])
  if rng.random() < share:
    first = int(rng.integers(len(words)))
    words = words[first:] + words[:first]
  changed = " ".join(words).rstrip(",") + mark
  changed = changed[0].upper() + changed[1:]
  return template if changed.lower() in HELD_OUT else changed

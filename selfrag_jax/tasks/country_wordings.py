"""The wordings of the invented countries: how a fact is stated and asked for, in each split.

Training states facts in many constructions, active, passive, fronted and cleft, each with several ways to call a
country, and as four authors did (`country_authors`). From many wordings, whose words stand at many distances from each
other, a model learns to read a statement that it has not seen. Of `valid`, the first five statements of a relation and
its first three questions are ours, four statements and two questions by an author, the others by one whose sentences
were the test before. All of `test` is by others: the statements and a few questions by one, most questions by another.
None of them saw another wording, only words that they might use. All that they wrote is there but for what other splits
have, of the last three also statements by the noun and questions with a telling word of a statement, and of the last
two questions for which BM25 finds less than 998 of 1,000 documents, as for "What name does the river of {c} have?".
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from selfrag_jax.tasks import country_authors
from selfrag_jax.tasks.facts import FIRST, LAST

UNKNOWN = "I don't know"
PLACES = ("{c}", "the country {c}", "the land {c}")  # what {C} of a statement of training stands for


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
QUESTIONS = {
  "train": (
    "What is the {r} of {c}?", "Name the {r} of {c}.", "In {c}, what is the {r}?", "Which {r} does {c} have?",
    "{c} has which {r}?", "Tell me the {r} of {c}.", "What is the {r} of the country {c}?",
  ),
  "valid": (
    "Which is the {r} of {c}?", "In the country {c}, which is the {r}?", "What {r} does the country {c} have?",
    "Tell me what {r} the country of {c} has.", "In the land of {c}, what is the {r}?",
  ),
}  # fmt: skip
# Training also asks the other way round. To answer, the place of a value must know its country: an easy lesson, as one
# word of the question is that of the document, without which a model is slow to learn to choose by the country.
REVERSED = ("Whose {r} is {v}?", "{v} is whose {r}?", "Whose is the {r} {v}?", "Name whose {r} is {v}.")


def _placed(statement: str) -> list[str]:
  """Return a statement with each way to call the country."""
  placed = [statement.replace("{C}", place) for place in PLACES] if "{C}" in statement else [statement]
  return [text[0].upper() + text[1:] for text in placed]


def _wordings(
  noun: str, statements: tuple[str, ...], questions: tuple[str, ...], valid: Wording, test: Wording
) -> dict[str, Wording]:
  """Return the wordings of a relation in each split, and those of `authors` for training.

  Training states and asks by the noun and by verbs. The other splits state by verbs and ask by the noun: such a
  statement and such a question share no word that tells relations apart, and only training tells which answers which.
  """
  by_noun = lambda texts: tuple(text.replace("{r}", noun) for text in texts)
  asked = {split: by_noun(texts) for split, texts in QUESTIONS.items()}
  stated = [text for statement in (*by_noun(STATEMENTS), *statements) for text in _placed(statement)]
  train = Wording(tuple(stated), (*asked["train"], *questions))
  authors = Wording(country_authors.STATEMENTS[noun], country_authors.QUESTIONS[noun])
  held_out = Wording(valid.statements, (*asked["valid"], *valid.questions))
  return {"train": train, "authors": authors, "valid": held_out, "test": test}


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
    Wording(
      (
        "The city from which {c} is ruled is {v}.",
        "The city that now rules the country {c} is {v}.",
        "The city {c} is now ruled from is {v}.",
        "The city that is ruling {c} is {v}.",
        "The country {c} has the ruling city {v}.",
        "{c} is ruled from {v}.",
        "It is from {v} that {c} is ruled.",
        "{c} has {v} as the ruling city.",
        "The country that is ruled from {v} is {c}.",
        "{v} is where {c} is ruled from.",
        "Whoever rules the land of {c} rules it from {v}.",
        "It is from {v} that those who rule {c} rule the land.",
        "Those who rule live in {v}, the city from which all of {c} is ruled.",
        "In {v} lives whoever is now ruling the country {c}.",
        "{c} is a country that is now ruled from the city of {v}.",
        "Ruling from {v} is what those who now rule the people of {c} do.",
      ),
      ("Tell me the name of the capital that {c} has.",),
    ),
    Wording(
      (
        "{v} is the city that rules all of {c}.",
        "It is in {v} that those who rule the land of {c} live.",
        "From {v}, a city that people know, {c} is ruled.",
        "The city from which those ruling the people of {c} rule is {v}.",
        "{v} is where those ruling {c} rule from.",
        "Whoever is to rule {c} has to live in the city of {v}.",
        "The people of {c} take {v} as the city that is to rule the country.",
        "I know that it is {v}, a city, from which the people of {c} have to take rule.",
      ),
      (
        "Which name does the capital of {c} have?",
        "What does {c} have as the capital?",
        "{c}, what is the capital of that country?",
        "Of the country {c}, which is the capital?",
        "The capital of {c} is what?",
        "What is it that is the capital of {c}?",
        "Tell me what the capital of {c} is.",
        "In the country that is {c}, what is the capital now?",
        "Do tell me which is the capital of the land of {c}.",
        "Where is it that is the capital of all {c}?",
      ),
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
    Wording(
      (
        "The people in {c} pay with {v}.",
        "All people who pay in {c} pay with {v}.",
        "The people of the country {c} now all pay with {v}.",
        "All people of {c} now pay with {v}.",
        "What people in {c} pay with is {v}.",
        "{v} is what people in {c} pay with.",
        "It is with {v} that the people of {c} pay.",
        "To pay in {c} is to pay with {v}.",
        "The country where people pay with {v} is {c}.",
        "{v} is what people pay with in {c}.",
        "With {v} people pay in {c}.",
        "Whoever lives in {c} pays with {v}.",
        "To pay in {c}, people have to have {v}.",
        "It is with {v} that all those who live in {c} pay.",
        "{v} is the name of what all those who live in the land of {c} pay with.",
        "People take {v} from whoever has to pay in the country {c}.",
      ),
      ("What currency does {c} have?", "Tell me the name of the currency of {c}.",),
    ),
    Wording(
      (
        "To pay in {c} is to pay in {v}.",
        "{v} is what whoever lives in {c} pays with.",
        "In {c}, those who have to pay do it in {v}.",
        "It is {v} that people in {c} have to pay with.",
        "{c} is a country whose people pay in {v}.",
        "The people of {c} take {v} from whoever has to pay.",
        "I know that those who rule {c} pay people in {v}.",
        "{v} is the name of what those who pay in {c} pay with.",
        "Whoever lives in {c}, as those ruling it do, is content to pay with {v}.",
      ),
      (
        "Tell me which currency {c} has.",
        "Which currency is that of {c}?",
        "Tell me which currency is that of the people of {c}.",
        "The currency in {c} is which?",
        "Now tell me, what is the currency in {c}?",
        "To people in {c}, what is the currency?",
        "{c} is a country, tell me the currency of it.",
        "Do tell me of the currency that is that of {c}.",
      ),
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
    Wording(
      (
        "The people in {c} speak {v}.",
        "All people who speak in {c} speak {v}.",
        "The people of the country {c} now all speak {v}.",
        "All people of {c} now speak {v}.",
        "What people in {c} speak is {v}.",
        "Those who live in {c} speak {v}.",
        "{v} is what people speak in {c}.",
        "It is {v} that the people of {c} speak.",
        "To speak as people do in {c} is to speak {v}.",
        "People in {c} speak {v}.",
        "What people speak in {c} is {v}.",
        "It is {v} that whoever lives in {c} speaks.",
        "To live in {c} is to speak {v}.",
        "Those who speak {v} live in the country {c}.",
        "{v} is what it takes to speak with the people of {c}.",
        "{c} is a land whose people speak {v}.",
        "Whoever speaks {v} speaks as people do in {c}.",
      ),
      ("What is the name of the language of {c}?", "Tell me what language the country {c} has.",),
    ),
    Wording(
      (
        "In {c}, those who speak do it in {v}.",
        "It is {v} that whoever rules {c} speaks to the people.",
        "Those who speak {v} speak as all do in {c}.",
        "Whoever has to speak to the people of {c} has to know {v}.",
        "{v} is the name of what all who live in {c} speak.",
        "What I speak with those who live in {c} is what people in it speak, {v}.",
        "Those who live in {c}, whoever rules it, speak {v}.",
      ),
      (
        "Tell me which language {c} has.",
        "What is the language of the people of {c}?",
        "Of {c}, a country, tell me the language.",
        "{c} is the land of which language?",
      ),
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
    Wording(
      (
        "The water which flows in {c} is {v}.",
        "The water that now flows in the country {c} is {v}.",
        "The people in {c} have the water of {v}.",
        "In all of {c} flows the water of {v}.",
        "What flows in the country {c} is the water of {v}.",
        "{v} flows in {c}.",
        "The water that flows in {c} is that of {v}.",
        "It is in {c} that the water of {v} flows.",
        "{c} is a land in which {v} flows.",
        "In the land of {c} flows the water of {v}.",
        "The water that people take in {c} flows from {v}.",
        "{c} is the country in which {v} flows.",
        "{v} has water that flows in the country {c}.",
        "It is from {v} that people in {c} take water.",
        "Flowing in {v} is the water that those who live in the country {c} take.",
      ),
      ("Tell me the name of the river that {c} has.",),
    ),
    Wording(
      (
        "What flows in {c} is the water of {v}.",
        "Where {v} flows, the land is that of {c}.",
        "{c} takes the water it has from the flowing {v}.",
        "The people of {c} live where {v} flows.",
        "It is {v} whose water flows in the land of {c}.",
        "{c} is the country in which the water of {v} flows.",
        "Those who take water in {c} take it from {v}.",
        "People who live in {c} know the water flowing in it as {v}.",
        "In the land of {c}, flowing from city to city, is {v}.",
        "Whoever rules {c} rules land in which {v} flows.",
      ),
      (
        "Which river is in {c}?",
        "What river is it that is in the land of {c}?",
        "Tell me of the river in {c}, what is it?",
        "Now, the river in {c}, which is it?",
        "In {c} is a river, tell me which.",
        "The river that is in the country {c} is what?",
        "Of what river do the people in {c} tell?",
        "Where the land is {c}, what is the river?",
        "To those in {c}, the river is which?",
        "As a country, {c} is the land of what river?",
      ),
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

  In alphabetical order: which split has a wording changes no token, so checkpoints outlive a new author.
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
  for word in (template[0].lower() + template[1:-1]).split():
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

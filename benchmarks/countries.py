"""Where a run of configs/rag.py errs about countries: beside which documents, in which wordings, how new these are.

  python benchmarks/countries.py [--workdir=runs/rag_hybrid] [--split=test]

WORKDIR is a finished `launch/train.py` run. 1,024 questions of a split, greedy answers beside the documents that were
found. A rival states the same relation of another country; `with a word`: a word of the name that is asked for
stands in it. A model that tells relations apart but not countries is wrong beside half of the rivals. New words of a
wording are those to leave out, put in or replace, at least, to make it of a statement of training (edit distance). The
last two groups are the wordings of statements and questions.
"""

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from absl import app, flags, logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WORKDIR = flags.DEFINE_string("workdir", "runs/rag_hybrid", "The finished run.")
SPLIT = flags.DEFINE_enum("split", "valid", ["valid", "test"], "Names and wordings of which split.")
QUESTIONS = 1024


def main(_) -> None:
  """Answer the questions and print the share of mistakes by the kind of the other documents."""
  from selfrag_jax.experiments.chat_model import ChatModel
  from selfrag_jax.mesh import configure_xla
  from selfrag_jax.metrics.statistics import wilson_interval
  from selfrag_jax.tasks.countries import Countries
  from selfrag_jax.text.chat import COMPACT
  from selfrag_jax.text.rag_prompts import repeat_documents
  from selfrag_jax.train.load import load_model

  logging.set_verbosity(logging.WARNING)
  configure_xla()
  countries = Countries()
  task = countries.questions(SPLIT.value, QUESTIONS, "retrieved")
  loaded = load_model(WORKDIR.value, "rag", tokenizer=countries.tokenizer)
  repeats = loaded.metadata["config"]["data"].get("repeats", 1)
  model = ChatModel(loaded, "the model", COMPACT, 32)
  rows = list(task)
  messages = [repeat_documents(row["messages"], repeats) for row in rows]
  said = model.answer(messages, max_new_tokens=8, batch_size=64)
  groups = "the other documents", "new words of the wording", "the wording", "the question"
  wrong: dict[str, dict[str, list[bool]]] = {group: {} for group in groups}
  for row, answer in zip(rows, said, strict=True):
    mistake = not task.evaluate(row, answer.text)
    relation, text = wording(row["gold"])
    names = kind(row), f"{new_words(relation, text):2}", text, asked(row)
    for group, name in zip(groups, names, strict=True):
      wrong[group].setdefault(name, []).append(mistake)
  for title, of in wrong.items():
    print(f"{title:60}{'n':>6}{'wrong':>8}  95 % interval")
    for name, mistakes in sorted(of.items()):
      low, high = wilson_interval(sum(mistakes), len(mistakes))
      print(f"{name:60}{len(mistakes):6}{sum(mistakes) / len(mistakes):8.3f}  [{low:.3f}, {high:.3f}]")


def kind(row: dict[str, Any]) -> str:
  """Return what the documents beside the one that answers have in common with it."""
  documents = row["messages"][0]["documents"]
  found = [document for document in documents if document["content"] == row["gold"]]
  if not found:
    return "the right one was not found"
  [gold], name = found, set(found[0]["title"].split())
  rivals = [
    document
    for document in documents
    if document is not gold and wording(document["content"])[0] == wording(gold["content"])[0]
  ]
  if not rivals:
    return "no rival"
  return "a rival with a word" if any(name & set(re.findall(r"\w+", d["content"])) for d in rivals) else "a rival"


def wording(content: str) -> tuple[str, str]:
  """Return the relation that a document of the split states, and the wording."""
  from selfrag_jax.tasks.country_wordings import RELATIONS

  stated = [(name, text) for name, of in RELATIONS.items() for text in of[SPLIT.value].statements]
  return next((name, text) for name, text in stated if re.fullmatch(text.format(c=names(), v=names()), content))


def asked(row: dict[str, Any]) -> str:
  """Return the wording of the question."""
  return re.sub(names(), "{c}", row["messages"][1]["content"])


@cache
def names() -> str:
  """Return the pattern of every name."""
  from selfrag_jax.tasks.facts import FIRST, LAST

  return rf"(?:{'|'.join(FIRST)}) (?:{'|'.join(LAST)})"


@cache
def new_words(relation: str, text: str) -> int:
  """Return the edit distance in words between a wording and the nearest one of training of its relation."""
  from selfrag_jax.tasks.country_wordings import RELATIONS

  read = lambda text: re.findall(r"\{\w\}|\w+", text.lower())
  told = [*RELATIONS[relation]["train"].statements, *RELATIONS[relation]["authors"].statements]
  return min(distance(read(text), read(other)) for other in told)


def distance(one: list[str], other: list[str]) -> int:
  """Return how many words must be left out, put in or replaced to make one list of another (Levenshtein)."""
  row = list(range(len(other) + 1))
  for i, word in enumerate(one, start=1):
    before, row[0] = row[0], i
    for j, with_ in enumerate(other, start=1):
      before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != with_))
  return row[-1]


if __name__ == "__main__":
  app.run(main)

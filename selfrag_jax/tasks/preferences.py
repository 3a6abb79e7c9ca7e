"""Preference pairs of a search task: a gold demonstration, and the same one with a wrong answer or wrong evidence.

What is put in comes from the gold demonstration of another question of the same split. Either of two questions is as
likely to give as to take: chosen and rejected answers, and documents, are distributed alike, and neither their words
nor their length tell which is right.
"""

from typing import Any, NamedTuple

import numpy as np

from selfrag_jax.metrics.answers import normalize_answer
from selfrag_jax.tasks.search_task import SPLITS, SearchTask
from selfrag_jax.text.chat import render_conversation

KINDS = ("answer", "document", "both", "search")  # of the parts that a rejected conversation has from another question
ENDLESS = 2**31  # questions are drawn from as many, where they never end
PAIR_STREAM = 11  # keeps the random numbers of pairs apart from those of demonstrations
TRIES = 100


class Pair(NamedTuple):
  """Two conversations about one question, of which the first is preferred, and what is wrong in the second."""

  chosen: dict[str, Any]
  rejected: dict[str, Any]
  kind: str


def preference_pair(task: SearchTask, split: str, index: int, max_hops: int, seed: int) -> Pair:
  """Make pair `index` of `split`, a pure function of its arguments and the task's seed.

  The chosen conversation is the gold demonstration of question `index`. The rejected one has another question's answer
  (kind `answer`: the evidence does not say so), its last search found another question's last document (`document`: the
  right answer without its evidence), both of one other question (`both`: evidence and answer agree, about something
  else), or all of it from one of its searches on (`search`: what was searched for is something else); each kind is as
  likely. If one of the two documents says the other's answer, both questions are drawn anew.

  Raises like `task.demonstration`, and ValueError if no such questions are found.
  """
  shown = lambda i: task.demonstration(split, int(i), "gold", max_hops)
  chosen, size = shown(index), task.size(split) or ENDLESS
  rng = np.random.default_rng([seed, PAIR_STREAM, SPLITS.index(split), index])
  kind = KINDS[rng.integers(len(KINDS))]
  for _ in range(TRIES):
    other = shown(rng.integers(size))
    if not _says(chosen, other) and not _says(other, chosen):
      break
    # to draw only the other one anew would reject frequent answers less often than they are chosen
    chosen = shown(rng.integers(size))
  else:
    raise ValueError(f"among {TRIES} pairs of questions of {split}, none has two different answers and documents")
  parts, others = chosen["messages"][-1]["content"], other["messages"][-1]["content"]
  if kind == "search":
    first = 2 * rng.integers(min(len(parts), len(others)) // 2)  # each search is followed by what it found
    content = [*parts[:first], *others[first:]]
  else:
    found, said = ((others if kind in (name, "both") else parts)[at] for name, at in (("document", -2), ("answer", -1)))
    content = [*parts[:-2], found, said]
  turn = {**chosen["messages"][-1], "content": content}
  return Pair(chosen, {**chosen, "messages": [*chosen["messages"][:-1], turn]}, kind)


def render_pair(task: SearchTask, pair: Pair) -> tuple[list[int], list[int]]:
  """Return the token ids of both conversations up to the end of their answers, where a rollout ends, too."""
  end = task.tokenizer.special["<|answer_end|>"]
  render = lambda conversation: render_conversation(task.tokenizer, conversation, task.template)[0]
  chosen, rejected = render(pair.chosen), render(pair.rejected)
  return chosen[: chosen.index(end) + 1], rejected[: rejected.index(end) + 1]


def _says(conversation: dict[str, Any], other: dict[str, Any]) -> bool:
  """Tell whether the last document or the answer of a conversation holds the other's answer, or shares its document."""
  *_, found, said = conversation["messages"][-1]["content"]
  content = other["messages"][-1]["content"]
  documents = [f"{document['title']} {document['content']}" for document in found["documents"]]
  texts = [normalize_answer(text) for text in (said["text"], " ".join(documents))]
  return found in content or any(f" {normalize_answer(content[-1]['text'])} " in f" {text} " for text in texts)

"""Preference pairs: only what belongs together tells chosen from rejected, and no held-out question is trained on."""

import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import binomtest

from selfrag_jax.tasks.datasets import Passage, QAFolder, Question
from selfrag_jax.tasks.passages import PassageSearch
from selfrag_jax.tasks.preferences import KINDS, preference_pair, render_pair
from selfrag_jax.tasks.two_hop_search import TwoHopSearch
from selfrag_jax.text.chat import COMPACT
from selfrag_jax.text.tokenizer import ByteTokenizer

TOWNS = [
  f"{first}{last}" for first in ("Ar", "Bel", "Cor", "Dun", "El", "Fen") for last in ("by", "ton", "wick", "ley")
]
SIZES = {"document_tokens": 120, "prompt_tokens": 240, "max_query_tokens": 40}


def towns(mayors):
  """Ask for the mayor of each town, and whether the town is old: half of all answers are the same short one."""
  passages = [Passage(f"p{i}", town, f"{town} {'x' * i} is led by {mayors[i]}.") for i, town in enumerate(TOWNS)]
  questions = [Question(f"q{i}", f"Who leads {town}?", (mayors[i],), (i,)) for i, town in enumerate(TOWNS)]
  questions += [Question(f"o{i}", f"Is {town} old?", ("no",), (i,)) for i, town in enumerate(TOWNS)]
  return PassageSearch(QAFolder(passages, questions, 0), ByteTokenizer(), COMPACT, **SIZES, seed=1)


@pytest.fixture(scope="module")
def passages():
  return towns([f"Mayor {'xz'[i % 2] * (i + 1)}" for i in range(len(TOWNS))])


@pytest.fixture(scope="module")
def two_hop():
  return TwoHopSearch(seed=4)


def parts(conversation):
  """Return the question, the turn up to its last search, what this one found, and the answer."""
  *before, found, said = conversation["messages"][-1]["content"]
  [document] = found["documents"]
  return conversation["messages"][-2]["content"], before, (document["title"], document["content"]), said["text"]


def pairs_of(task, split, n, hops=2, seed=0):
  return [preference_pair(task, split, i, hops, seed) for i in range(n)]


@pytest.mark.parametrize("name", ["two_hop", "passages"])
def test_a_rejected_conversation_has_the_wrong_part_of_another_question_of_its_split(name, request):
  task = request.getfixturevalue(name)
  n = task.size("test") or 90
  known = {parts(task.demonstration("test", i, "gold", 2))[2:] for i in range(n)}
  kept, changed = 0, set()
  for i, pair in enumerate(pairs_of(task, "test", n)):
    if pair.chosen == task.demonstration("test", i, "gold", 2):
      kept += 1
    question, before, document, answer = parts(pair.chosen)
    asked, same, other_document, other_answer = parts(pair.rejected)
    assert asked == question
    if pair.kind != "search":
      assert same == before
    else:
      changed.add(next((i for i, (a, b) in enumerate(zip(same, before, strict=True)) if a != b), len(before)))
    assert (other_document == document) == (pair.kind == "answer")
    assert (other_answer == answer) == (pair.kind == "document")
    if pair.kind != "answer":
      assert answer not in re.findall(r"Mayor x+|Mayor z+|\w+", other_document[1])
    if name == "passages" and pair.kind in ("both", "search"):
      assert (other_document, other_answer) in known
  assert changed >= ({0, 2} if name == "two_hop" else {0})  # from the first search or the second one on
  assert kept > 0.4 * n  # of the questions; the others had the answer of the one that was drawn for them
  counts = Counter(pair.kind for pair in pairs_of(task, "sft", 300))
  assert all(binomtest(counts[kind], 300, 1 / 4).pvalue > 1e-4 for kind in KINDS)


def test_a_pair_is_a_function_of_seed_split_and_index(two_hop):
  again = TwoHopSearch(seed=4)
  preference_pair(again, "test", 3, 2, 0)  # what was made before must not matter
  assert preference_pair(two_hop, "sft", 7, 2, 0) == preference_pair(again, "sft", 7, 2, 0)
  rejected = [
    preference_pair(two_hop, split, 7, 2, seed).rejected for split, seed in (("sft", 0), ("sft", 1), ("test", 0))
  ]
  assert all(a != b for a, b in pairwise(rejected))


def test_conversations_end_with_the_answer_as_rollouts_do(two_hop):
  end = two_hop.tokenizer.special["<|answer_end|>"]
  for ids in render_pair(two_hop, preference_pair(two_hop, "sft", 0, 2, 0)):
    assert ids[-1] == end
    assert ids.count(end) == 1


def test_no_held_out_question_is_trained_on(passages):
  """Nor its answer or passage as another question's: with a mayor a town, these are new, too."""
  asked, said = {}, {}
  for split in ("sft", "valid", "test"):
    n = passages.size(split) * (3 if split == "sft" else 1)  # over epochs
    pairs = pairs_of(passages, split, n)
    asked[split] = {parts(conversation)[0] for pair in pairs for conversation in pair[:2]}
    said[split] = {parts(conversation)[3] for pair in pairs for conversation in pair[:2]} - {"no"}
    assert len(asked[split]) >= passages.size(split) / 2
  for known in (asked, said):
    assert not known["sft"] & (known["valid"] | known["test"])


@pytest.mark.parametrize("part", [2, 3], ids=["document", "answer"])
def test_neither_the_answer_nor_the_document_alone_tells_what_was_chosen(two_hop, part):
  """Log-odds of each word of a part, counted on 3,000 pairs, rank as many of 1,000 others as a coin does."""
  words = lambda conversation: str(parts(conversation)[part]).split()
  counts = {"chosen": Counter(), "rejected": Counter()}
  for pair in pairs_of(two_hop, "sft", 3000):
    for name, of in counts.items():
      of.update(words(getattr(pair, name)))
  odds = lambda text: sum(np.log((counts["chosen"][w] + 1) / (counts["rejected"][w] + 1)) for w in words(text))
  margins = np.array([odds(pair.chosen) - odds(pair.rejected) for pair in pairs_of(two_hop, "test", 1000)])
  told = margins[margins != 0]
  print(f"{(told > 0).mean():.3f} of {len(told)}")
  assert binomtest(int((told > 0).sum()), len(told)).pvalue > 0.01


def test_the_length_does_not_tell_what_was_chosen(two_hop, passages):
  lengths = [[len(ids) for ids in render_pair(two_hop, pair)] for pair in pairs_of(two_hop, "test", 50)]
  assert len(set(np.ravel(lengths))) == 1
  margins = np.concatenate([
    np.diff([[len(ids) for ids in render_pair(passages, pair)] for pair in pairs_of(passages, "sft", 400, seed=seed)])
    for seed in range(2)
  ])  # fmt: skip
  told = margins[margins != 0]
  print(f"the shorter one: {(told > 0).mean():.3f} of {len(told)}")
  assert binomtest(int((told > 0).sum()), len(told)).pvalue > 0.01


def test_mistakes_are_named(two_hop):
  with pytest.raises(ValueError, match="split must be one of train, sft, valid, test"):
    preference_pair(two_hop, "tset", 0, 2, 0)
  with pytest.raises(ValueError, match="pairs of questions of test, none has two different answers and documents"):
    preference_pair(towns(["no"] * len(TOWNS)), "test", 0, 2, 0)

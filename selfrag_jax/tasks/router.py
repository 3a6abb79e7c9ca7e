"""The router task: a prompt of keyword rules sends real questions to the articles that they are about.

A rule maps a word to an article. The model follows the rules exactly: of the rules whose word is in the question, it
returns the article that most rules name, or the first of equals. A prompt has room for `capacity` rules, fewer than
there are telling words. The critic knows the article of a question that went wrong, and names it with the longest words
of the question, since one question does not show which of its words occur with other articles too. The optimizer sees
the rules, the critiques of this step, and the past critiques that it is shown. For each critique it adds the word with
the strongest evidence for the article: the number of visible critiques in which the word comes with this article, less
the number with other articles. So more critiques with the words of the present questions help it to avoid words that
several articles share, and to choose words that will come again. No noise is added: articles share words as they do.

Controls tell whether a gain of retrieval is an artefact:
- if the gain came from any past critiques, random critiques or the last ones would be worth as much;
- if it came from the article's name in the critiques, retrieval by the question alone would give nothing;
- if it came from knowing the label and not from the words, any critiques of the same article would be worth as much;
- near copies of a question cannot help: prompts are scored on questions of passages that no step shows.
"""

import collections
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from selfrag_jax.tasks.rulebook import EMPTY, PAST, UNKNOWN, Case

ROUTER_ROLE = "keyword rules that say which article a question is about"
SHOWN = 0.6  # share of the passages whose questions steps show
NAMED = 4  # words of a question that a critique names
ENOUGH = 2  # evidence with which past critiques of other questions make a rule, if there is room
_RULE = re.compile(r'"(\w+)" -> ([^;]+);')
_VERDICT = re.compile(r"<OUTPUT_OF_FUNCTION> (.*?)\nThe right answer is (.*?), this was", re.DOTALL)
_CRITIQUE = re.compile(r"This is about ([^;]+); it says ([\w, ]+)\.")
_COMMON = frozenset(
  re.findall(
    r"\w+",
    "what which when where whose whom that this these those there their they them then than with from have were been "
    "being does into about after before between during would could should many much name named called type kind also "
    "other such some most more over under while will only your nothing",
  )
)


class Question(NamedTuple):
  """A question, the title of the article that it is about, and the id of the passage that answers it."""

  text: str
  label: str
  passage: str


def read_questions(folder: str | Path) -> list[Question]:
  """Read a folder in the layout of BEIR, such as SQuAD's, whose passages have their article as title.

  Raises FileNotFoundError if a file is missing, ValueError if one is wrong or all questions are about one article.
  """
  from selfrag_jax.retrieval.beir import read_beir  # loads JAX

  documents, queries, qrels = read_beir(folder)
  title_of = {document.id: plain(document.title) for document in documents}
  found = []
  for id, text in queries.items():
    passage = max(qrels[id], key=qrels[id].__getitem__)
    if title_of[passage]:
      found.append(Question(plain(text), title_of[passage], passage))
  if len({question.label for question in found}) < 2:
    raise ValueError(f"{folder}: questions about passages with at least two titles were expected, to tell them apart")
  return found


def plain(text: str) -> str:
  """Return a text in one line without the characters that delimit rules and critiques."""
  return " ".join(re.sub(r'[;"<>]', " ", text).split())


def split_by_passage(questions: Sequence[Question], seed: int) -> tuple[list[Question], list[Question]]:
  """Split questions into those that steps show and those that score prompts, with no passage in both."""
  passages = sorted({question.passage for question in questions})
  order = np.random.default_rng([seed, 4]).permutation(len(passages))
  shown = {passages[i] for i in order[: round(SHOWN * len(passages))]}
  parts: tuple[list[Question], list[Question]] = ([], [])
  for question in questions:
    parts[question.passage not in shown].append(question)
  return parts


class Router:
  """The three scripted models; each is a function of the text of its prompt alone."""

  def __init__(self, capacity: int = 64):
    """Make models whose prompts have room for `capacity` rules."""
    self.capacity = capacity

  def answer(self, content: str, system_prompt: str | None) -> str:
    """Be the model: return the article that most rules with a word of the question name, the first of equals."""
    said, book = set(words(content)), rules(system_prompt or "")
    votes = collections.Counter(label for word, label in book.items() if word in said)
    return max(votes, key=votes.__getitem__) if votes else UNKNOWN

  def criticise(self, content: str, system_prompt: str | None) -> str:
    """Be the critic: name the article of a question that went wrong, and the question's longest words.

    If the content already holds a critique of the answer, it is repeated as the critique of the prompt.
    """
    if (said := _CRITIQUE.search(content)) is not None:
      return said[0]
    found = _VERDICT.search(content)
    if found is None:
      raise ValueError(f"no verdict on a question in {content[:80]!r}")
    question, label = found.groups()
    named = sorted(dict.fromkeys(words(question)), key=lambda word: -len(word))[:NAMED]
    return f"This is about {label}; it says {', '.join(named or ['nothing'])}."

  def optimize(self, content: str, system_prompt: str | None) -> str:
    """Be the optimizer: weigh the words by all critiques in the prompt, and write the rules.

    A rule that more critiques contradict than support is dropped; a supported rule counts as new. Each question that
    failed now adds one rule, if one of its words has evidence for its article. Words on which several past critiques
    agree add rules if there is room. If there are too many rules, those written or supported the longest ago are
    dropped.
    """
    start, end = content.index("<VARIABLE>"), content.index("</VARIABLE>")
    book, rest = rules(content[start:end]), content[end:]
    now = list(dict.fromkeys(_CRITIQUE.findall(PAST.sub("", rest))))
    past = [(*said, int(count)) for count, _, text in PAST.findall(rest) for said in _CRITIQUE.findall(text)]
    evidence: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for label, named, count in [*((label, named, 1) for label, named in now), *past]:
      for word in words(named):
        evidence[word][label] += count

    def margin(word: str, label: str) -> int:
      return 2 * evidence[word][label] - evidence[word].total()

    for word, label in list(book.items()):
      if word in evidence and (support := margin(word, label)) != 0:
        del book[word]
        if support > 0:
          book[word] = label
    fresh: dict[str, str] = {}
    for label, named in now:
      free = [word for word in words(named) if word not in book and word not in fresh]
      best = max(free, key=lambda word: (margin(word, label), word in words(label), len(word)), default=None)
      if best is not None and margin(best, label) > 0:
        fresh[best] = label
    agreed = [
      (word, label)
      for word, labels in evidence.items()
      for label in labels
      if margin(word, label) >= ENOUGH and word not in book and word not in fresh
    ]
    room = max(self.capacity - len(book) - len(fresh), 0)
    book |= dict(sorted(agreed, key=lambda rule: -margin(*rule))[:room]) | fresh
    text = " ".join(f'"{word}" -> {label};' for word, label in list(book.items())[-self.capacity :])
    return f"<IMPROVED_VARIABLE>{text or EMPTY}</IMPROVED_VARIABLE>"

  def score(self, prompt: str, cases: Sequence[Case]) -> float:
    """Return the share of the cases that a prompt answers right, from 0 to 1."""
    return float(np.mean([self.answer(case.text, prompt) == case.action for case in cases]))


def words(text: str) -> list[str]:
  """Return the words of a text that may tell articles apart, in lower case."""
  return [word for word in re.findall(r"[^\W\d_]\w{3,}", text.lower()) if word not in _COMMON]


def rules(prompt: str) -> dict[str, str]:
  """Return the rules of a prompt, word to article, in their order."""
  return dict(_RULE.findall(prompt))

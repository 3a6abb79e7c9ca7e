"""The Latent Rulebook: a task whose prompt must hold the rules of its cases, which only a critic that errs knows.

Each case belongs to a hidden topic, and each topic has one right action. A case shows words of its topic and never
its name. The model answers right if the prompt has the topic's rule. The critic names the rule of a case that failed,
and is wrong with the probability `noise`. The optimizer writes the rule that most of the visible feedback names, in a
prompt of at most `capacity` rules. So more past feedback about the topic helps the optimizer to outvote a wrong
critique, and to restore a rule that was dropped for lack of room. All three are functions of the text of their prompt
alone, as real models are.

`RulebookPipeline` is the same task in two calls, whose prompts are learned together.
"""

import collections
import re
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ROLE, TOPIC_ROLE = "rulebook of the assistant", "rulebook of the assistant that names topics"
NOTES = "\n\nNotes: "  # between a case and the answer of an earlier call to it
CUT = " (...) "
FINE = "Nothing has to change here."
EMPTY = "No rules yet."
UNKNOWN = "I do not know"
_CRITIQUE = re.compile(r"Cases of (\w+) call for (\w+)\.")
PAST = re.compile(r'<PAST_FEEDBACK [^>]*count="(\d+)" outcome="(\w+)[^>]*>(.*?)</PAST_FEEDBACK>', re.DOTALL)
# weight of past feedback, by the outcome of the change that followed it
_WORTH = {"accepted": 1.0, "unknown": 1.0, "rejected": 0.25}
_RULE = re.compile(r"For (\w+): (\w+)\.")
_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]


class Case(NamedTuple):
  """One case: its text, and its topic and right action, which only the judge knows."""

  text: str
  topic: int
  action: str


class Rulebook:
  """Topics with their words, names and right actions, and the three scripted models over them."""

  def __init__(self, n_topics: int = 60, n_actions: int = 20, *, noise: float = 0.4, capacity: int = 12, seed: int = 0):
    """Draw topics.

    Args:
      n_topics: the number of topics.
      n_actions: the number of actions from which a topic's right action is drawn.
      noise: the probability that the critic names a wrong action.
      capacity: the most rules that the prompt may hold; with `n_topics` or more, no rule has to be dropped.
      seed: the seed of the words and of the critic.
    """
    rng = np.random.default_rng(seed)
    self.noise, self.capacity = noise, capacity
    words = iter(_invent(rng, n_topics * 13 + n_actions + 40))
    self.names = [next(words).capitalize() for _ in range(n_topics)]
    self._words = [[next(words) for _ in range(12)] for _ in range(n_topics)]
    self._actions = [next(words) for _ in range(n_actions)]
    self._common = [next(words) for _ in range(40)]
    self.actions = [self._actions[i] for i in rng.integers(n_actions, size=n_topics)]
    self._topic_of = {word: topic for topic, own in enumerate(self._words) for word in own}
    self._seed = seed

  def cases(self, rng: np.random.Generator, topics: Sequence[int], n: int) -> list[Case]:
    """Draw n cases of the given topics."""
    drawn = rng.choice(np.asarray(topics), n)
    return [self._case(rng, int(topic)) for topic in drawn]

  def _case(self, rng: np.random.Generator, topic: int) -> Case:
    words = [*rng.choice(self._words[topic], 6, replace=False), *rng.choice(self._common, 4)]
    rng.shuffle(words)
    return Case(" ".join(words), topic, self.actions[topic])

  def answer(self, content: str, system_prompt: str | None) -> str:
    """Be the model: follow the prompt's rule for the topic of the case."""
    return rules(system_prompt or "").get(self.names[self.topic_of(content)], UNKNOWN)

  def criticise(self, content: str, system_prompt: str | None) -> str:
    """Be the critic: name the action that the case called for, or, with the probability `noise`, another.

    The same prompt gets the same answer, whatever came before: runs can be resumed, and calls can run in parallel.
    """
    topic = self.topic_of(content)
    return f"Cases of {self.names[topic]} call for {self._said(content, self.actions[topic], self._actions)}."

  def _said(self, content: str, right: str, others: Sequence[str]) -> str:
    rng = np.random.default_rng([self._seed, zlib.crc32(content.encode())])
    is_wrong = rng.random() < self.noise
    return str(rng.choice([other for other in others if other != right])) if is_wrong else right

  def optimize(self, content: str, system_prompt: str | None) -> str:
    """Be the optimizer: rewrite the rules that fail now, as most of the feedback in the prompt says.

    Past feedback about other topics adds missing rules, as long as there is room; the other rules stay. When there is
    no room, the rule that was written the longest ago is dropped.
    """
    start, end = content.index("<VARIABLE>"), content.index("</VARIABLE>")
    book, rest = rules(content[start:end]), content[end:]
    if CUT in content[start:end]:  # the package textgrad shortens the prompt here, and shows it whole where it was used
      book = rules(re.findall(r"<LM_SYSTEM_PROMPT>(.*?)</LM_SYSTEM_PROMPT>", rest, re.DOTALL)[-1])
    votes: dict[str, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    for count, outcome, text in PAST.findall(rest):
      for name, action in _CRITIQUE.findall(text):
        votes[name][action] += int(count) * _WORTH[outcome]
    found = _CRITIQUE.findall(PAST.sub("", rest))
    now = dict.fromkeys(name for name, _ in found)
    for name, action in found:
      votes[name][action] += 1.0
    missing = [name for name in votes if name not in now and name not in book]
    for name in now:
      failed = book.pop(name, None)
      if len(votes[name]) > 1:
        votes[name].pop(failed or "", None)  # the old rule has just failed, whatever feedback supports it
    room = max(self.capacity - len(book) - len(now), 0)
    for name in [*missing[:room], *now]:
      book[name] = max(votes[name], key=votes[name].__getitem__)
    kept = list(book.items())[-self.capacity :]
    text = " ".join(f"For {name}: {action}." for name, action in kept)
    return f"<IMPROVED_VARIABLE>{text or EMPTY}</IMPROVED_VARIABLE>"

  def topic_of(self, text: str) -> int:
    """Return the topic that most words of a text belong to."""
    topics = collections.Counter(self._topic_of[word] for word in re.findall(r"\w+", text) if word in self._topic_of)
    if not topics:
      raise ValueError(f"no word of a topic in {text[:80]!r}")
    return topics.most_common(1)[0][0]

  def score(self, prompt: str, cases: Sequence[Case]) -> float:
    """Return the share of the cases that a prompt answers right, from 0 to 1."""
    book = rules(prompt)
    return float(np.mean([book.get(self.names[case.topic]) == case.action for case in cases]))


class RulebookPipeline(Rulebook):
  """The rulebook in two calls: the first prompt's rules map words to topics, the second's map topics to actions."""

  def answer(self, content: str, system_prompt: str | None) -> str:
    """Be the model of either call: follow the first rule for a word of the notes, or without notes of the case."""
    case, _, notes = content.partition(NOTES)
    book = rules(system_prompt or "")
    return next((book[word] for word in (notes or case).split() if word in book), UNKNOWN)

  def criticise(self, content: str, system_prompt: str | None) -> str:
    """Be the critic: name the rule that the call lacked; a call that was right or had wrong notes gets no critique."""
    role = re.findall(r"<ROLE> (.*?) </ROLE>", content)[0]
    (case, answer), *_ = re.findall(
      r"<LM_INPUT> (.*?) </LM_INPUT>\s+<LM_OUTPUT> (.*?) </LM_OUTPUT>", content, re.DOTALL
    ) or [(content, "")]
    name = self.names[topic := self.topic_of(case)]  # of the case only: the prompt has words of many topics
    _, _, notes = case.partition(NOTES)
    if role == TOPIC_ROLE and answer != name:
      word = next(word for word in case.split() if self._topic_of.get(word) == topic)
      return f"Cases of {word} call for {self._said(content, name, self.names)}."
    if role == ROLE and notes == name:
      return f"Cases of {name} call for {self._said(content, self.actions[topic], self._actions)}."
    return FINE if role in (TOPIC_ROLE, ROLE) else f"It is about {name}."


def rules(prompt: str) -> dict[str, str]:
  """Return the rules of a prompt, topic's name to action, in their order."""
  return dict(_RULE.findall(prompt))


def _invent(rng: np.random.Generator, n: int) -> list[str]:
  """Return n different words."""
  words: dict[str, None] = {}
  while len(words) < n:
    words["".join(rng.choice(_SYLLABLES, 3))] = None
  return list(words)

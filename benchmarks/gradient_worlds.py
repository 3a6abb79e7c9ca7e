"""The scenarios of the benchmark gradient_rag.py, and the stores that it compares with `GradientStore`'s search."""

import abc
import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

import selfrag_jax.textgrad as tg
from selfrag_jax.tasks.prompt_tasks import is_same_answer, make_task
from selfrag_jax.tasks.router import ROUTER_ROLE, Question, Router, read_questions, split_by_passage
from selfrag_jax.tasks.rulebook import EMPTY, ROLE, Case, Rulebook
from selfrag_jax.textgrad.engine import at_once
from selfrag_jax.textgrad.gradient_store import GradientStore, PastCritique

DATA = flags.DEFINE_string("data", None, "Folder of questions about articles, in the layout of BEIR, for `router`.")
ENDPOINT = flags.DEFINE_string("endpoint", None, "Address of a server that speaks OpenAI's protocol: real models.")
MODEL = flags.DEFINE_string("model", "gpt-4o-mini", "Its model.")
FILES = flags.DEFINE_list("files", [], "Files of BIG-Bench-Hard, for --endpoint.")
STEPS = flags.DEFINE_integer("steps", 20, "Steps on each file, for --endpoint.")
CASES = flags.DEFINE_integer("test_cases", 40, "Cases that score each prompt, for --endpoint.")
ANSWER = flags.DEFINE_integer("max_tokens", 1000, "Of each answer, for --endpoint.")
CONTEXT, ANSWERED = 8192, 500  # tokens of an engine's context, and of the longest answer of a scripted engine
BATCH, TEST = 3, 40  # cases per step, cases that score each prompt
OLD, OTHERS, ALL = range(12), range(12, 60), range(60)
SAMPLES, TRAINED = 250, 150  # cases of a file, and the part that the steps show
ROUTED = 120  # steps of the router
NAMED = {"null": "capacity=60:noise=0", "weak": "noise=0.7", "steady": "capacity=24"}


class World(abc.ABC):
  """The base class of the scenarios: the topics of each step, the steps that count, and the scoring of cases."""

  role, initial = "", EMPTY
  topics: Sequence[Sequence[int]]
  counted: slice
  account: tg.Account
  model: tg.EngineLM
  critic: tg.EngineLM
  optimizer: tg.EngineLM

  @abc.abstractmethod
  def topic_of(self, text: str) -> int:
    """Return the topic of a case, which only the oracle arms use."""

  @abc.abstractmethod
  def draw(self, rng: np.random.Generator, topics: Sequence[int]) -> tuple[list[Case], list[Case]]:
    """Draw the cases of a step, and the cases that score its prompt."""

  @abc.abstractmethod
  def score(self, prompt: str, cases: Sequence[Case]) -> float:
    """Return the share of the cases that a prompt answers right, outside the account."""

  def is_right(self, answer: str, case: Case) -> bool:
    """Tell whether an answer is right."""
    return answer == case.action

  def verdict(self, case: Case, answer: str) -> str:
    """Return the text that the critic gets about a wrong answer."""
    return f"{case.text}\nThe right answer is {case.action}, this was {answer!r}."

  def validation(self, rng: np.random.Generator) -> list[Case]:
    """Draw validation cases of all topics from the source of the steps' cases; no prompt is scored on that source."""
    topics = sorted({topic for step in self.topics for topic in step})
    return [case for _ in range(0, TEST, BATCH) for case in self.draw(rng, topics)[0]][:TEST]

  def _engines(self, models: Rulebook | Router, context: int) -> None:
    self.account = tg.Account()
    limits = {"account": self.account, "concurrency": 1, "max_tokens": ANSWERED, "context_tokens": context}
    self.model = tg.CallableEngine(models.answer, **limits)
    self.critic = tg.CallableEngine(models.criticise, **limits)
    self.optimizer = tg.CallableEngine(models.optimize, **limits)


class RulebookWorld(World):
  """The Latent Rulebook; each case is new."""

  role = ROLE

  def __init__(self, name: str, seed: int):
    """Make the book and the engines of a scenario."""
    settings, self.topics, self.counted = scenario(name)
    self._book = Rulebook(seed=seed, **settings)
    self._engines(self._book, 4096 if name == "long" else CONTEXT)

  def topic_of(self, text: str) -> int:
    return self._book.topic_of(text)

  def score(self, prompt: str, cases: Sequence[Case]) -> float:
    return self._book.score(prompt, cases)

  def draw(self, rng: np.random.Generator, topics: Sequence[int]) -> tuple[list[Case], list[Case]]:
    return self._book.cases(rng, topics, BATCH), self._book.cases(rng, topics, TEST)

  def verdict(self, case: Case, answer: str) -> str:
    return f"{case.text}: not right"  # the scripted critic knows the right answer, or errs


class RouterWorld(World):
  """Questions about articles, each article a topic; no step shows a passage that scores prompts."""

  role = ROUTER_ROLE

  def __init__(self, name: str, seed: int):
    """Read the questions, and split their passages by the seed."""
    if not DATA.value:
      raise ValueError("the scenario `router` needs --data=FOLDER: questions about articles, in the layout of BEIR")
    questions, self._router = _questions(DATA.value), Router(_numbers(name.partition(":")[2]).get("capacity", 64))
    labels = sorted({question.label for question in questions})
    deal = lambda part: [[Case(q.text, i, q.label) for q in part if q.label == label] for i, label in enumerate(labels)]
    self._shown, self._held_out = map(deal, split_by_passage(questions, seed))
    self._topic_of = {question.text: labels.index(question.label) for question in questions}
    self.topics, self.counted = [range(len(labels))] * ROUTED, slice(ROUTED // 2, ROUTED)
    self._engines(self._router, CONTEXT)

  def draw(self, rng: np.random.Generator, topics: Sequence[int]) -> tuple[list[Case], list[Case]]:
    return _one_by_one(rng, self._shown, topics, BATCH), _one_by_one(rng, self._held_out, topics, TEST)

  def topic_of(self, text: str) -> int:
    return self._topic_of[text]

  def score(self, prompt: str, cases: Sequence[Case]) -> float:
    return self._router.score(prompt, cases)


class RealWorld(World):
  """Files of BIG-Bench-Hard, each a topic, and a model behind an endpoint in all three roles."""

  def __init__(self, name: str, seed: int):
    """Read the files."""
    if not FILES.value:
      raise ValueError("--endpoint needs --files=FILE,FILE: tasks of BIG-Bench-Hard")
    sections = [{"name": "bbh", "path": path, "calls": 1, "sizes": {"all": SAMPLES}} for path in FILES.value]
    tasks = [make_task(section, seed) for section in sections]
    self.role, self.initial = tasks[0].texts[0].role, tasks[0].texts[0].initial
    self._samples = [[Case(s.text, topic, s.target) for s in task.parts["all"]] for topic, task in enumerate(tasks)]
    self._topic_of = {case.text: case.topic for cases in self._samples for case in cases}
    order = [*range(len(tasks)), 0] if len(tasks) > 1 else [0, 0]
    self.topics = [[topic] for topic in order for _ in range(STEPS.value)]
    self.counted = slice(len(self.topics) - STEPS.value, len(self.topics))
    self.account = tg.Account()
    limits = {"context_tokens": CONTEXT, "max_tokens": ANSWER.value, "concurrency": 4}
    self.model = self.critic = self.optimizer = tg.OpenAIEngine(
      MODEL.value, ENDPOINT.value, account=self.account, **limits
    )
    self._scorer = tg.OpenAIEngine(MODEL.value, ENDPOINT.value, **limits)

  def draw(self, rng: np.random.Generator, topics: Sequence[int]) -> tuple[list[Case], list[Case]]:
    shown, held_out = zip(*[(cases[:TRAINED], cases[TRAINED:]) for cases in self._samples], strict=True)
    return _one_by_one(rng, shown, topics, BATCH), _one_by_one(rng, held_out, topics, CASES.value)

  def topic_of(self, text: str) -> int:
    return self._topic_of[text]

  def score(self, prompt: str, cases: Sequence[Case]) -> float:
    calls = [functools.partial(self._scorer, case.text, system_prompt=prompt) for case in cases]
    answers = at_once(calls, self._scorer.concurrency)
    return float(np.mean([self.is_right(answer, case) for answer, case in zip(answers, cases, strict=True)]))

  def is_right(self, answer: str, case: Case) -> bool:
    return is_same_answer(answer, case.action)


def make_world(name: str, seed: int) -> World:
  """Make the world of a scenario."""
  if name == "endpoint":
    return RealWorld(name, seed)
  return RouterWorld(name, seed) if name.partition(":")[0] == "router" else RulebookWorld(name, seed)


def scenario(name: str) -> tuple[dict[str, Any], Sequence[Sequence[int]], slice]:
  """Return the settings of the rulebook, the topics of each step, and the steps that count. Raises ValueError."""
  if name == "return":
    return {"capacity": 24}, [OLD] * 60 + [OTHERS] * 80 + [OLD] * 8, slice(140, 148)
  if name == "long":
    return {"capacity": 24}, [ALL] * 400, slice(300, 400)
  return {"capacity": 24, **_numbers(NAMED.get(name, name))}, [ALL] * 120, slice(60, 120)


def _numbers(settings: str) -> dict[str, Any]:
  """Return `capacity=N:noise=P` as arguments. Raises ValueError for anything else."""
  found = {}
  for part in filter(None, settings.split(":")):
    if re.fullmatch(r"capacity=[1-9]\d{0,3}", part):
      found["capacity"] = int(part.partition("=")[2])
    elif re.fullmatch(r"noise=(0|1|0?\.\d+)", part):
      found["noise"] = float(part.partition("=")[2])
    else:
      known = f"return, long, router, {', '.join(NAMED)}, and capacity=N:noise=P with P from 0 to 1"
      raise ValueError(f"--scenarios: {part!r}? They are {known}")
  return found


def _one_by_one(rng: np.random.Generator, cases: Sequence[Sequence[Case]], topics: Sequence[int], n: int) -> list[Case]:
  """Draw n cases, each from a random topic."""
  drawn = [cases[int(topic)] for topic in rng.choice(np.asarray(topics), n)]
  return [of[int(rng.integers(len(of)))] for of in drawn]


@functools.cache
def _questions(folder: str) -> list[Question]:
  return read_questions(folder)


class RandomReplay(GradientStore):
  """A store that returns random records."""

  def __init__(self, seed: int):
    super().__init__(dedupe_threshold=None)
    self._rng = np.random.default_rng([seed, 3])

  def search(self, rows: np.ndarray, k: int, **_: Any) -> list[list[PastCritique]]:
    """Return k random records for each row."""
    ids = self._memory.ids
    drawn = [self._rng.permutation(len(ids))[:k] for _ in rows]
    return [[self._past(self._memory.get(ids[i]), 1.0) for i in order] for order in drawn]


class KnowsTopics(GradientStore):
  """A store that knows the topic of each record and of each query."""

  def __init__(self, world: World):
    super().__init__(dedupe_threshold=None)
    self._world, self._ids, self.topics = world, {}, []

  def add(self, critiques: Sequence[tg.Critique], rows: np.ndarray | None = None) -> list[str]:
    """Add critiques and note their topics."""
    ids = super().add(critiques, rows)
    for id, critique in zip(ids, critiques, strict=True):
      self._ids.setdefault(self._world.topic_of(critique.sample), []).append(id)
    return ids


class Oracle(KnowsTopics):
  """A store that returns the newest records of the cases' own topics."""

  def search(self, rows: np.ndarray, k: int, **_: Any) -> list[list[PastCritique]]:
    """Return the last k records of the topic of each row."""
    return [[self._past(self._memory.get(id), 1.0) for id in self._ids.get(t, [])[: -k - 1 : -1]] for t in self.topics]


class OtherTopics(KnowsTopics):
  """A store that returns the most similar records of other topics than the cases' own."""

  def search(self, rows: np.ndarray, k: int, **options: Any) -> list[list[PastCritique]]:
    """Return, for each row, the k most similar records of other topics."""
    found = super().search(rows, 4 * k, **options)
    own = [set(self._ids.get(topic, [])) for topic in self.topics]
    return [[c for c in past if c.id not in ids][:k] for past, ids in zip(found, own, strict=True)]

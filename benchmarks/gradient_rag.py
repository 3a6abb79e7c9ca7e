"""Gradient-RAG beside other ways to remember critiques: what is each worth at one budget of tokens?

  python benchmarks/gradient_rag.py [--seeds=20] [--jobs=2] [--scenarios=return,steady,null,noise=0.1]
  python benchmarks/gradient_rag.py --endpoint=http://localhost:11434/v1 --model=qwen3 --seeds=3 \\
    --files=object_counting.json,date_understanding.json --steps=20

Arms: `none` (the critiques of this step), `accumulate` (all critiques, until the context is full: its run ends
there), `window` (the last), `random` (random ones of all), `retrieval`, and `oracle` (it knows the topics). Those that
show the past do so within the same number of tokens. Where the package textgrad is installed (pip install
textgrad==0.1.8), it runs as it is, as `textgrad`, which forgets the critiques of the step before, and as
`textgrad_all`, which keeps them.

Scenarios, on the Latent Rulebook with scripted models: `return` (12 topics, then 48 others, then the 12 again: the
first steps of the return), `steady` (60 topics, second half), `null` (a critic that never errs and room for all rules:
memory cannot help and must not hurt), `noise=P` (the same with a critic that is wrong with probability P), `weak` (a
critic that is wrong more often than right), `capacity=N` (steady with room for N of the 60 rules: how much a prompt
must forget), and `long` (1,200 samples against engines of 4,096 tokens; the last quarter counts). With --endpoint, the
one scenario is `endpoint`: the same arms with a real model as model, critic and optimizer, on files of BIG-Bench-Hard,
each a topic: the cases of --steps steps are of the first file, then of each other one, then of the first again; the
last steps count. Prompts are scored on cases that none of these steps shows, and that is booked apart.

Prints the mean score over the seeds, each arm's paired difference to retrieval with its bootstrap interval, by how much
prompt tokens of all calls exceed those of `none` (an arm that leaves fewer wrong answers to criticise saves some), the
tokens of the largest prompt, and the milliseconds that remembering takes a step. Writes the figures as JSON with
--output. The defaults take about ten minutes on two cores.
"""

import concurrent.futures
import contextlib
import functools
import importlib.util
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import selfrag_jax.textgrad as tg
from selfrag_jax.metrics.statistics import bootstrap_difference
from selfrag_jax.tasks.prompt_tasks import is_same_answer, make_task
from selfrag_jax.tasks.rulebook import EMPTY, ROLE, Case, Rulebook
from selfrag_jax.textgrad.engine import at_once
from selfrag_jax.textgrad.gradient_store import GradientStore, PastCritique

SEEDS = flags.DEFINE_integer("seeds", 20, "Seeds, from 1000 on: none was used while anything was chosen.")
JOBS = flags.DEFINE_integer("jobs", 2, "Processes.")
SCENARIOS = flags.DEFINE_list(
  "scenarios",
  ["return", "steady", "null", "noise=0.1", "weak", "capacity=12", "capacity=36", "capacity=60", "long"],
  "Which of them.",
)
CHOSEN = flags.DEFINE_list("arms", [], "Which arms, none and retrieval among them (default: all).")
ENDPOINT = flags.DEFINE_string("endpoint", None, "Address of a server that speaks OpenAI's protocol: real models.")
MODEL = flags.DEFINE_string("model", "gpt-4o-mini", "Its model.")
FILES = flags.DEFINE_list("files", [], "Files of BIG-Bench-Hard, for --endpoint.")
STEPS = flags.DEFINE_integer("steps", 20, "Steps on each file, for --endpoint.")
CASES = flags.DEFINE_integer("test_cases", 40, "Cases that score each prompt, for --endpoint.")
ANSWER = flags.DEFINE_integer("max_tokens", 1000, "Of each answer, for --endpoint.")
OUTPUT = flags.DEFINE_string("output", None, "File for the figures as JSON.")
ARMS = ("none", "accumulate", "window", "random", "retrieval", "oracle")
PEER = ("textgrad", "textgrad_all")
CONTEXT, ANSWERED = 8192, 500  # tokens of the engines, and of an answer of a scripted one at most
BATCH, TEST, PAST = 3, 40, 400  # cases a step, cases that score each prompt, tokens of the past in a prompt
OLD, OTHERS = range(12), range(12, 60)
SAMPLES, TRAINED = 250, 150  # of a file, and those of them that the steps show


class RandomReplay(GradientStore):
  """Finds records at random."""

  def __init__(self, seed: int):
    super().__init__(dedupe_threshold=None)
    self._rng = np.random.default_rng([seed, 3])

  def search(self, rows: np.ndarray, k: int, **_: Any) -> list[list[PastCritique]]:
    """Return k random records for each row."""
    ids = self._memory.ids
    drawn = [self._rng.permutation(len(ids))[:k] for _ in rows]
    return [[self._past(self._memory.get(ids[i]), 1.0) for i in order] for order in drawn]


class Oracle(GradientStore):
  """Finds the newest records of the cases' own topics."""

  def __init__(self, world: "World"):
    super().__init__(dedupe_threshold=None)
    self._world, self._ids, self.topics = world, {}, []

  def add(self, critiques: list[tg.Critique], rows: np.ndarray | None = None) -> list[str]:
    """Note the topics."""
    ids = super().add(critiques, rows)
    for id, critique in zip(ids, critiques, strict=True):
      self._ids.setdefault(self._world.topic_of(critique.sample), []).append(id)
    return ids

  def search(self, rows: np.ndarray, k: int, **_: Any) -> list[list[PastCritique]]:
    """Return the last k records of the topic of each row."""
    return [[self._past(self._memory.get(id), 1.0) for id in self._ids.get(t, [])[: -k - 1 : -1]] for t in self.topics]


class World:
  """The Latent Rulebook of a scenario: what is asked, and the scripted models."""

  role, initial = ROLE, EMPTY

  def __init__(self, name: str, seed: int):
    """Make the book and the engines, and say which topics each step has and which steps count."""
    settings, self.topics, self.counted = scenario(name)
    self._book = Rulebook(seed=seed, **settings)
    self.account = tg.Account()
    limits = {"account": self.account, "concurrency": 1, "max_tokens": ANSWERED}
    limits["context_tokens"] = 4096 if name == "long" else CONTEXT
    self.model = tg.CallableEngine(self._book.answer, **limits)
    self.critic = tg.CallableEngine(self._book.criticise, **limits)
    self.optimizer = tg.CallableEngine(self._book.optimize, **limits)
    self.topic_of, self.score = self._book.topic_of, self._book.score

  def draw(self, rng: np.random.Generator, topics: Sequence[int]) -> tuple[list[Case], list[Case]]:
    """Draw the cases of a step, and those that score its prompt; each is new."""
    return self._book.cases(rng, topics, BATCH), self._book.cases(rng, topics, TEST)

  def is_right(self, answer: str, case: Case) -> bool:
    """Tell whether an answer is right."""
    return answer == case.action


class RealWorld:
  """Files of BIG-Bench-Hard, each a topic, and a model behind an endpoint in all three parts."""

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
    """Draw the cases of a step, and those that score its prompt, of the rest of the file."""
    one = lambda cases: cases[int(rng.integers(len(cases)))]
    step = [one(self._samples[int(t)][:TRAINED]) for t in rng.choice(np.asarray(topics), BATCH)]
    return step, [one(self._samples[int(t)][TRAINED:]) for t in rng.choice(np.asarray(topics), CASES.value)]

  def topic_of(self, text: str) -> int:
    """Return the file that a case came from."""
    return self._topic_of[text]

  def score(self, prompt: str, cases: Sequence[Case]) -> float:
    """Ask the model."""
    calls = [functools.partial(self._scorer, case.text, system_prompt=prompt) for case in cases]
    answers = at_once(calls, self._scorer.concurrency)
    return float(np.mean([self.is_right(answer, case) for answer, case in zip(answers, cases, strict=True)]))

  def is_right(self, answer: str, case: Case) -> bool:
    """Tell whether an answer is right."""
    return is_same_answer(answer, case.action)


def scenario(name: str) -> tuple[dict[str, Any], list[range], slice]:
  """Return the settings of the rulebook, the topics of each step, and the steps that count."""
  everything = range(60)
  if name == "return":
    return {"capacity": 24}, [OLD] * 60 + [OTHERS] * 80 + [OLD] * 8, slice(140, 148)
  if name == "null" or name.startswith("noise="):
    noise = float(name.partition("=")[2] or 0)
    return {"capacity": 60, "noise": noise}, [everything] * 120, slice(60, 120)
  if name == "long":
    return {"capacity": 24}, [everything] * 400, slice(300, 400)
  if name == "weak":
    return {"capacity": 24, "noise": 0.7}, [everything] * 120, slice(60, 120)
  capacity = int(name.removeprefix("capacity=")) if name.startswith("capacity=") else 24
  return {"capacity": capacity}, [everything] * 120, slice(60, 120)


@contextlib.contextmanager
def logs_of_peer() -> Iterator[None]:
  """Let textgrad, which makes a folder when it is imported, make it where it goes again; or where its user wants it."""
  with tempfile.TemporaryDirectory() as folder:
    os.environ.setdefault("TEXTGRAD_LOG_DIR", folder)
    yield


def peer() -> Any:
  """Return the package textgrad and what makes one of its engines of ours."""
  os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
  import textgrad
  from textgrad.autograd import StringBasedFunction
  from textgrad.engine import EngineLM

  textgrad.StringBasedFunction = StringBasedFunction
  logging.getLogger("textgrad").propagate = False  # it has its own file

  class Engine(EngineLM):
    def __init__(self, engine: tg.EngineLM):
      self.model_string, self._engine = engine.model_string, engine

    def generate(self, prompt, system_prompt=None, **_):
      return self._engine(prompt, system_prompt)

    __call__ = generate

  return textgrad, Engine


def remembering(arm: str, world: World | RealWorld, seed: int) -> dict[str, Any]:
  """Return the optimizer's arguments for a way to remember; none for those that show all critiques."""
  if arm in ("accumulate", *PEER):
    return {}
  kinds = {"random": lambda: RandomReplay(seed), "oracle": lambda: Oracle(world)}
  k = 12 if arm in kinds or arm == "retrieval" else 0
  window = 12 if arm == "window" else 0
  return {
    "use_gradient_rag": True,
    "gradient_store": kinds.get(arm, lambda: GradientStore(dedupe_threshold=None))(),
    "rag": tg.RagConfig(tokens=4000, past_tokens=PAST, k=k, window=window, merge="concatenate"),
  }


def run(job: tuple[str, str, int]) -> dict[str, Any]:
  """Optimize one prompt from nothing; return its score, tokens, time, and the step that did not fit the context."""
  name, arm, seed = job
  for library in ("httpx", "openai"):  # they report every call
    logging.getLogger(library).setLevel(logging.WARNING)
  world = RealWorld(name, seed) if name == "endpoint" else World(name, seed)
  rng = np.random.default_rng([seed, 2])
  lib, engine = peer() if arm in PEER else (tg, lambda engine: engine)
  options = remembering(arm, world, seed)
  store = options.get("gradient_store")
  prompt = lib.Variable(world.initial, role_description=world.role)
  model, critic = lib.BlackboxLLM(engine(world.model), prompt), engine(world.critic)
  optimizer = lib.TextualGradientDescent([prompt], engine=engine(world.optimizer), **options)
  scores, full_at, steps = [], None, 0
  is_counted = set(range(len(world.topics))[world.counted])
  for step, of in enumerate(world.topics):
    cases, test = world.draw(rng, of)
    losses, failed = [], []
    for case in cases:
      answer = model(lib.Variable(case.text, requires_grad=False, role_description="case"))
      if not world.is_right(answer.value, case):
        text = f"{case.text}: not right" + (f", it is {case.action}" if name == "endpoint" else "")
        judge = lib.StringBasedFunction(lambda answer, text=text: text, "tells whether it is right")
        losses.append(judge({"answer": answer}))
        failed.append(case.topic)
    if losses and full_at is None:
      if arm not in ("accumulate", "textgrad_all"):
        optimizer.zero_grad()
      try:
        lib.sum(losses).backward(critic)
        if isinstance(store, Oracle):
          store.topics = failed
        optimizer.step()
        steps += 1
      except tg.ContextBudgetError:
        full_at = step
      except (tg.ReplyError, IndexError):  # an answer without a new version: the prompt stays
        steps += 1
    if step in is_counted:
      scores.append(world.score(prompt.value, test))
  return {
    "score": float(np.mean(scores)),
    "tokens": world.account.prompt_tokens,
    "largest_prompt": world.account.largest_prompt,
    "milliseconds": None if arm in PEER else 1000 * optimizer.overhead_seconds / max(steps, 1),
    "full_at": full_at,
  }


def main(_: list[str]) -> None:
  """Run every arm of every scenario with the same seeds and compare."""
  began, report = time.time(), {}
  seeds = range(1000, 1000 + SEEDS.value)
  arms = CHOSEN.value or [*ARMS, *(PEER if importlib.util.find_spec("textgrad") else ())]
  if unknown := set(arms) - {*ARMS, *PEER} or {"retrieval", "none"} - set(arms):
    raise app.UsageError(
      f"--arms={','.join(arms)}: {', '.join(unknown)}? They are {', '.join((*ARMS, *PEER))}, "
      "and none and retrieval, which the others are compared with, must be among them"
    )
  with logs_of_peer(), concurrent.futures.ProcessPoolExecutor(JOBS.value) as pool:
    for name in ["endpoint"] if ENDPOINT.value else SCENARIOS.value:
      jobs = [(name, arm, seed) for arm in arms for seed in seeds]
      done = tqdm(pool.map(run, jobs), name, len(jobs), leave=False, unit="run")
      found = dict(zip(jobs, done, strict=True))
      of = {arm: [found[name, arm, seed] for seed in seeds] for arm in arms}
      report[name] = compare(of)
      print(f"\n{name}: {len(seeds)} seeds, {time.time() - began:.0f} s so far\n{table(report[name])}", flush=True)
  if OUTPUT.value:
    facts = {"seeds": [*seeds], "batch": BATCH, "test": TEST, "past_tokens": PAST, "cores": os.cpu_count()}
    Path(OUTPUT.value).write_text(json.dumps({**facts, "scenarios": report}, indent=1) + "\n")


def compare(of: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
  """Return for each arm the mean score, retrieval's paired difference to it, added tokens and time."""
  report = {}
  retrieval = np.array([run["score"] for run in of["retrieval"]])
  plain = np.array([run["tokens"] for run in of["none"]])
  for arm, runs in of.items():
    if full := [run["full_at"] for run in runs if run["full_at"] is not None]:
      report[arm] = {"runs_ended": len(full), "context_full_at_step": float(np.mean(full))}
      continue
    score = np.array([run["score"] for run in runs])
    report[arm] = {
      "score": float(score.mean()),
      "added_tokens": float(np.mean([run["tokens"] for run in runs] / plain - 1)),
      "largest_prompt": max(run["largest_prompt"] for run in runs),
    }
    if runs[0]["milliseconds"] is not None:
      report[arm]["milliseconds_a_step"] = float(np.mean([run["milliseconds"] for run in runs]))
    if arm != "retrieval":
      report[arm]["retrieval_minus_this"] = float((retrieval - score).mean())
      report[arm]["interval"] = list(bootstrap_difference(retrieval, score))
  return report


def table(rows: dict[str, dict[str, Any]]) -> str:
  """Format a scenario for a terminal."""
  lines = [f"{'':12}{'score':>8}{'retrieval - this':>28}{'added tokens':>14}{'largest':>9}{'ms a step':>11}"]
  for arm, row in rows.items():
    if "score" not in row:
      step = row["context_full_at_step"]
      lines.append(f"{arm:12}   ended: the context was full, {row['runs_ended']} runs, at step {step:.0f} on average")
      continue
    low, high = row.get("interval", (0.0, 0.0))
    difference = f"{row['retrieval_minus_this']:+.3f} [{low:+.3f}, {high:+.3f}]" if "interval" in row else ""
    numbers = f"{row['added_tokens']:14.1%}{row['largest_prompt']:9,}"
    numbers += f"{row['milliseconds_a_step']:11.2f}" if "milliseconds_a_step" in row else ""
    lines.append(f"{arm:12}{row['score']:8.3f}{difference:>28}{numbers}")
  return "\n".join(lines)


if __name__ == "__main__":
  app.run(main)

"""Gradient-RAG beside other ways to remember critiques, at the same budget of tokens.

  python benchmarks/gradient_rag.py [--data=FOLDER] [--seeds=20] [--jobs=2] [--scenarios=return,steady,noise=0,router]
  python benchmarks/gradient_rag.py --endpoint=http://localhost:11434/v1 --model=qwen3 --seeds=3 \\
    --files=object_counting.json,date_understanding.json --steps=20

Arms show the optimizer different critiques: `none` (those of this step alone), `keep_best` (the same, but a new prompt
is kept only if it answers as many of 40 validation cases right, which no other arm has; their cost is part of its calls
and tokens), `accumulate` (all critiques, until the context is full and the run ends), `window` (the last critiques),
`random` (random past critiques), `retrieval` (by the default key, sample and critique together), `retrieval_sample` and
`retrieval_critique` (by one of the two alone), `oracle` (the last critiques of the same topic) and `other_topics` (the
most similar critiques of other topics). All arms that show past critiques have the same number of tokens for them.
Where the package textgrad is installed (pip install textgrad==0.1.8), it runs unchanged as `textgrad`, which forgets
the critiques of earlier steps, and as `textgrad_all`, which keeps them.

Scenarios on the Latent Rulebook with scripted models: `steady` (60 topics, room for 24 rules, 40 % wrong critiques; the
second half of 120 steps counts), `capacity=N:noise=P` (`steady` with another room or share of wrong critiques), `weak`
(noise=0.7), `noise=0` (no wrong critiques, room for 24), `null` (no wrong critiques and room for all rules: memory
cannot help and must not hurt), `return` (12 topics, then 48 others, then the 12 again; the first steps of the return
count), and `long` (1,200 samples against engines of 4,096 tokens; the last quarter counts). On real questions, with
--data (SQuAD's, in the layout of BEIR): `router` and `router:capacity=N`; the docstring of selfrag_jax/tasks/router.py
says what would make a gain there an artefact, and which arms show it. For `router`, the criterion was fixed before the
first run: retrieval helps only if the lower bound of its difference to `random` is above 0. The result is printed.
With --endpoint, the one scenario is `endpoint`: the same arms with a real model as model, critic and optimizer, on
files of BIG-Bench-Hard, each file a topic: --steps steps on the first file, then on each other one, then on the first
again; the last --steps steps count. Prompts are scored on cases that no step shows, outside the account.

Prints the mean score over the seeds, each arm's paired difference to retrieval and to random with its bootstrap
interval, the prompt tokens and calls beyond those of `none` (an arm that leaves fewer wrong answers to criticise saves
some), the tokens of the largest prompt, and the milliseconds per step that the memory takes. Writes the figures as JSON
with --output, after each scenario. All choices were made on the seeds 0 to 4.
"""

import concurrent.futures
import contextlib
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
from benchmarks.gradient_worlds import (
  BATCH,
  DATA,
  ENDPOINT,
  TEST,
  KnowsTopics,
  Oracle,
  OtherTopics,
  RandomReplay,
  World,
  make_world,
)
from selfrag_jax.metrics.statistics import bootstrap_difference
from selfrag_jax.tasks.rulebook import Case
from selfrag_jax.textgrad.gradient_store import GradientStore

FLAGS = flags.FLAGS
SEEDS = flags.DEFINE_integer("seeds", 20, "Seeds.")
FIRST = flags.DEFINE_integer(
  "first_seed", 3000, "The first: none of the default ones was used while anything was chosen."
)
JOBS = flags.DEFINE_integer("jobs", 2, "Processes.")
SCENARIOS = flags.DEFINE_list(
  "scenarios",
  [
    *("return", "steady", "noise=0", "weak", "capacity=12", "capacity=36", "capacity=60", "capacity=60:noise=0.1"),
    *("null", "long", "router", "router:capacity=128"),
  ],
  "Which of them; the default leaves router out where there is no --data.",
)
CHOSEN = flags.DEFINE_list("arms", [], "Which arms, none and retrieval among them (default: all).")
OUTPUT = flags.DEFINE_string("output", None, "File for the figures as JSON.")
WEIGHTS = {"retrieval": None, "retrieval_critique": 0.0, "retrieval_sample": 1.0}  # of the sample; None: the default
ARMS = ("none", "keep_best", "accumulate", "window", "random", *WEIGHTS, "oracle", "other_topics")
PEER = ("textgrad", "textgrad_all")
PAST = 400  # tokens of past critiques in a prompt


@contextlib.contextmanager
def logs_of_peer() -> Iterator[None]:
  """Let textgrad, which makes a folder for logs at its import, make a temporary one, unless the user has set one."""
  with tempfile.TemporaryDirectory() as folder:
    os.environ.setdefault("TEXTGRAD_LOG_DIR", folder)
    yield


def peer() -> Any:
  """Return the package textgrad, and the class that wraps our engine as one of its engines."""
  os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else LiteLLM asks the network for prices
  import textgrad
  from textgrad.autograd import StringBasedFunction
  from textgrad.engine import EngineLM

  textgrad.StringBasedFunction = StringBasedFunction
  logging.getLogger("textgrad").propagate = False  # textgrad writes its own file

  class Engine(EngineLM):
    def __init__(self, engine: tg.EngineLM):
      self.model_string, self._engine = engine.model_string, engine

    def generate(self, prompt, system_prompt=None, **_):
      return self._engine(prompt, system_prompt)

    __call__ = generate

  return textgrad, Engine


def options_of(arm: str, world: World, prompt: tg.Variable, seed: int) -> dict[str, Any]:
  """Return the optimizer's arguments for an arm; there are none for the arms that show all critiques."""
  if arm in ("accumulate", *PEER):
    return {}
  if arm == "keep_best":
    cases = world.validation(np.random.default_rng([seed, 5]))
    return {"accept": tg.HeldOut(lambda: mean_right(world, prompt.value, cases))}
  own = {
    "random": lambda: RandomReplay(seed),
    "oracle": lambda: Oracle(world),
    "other_topics": lambda: OtherTopics(world),
  }
  weight = WEIGHTS.get(arm)
  default = lambda: GradientStore(dedupe_threshold=None, **({} if weight is None else {"sample_weight": weight}))
  k = 12 if arm in own or arm in WEIGHTS else 0
  window = 12 if arm == "window" else 0
  return {
    "use_gradient_rag": True,
    "gradient_store": own.get(arm, default)(),
    "rag": tg.RagConfig(tokens=4000, past_tokens=PAST, k=k, window=window, merge="concatenate"),
  }


def mean_right(world: World, prompt: str, cases: Sequence[Case]) -> float:
  """Return the share of the cases that the model answers right; its calls are booked like all others."""
  return float(np.mean([world.is_right(world.model(case.text, system_prompt=prompt), case) for case in cases]))


def run(job: tuple[str, str, int]) -> dict[str, Any]:
  """Optimize one prompt from scratch; return its score, tokens, time, and the step that did not fit the context."""
  name, arm, seed = job
  for library in ("httpx", "openai"):  # these libraries log every call
    logging.getLogger(library).setLevel(logging.WARNING)
  world = make_world(name, seed)
  rng = np.random.default_rng([seed, 2])
  lib, engine = peer() if arm in PEER else (tg, lambda engine: engine)
  prompt = lib.Variable(world.initial, role_description=world.role)
  options = options_of(arm, world, prompt, seed)
  store = options.get("gradient_store")
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
        text = world.verdict(case, answer.value)
        judge = lib.StringBasedFunction(lambda answer, text=text: text, "tells whether it is right")
        losses.append(judge({"answer": answer}))
        failed.append(case.topic)
    if losses and full_at is None:
      if arm not in ("accumulate", "textgrad_all"):
        optimizer.zero_grad()
      try:
        lib.sum(losses).backward(critic)
        if isinstance(store, KnowsTopics):
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
    "calls": world.account.calls,
    "largest_prompt": world.account.largest_prompt,
    "milliseconds": None if arm in PEER else 1000 * optimizer.overhead_seconds / max(steps, 1),
    "full_at": full_at,
  }


def main(_: list[str]) -> None:
  """Run every arm of every scenario with the same seeds and compare."""
  began, report = time.time(), {}
  seeds = range(FIRST.value, FIRST.value + SEEDS.value)
  arms = CHOSEN.value or [*ARMS, *(PEER if importlib.util.find_spec("textgrad") else ())]
  if unknown := set(arms) - {*ARMS, *PEER} or {"retrieval", "none"} - set(arms):
    raise app.UsageError(
      f"--arms={','.join(arms)}: {', '.join(unknown)}? They are {', '.join((*ARMS, *PEER))}, "
      "and none and retrieval, which the others are compared with, must be among them"
    )
  scenarios = ["endpoint"] if ENDPOINT.value else list(SCENARIOS.value)
  if not DATA.value and not FLAGS["scenarios"].present:
    scenarios = [name for name in scenarios if not name.startswith("router")]
  for name in scenarios:
    try:  # a wrong scenario is an error before any run starts
      make_world(name, FIRST.value)
    except (ValueError, OSError) as error:
      raise app.UsageError(str(error)) from None
  with logs_of_peer(), concurrent.futures.ProcessPoolExecutor(JOBS.value) as pool:
    for name in scenarios:
      jobs = [(name, arm, seed) for arm in arms for seed in seeds]
      done = tqdm(pool.map(run, jobs), name, len(jobs), leave=False, unit="run")
      found = dict(zip(jobs, done, strict=True))
      of = {arm: [found[name, arm, seed] for seed in seeds] for arm in arms}
      report[name] = compare(of)
      print(f"\n{name}: {len(seeds)} seeds, {time.time() - began:.0f} s so far\n{table(report[name])}", flush=True)
      if name.startswith("router"):
        print(gate(report[name]), flush=True)
      if OUTPUT.value:
        facts = {"seeds": [*seeds], "batch": BATCH, "test": TEST, "past_tokens": PAST, "cores": os.cpu_count()}
        Path(OUTPUT.value).write_text(json.dumps({**facts, "scenarios": report}, indent=1) + "\n")


def compare(of: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
  """Return for each arm the mean score, its paired differences to retrieval and random, added tokens and time."""
  report = {}
  retrieval = np.array([run["score"] for run in of["retrieval"]])
  plain, calls = (np.array([run[name] for run in of["none"]]) for name in ("tokens", "calls"))
  for arm, runs in of.items():
    if full := [run["full_at"] for run in runs if run["full_at"] is not None]:
      report[arm] = {"runs_ended": len(full), "context_full_at_step": float(np.mean(full))}
      continue
    score = np.array([run["score"] for run in runs])
    report[arm] = {
      "score": float(score.mean()),
      "added_tokens": float(np.mean([run["tokens"] for run in runs] / plain - 1)),
      "added_calls": float(np.mean([run["calls"] for run in runs] / calls - 1)),
      "largest_prompt": max(run["largest_prompt"] for run in runs),
    }
    if runs[0]["milliseconds"] is not None:
      report[arm]["milliseconds_a_step"] = float(np.mean([run["milliseconds"] for run in runs]))
    if arm != "retrieval":
      report[arm]["retrieval_minus_this"] = float((retrieval - score).mean())
      report[arm]["interval"] = list(bootstrap_difference(retrieval, score))
    if arm != "random" and "random" in of:
      random = np.array([run["score"] for run in of["random"]])
      report[arm]["this_minus_random"] = float((score - random).mean())
      report[arm]["interval_to_random"] = list(bootstrap_difference(score, random))
  return report


def gate(rows: dict[str, dict[str, Any]]) -> str:
  """Say whether retrieval beats random replay on the second task, by the criterion fixed before the first run."""
  if "random" not in rows:
    return "no arm `random`: whether retrieval is worth more than random replay is not known"
  low, high = rows["random"]["interval"]
  return (
    f"retrieval - random: [{low:+.3f}, {high:+.3f}]; {'holds' if low > 0 else 'FAILS'}: the lower bound is to be > 0"
  )


def table(rows: dict[str, dict[str, Any]]) -> str:
  """Format a scenario for a terminal."""
  names = f"{'added tokens':>14}{'calls':>9}{'largest':>9}{'ms a step':>11}"
  lines = [f"{'':20}{'score':>8}{'retrieval - this':>25}{'this - random':>25}{names}"]
  for arm, row in rows.items():
    if "score" not in row:
      step = row["context_full_at_step"]
      lines.append(f"{arm:20}   ended: the context was full, {row['runs_ended']} runs, at step {step:.0f} on average")
      continue
    differences = shown(row, "retrieval_minus_this", "interval") + shown(row, "this_minus_random", "interval_to_random")
    numbers = f"{row['added_tokens']:14.1%}{row['added_calls']:9.1%}{row['largest_prompt']:9,}"
    numbers += f"{row['milliseconds_a_step']:11.2f}" if "milliseconds_a_step" in row else ""
    lines.append(f"{arm:20}{row['score']:8.3f}{differences}{numbers}")
  return "\n".join(lines)


def shown(row: dict[str, Any], difference: str, interval: str) -> str:
  """Format a difference with its interval, if there is one."""
  if difference not in row:
    return " " * 25
  low, high = row[interval]
  return f"{row[difference]:+8.3f} [{low:+.3f}, {high:+.3f}]".rjust(25)


if __name__ == "__main__":
  app.run(main)

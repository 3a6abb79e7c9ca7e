"""Gradient-RAG beside other ways to remember critiques, on the Latent Rulebook: what is each worth at one token budget?

  python benchmarks/gradient_rag.py [--seeds=20] [--jobs=2] [--scenarios=return,steady,null,weak]

Arms: `none` (the critiques of this step), `accumulate` (all critiques, until the context is full: its run ends
there), `window` (the last), `random` (random ones of all), `retrieval`, and `oracle` (it knows the topics). Those that
show the past do so within the same number of tokens. Scenarios: `return` (12 topics, then 48 others, then the 12 again:
the first steps of the return), `steady` (60 topics, second half), `null` (a critic that never errs and room for all
rules: memory cannot help and must not hurt), `weak` (a critic that is wrong more often than right), and `capacity=N`
(steady with room for N of the 60 rules: how much a prompt must forget). Prints the mean score over the seeds, each
arm's paired difference to retrieval with its bootstrap interval, the share of tokens that showing the past adds to all
calls, and the milliseconds that remembering takes a step. Writes the figures as JSON with --output. The defaults take
about five minutes on two cores.
"""

import concurrent.futures
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import selfrag_jax.textgrad as tg
from selfrag_jax.metrics.statistics import bootstrap_difference
from selfrag_jax.tasks.rulebook import EMPTY, ROLE, Rulebook
from selfrag_jax.textgrad.gradient_store import GradientStore, PastCritique

SEEDS = flags.DEFINE_integer("seeds", 20, "Seeds, from 1000 on: none was used while anything was chosen.")
JOBS = flags.DEFINE_integer("jobs", 2, "Processes.")
SCENARIOS = flags.DEFINE_list(
  "scenarios", ["return", "steady", "null", "weak", "capacity=12", "capacity=36", "capacity=60"], "Which of them."
)
OUTPUT = flags.DEFINE_string("output", None, "File for the figures as JSON.")
ARMS = ("none", "accumulate", "window", "random", "retrieval", "oracle")
CONTEXT = 8192  # tokens of the engine that optimizes
BATCH, TEST, PAST = 3, 40, 400  # cases a step, cases that score each prompt, tokens of the past in a prompt
OLD, OTHERS = range(12), range(12, 60)


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

  def __init__(self, book: Rulebook):
    super().__init__(dedupe_threshold=None)
    self._book, self._ids, self.topics = book, {}, []

  def add(self, critiques: list[tg.Critique], rows: np.ndarray | None = None) -> list[str]:
    """Note the topics."""
    ids = super().add(critiques, rows)
    for id, critique in zip(ids, critiques, strict=True):
      self._ids.setdefault(self._book.topic_of(critique.sample), []).append(id)
    return ids

  def search(self, rows: np.ndarray, k: int, **_: Any) -> list[list[PastCritique]]:
    """Return the last k records of the topic of each row."""
    return [[self._past(self._memory.get(id), 1.0) for id in self._ids.get(t, [])[: -k - 1 : -1]] for t in self.topics]


def scenario(name: str) -> tuple[dict[str, Any], list[range], slice]:
  """Return the settings of the rulebook, the topics of each step, and the steps that count."""
  everything = range(60)
  if name == "return":
    return {"capacity": 24}, [OLD] * 60 + [OTHERS] * 80 + [OLD] * 8, slice(140, 148)
  if name == "null":
    return {"capacity": 60, "noise": 0.0}, [everything] * 120, slice(60, 120)
  if name == "weak":
    return {"capacity": 24, "noise": 0.7}, [everything] * 120, slice(60, 120)
  capacity = int(name.removeprefix("capacity=")) if name.startswith("capacity=") else 24
  return {"capacity": capacity}, [everything] * 120, slice(60, 120)


def run(job: tuple[str, str, int]) -> dict[str, Any]:
  """Optimize one prompt from nothing; return its score, tokens, time, and the step that did not fit the context."""
  name, arm, seed = job
  settings, topics, counted = scenario(name)
  book, rng = Rulebook(seed=seed, **settings), np.random.default_rng([seed, 2])
  account = tg.Account()
  prompt = tg.Variable(EMPTY, role_description=ROLE)
  limits = {"account": account, "concurrency": 1}
  model = tg.BlackboxLLM(tg.CallableEngine(book.answer, **limits), prompt)
  critic = tg.CallableEngine(book.criticise, **limits)
  writer = tg.CallableEngine(book.optimize, context_tokens=CONTEXT, max_tokens=1000, **limits)
  store = {"random": lambda: RandomReplay(seed), "oracle": lambda: Oracle(book)}.get(
    arm, lambda: GradientStore(dedupe_threshold=None)
  )()
  rag = tg.RagConfig(
    tokens=4000,
    past_tokens=PAST,
    k=12 if arm in ("random", "retrieval", "oracle") else 0,
    window=12 if arm == "window" else 0,
    merge="concatenate",
  )
  remembering = {"use_gradient_rag": True, "gradient_store": store, "rag": rag} if arm != "accumulate" else {}
  optimizer = tg.TGD([prompt], engine=writer, **remembering)
  scores, full_at, steps = [], None, 0
  for step, of in enumerate(topics):
    cases, test = book.cases(rng, of, BATCH), book.cases(rng, of, TEST)
    losses, failed = [], []
    for case in cases:
      answer = model(tg.Variable(case.text, requires_grad=False, role_description="case"))
      if answer.value != case.action:
        judge = tg.StringBasedFunction(lambda answer, case=case: f"{case.text}: not right", "tells whether it is right")
        losses.append(judge({"answer": answer}))
        failed.append(case.topic)
    if losses and full_at is None:
      if arm != "accumulate":
        optimizer.zero_grad()
      tg.sum(losses).backward(critic)
      if isinstance(store, Oracle):
        store.topics = failed
      try:
        optimizer.step()
        steps += 1
      except tg.ContextBudgetError:
        full_at = step
    scores.append(book.score(prompt.value, test))
  return {
    "score": float(np.mean(scores[counted])),
    "tokens": account.prompt_tokens,
    "milliseconds": 1000 * optimizer.overhead_seconds / max(steps, 1),
    "full_at": full_at,
  }


def main(_: list[str]) -> None:
  """Run every arm of every scenario with the same seeds and compare."""
  began, report = time.time(), {}
  seeds = range(1000, 1000 + SEEDS.value)
  with concurrent.futures.ProcessPoolExecutor(JOBS.value) as pool:
    for name in SCENARIOS.value:
      jobs = [(name, arm, seed) for arm in ARMS for seed in seeds]
      found = dict(zip(jobs, pool.map(run, jobs), strict=True))
      of = {arm: [found[name, arm, seed] for seed in seeds] for arm in ARMS}
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
      "milliseconds_a_step": float(np.mean([run["milliseconds"] for run in runs])),
    }
    if arm != "retrieval":
      report[arm]["retrieval_minus_this"] = float((retrieval - score).mean())
      report[arm]["interval"] = list(bootstrap_difference(retrieval, score))
  return report


def table(rows: dict[str, dict[str, Any]]) -> str:
  """Format a scenario for a terminal."""
  lines = [f"{'':12}{'score':>8}{'retrieval - this':>28}{'added tokens':>14}{'ms a step':>11}"]
  for arm, row in rows.items():
    if "score" not in row:
      step = row["context_full_at_step"]
      lines.append(f"{arm:12}   ended: the context was full, {row['runs_ended']} runs, at step {step:.0f} on average")
      continue
    low, high = row.get("interval", (0.0, 0.0))
    difference = f"{row['retrieval_minus_this']:+.3f} [{low:+.3f}, {high:+.3f}]" if "interval" in row else ""
    numbers = f"{row['added_tokens']:14.1%}{row['milliseconds_a_step']:11.2f}"
    lines.append(f"{arm:12}{row['score']:8.3f}{difference:>28}{numbers}")
  return "\n".join(lines)


if __name__ == "__main__":
  app.run(main)

"""What the design expected of a baseline, RAG and REFRAG, beside what finished runs of REFRAG measure.

  python benchmarks/expectations.py --refrag=runs/refrag_hybrid --refrag=runs/refrag_mamba --refrag=...
  python benchmarks/expectations.py --refrag=runs/refrag_arms/fold0/evidence    an arm of refrag_arms.py

Each run's final policy answers held-out questions without a search (baseline), with one (RAG) and with all that it may
make (REFRAG). A wrong answer that is given, and not withheld, counts as a hallucination. Training time is that of
supervised fine-tuning alone, and with reinforcement. Memory is that of the parameters and of the caches of one row of
2,048, 8,192 and 10,240 tokens; the time to read is that of a row, 1,024 tokens at a time. Prints two tables.
"""

import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

REFRAG = flags.DEFINE_multi_string("refrag", None, "Workdir of a finished run of configs/refrag.py; may be repeated.")
QUESTIONS = flags.DEFINE_integer("questions", 1024, "Most held-out questions of a run.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 3, "Times that a context is read; the median counts.", lower_bound=1)
flags.mark_flag_as_required("refrag")

EXPECTED = {  # of a baseline, RAG and REFRAG, by the document that the project began with
  "right answers": ("60 %", "75 to 80 %", "80 to 85 %"),
  "wrong answers given": ("30 %", "15 to 20 %", "10 to 15 %"),
  "tokens of context": ("2,048", "8,192", "10,240"),
  "memory, with Mamba": ("1", "1.2", "1.3"),
  "training time": ("1", "1.5", "2"),
}
CONTEXTS, CHUNK = (2048, 8192, 10240), 1024


def answers(experiment: Any, params: Any, hops: int) -> dict[str, float]:
  """Return the shares of right and of wrong answers, and the tokens of a rollout, with at most `hops` searches."""
  from selfrag_jax.generate.sampling import SamplingConfig

  greedy = dataclasses.replace(experiment.rollout, max_hops=hops, sampling=SamplingConfig(temperature=0.0))
  size, rows = experiment.task.size("test"), experiment.evaluation.batch_size
  n = QUESTIONS.value if size is None else min(QUESTIONS.value, size)
  columns = []
  for start in range(0, n, rows):
    batch = experiment.task.batch("test", np.minimum(np.arange(start, start + rows), n - 1))
    done = experiment.runner.run(params, batch, greedy, jax.random.key(start))
    right = experiment.runner.score(done).exact_match > 0
    said = np.array([transcript.answer is not None for transcript in done.transcripts])
    columns.append(np.stack([right, said & ~right, done.host.lengths])[:, : n - start])
  right, wrong, tokens = np.concatenate(columns, axis=1).mean(axis=1)
  return {"right answers": right, "wrong answers given": wrong, "tokens of context": tokens}


def seconds(workdir: str) -> dict[str, float]:
  """Return how long each phase of a run took; what an arm started from is in the folder above it."""
  spent: dict[str, float] = {}
  for path in (Path(workdir).resolve().parent / "metrics.jsonl", Path(workdir) / "metrics.jsonl"):
    ends: dict[str, float] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
      row = json.loads(line)
      ends[row["phase"]] = max(ends.get(row["phase"], 0.0), row["seconds"])
    before = 0.0
    for phase, end in sorted(ends.items(), key=lambda item: item[1]):
      spent[phase], before = end - before, end
  return spent


def reading(model: Any, params: Any) -> dict[int, tuple[int, float]]:
  """Return the bytes of parameters and caches, and the seconds to read, for each length of a context."""
  from selfrag_jax.model.cache import init_cache
  from selfrag_jax.model.lm import LM, unstack

  flat = unstack(model, params)
  lm, weights = LM(model, unrolled=True), sum(x.nbytes for x in jax.tree.leaves(flat))
  extend = jax.jit(
    lambda tokens, cache: lm.apply(flat, tokens, np.array([CHUNK]), cache, method="extend")[1], donate_argnums=1
  )
  found = {}
  for length in CONTEXTS:
    tokens = np.ones((1, CHUNK), np.int32)
    fresh = lambda length=length: init_cache(model, 1, length)
    jax.block_until_ready(extend(tokens, fresh()))  # compiles
    times = []
    for _ in range(REPEATS.value):
      cache, started = fresh(), time.perf_counter()
      for _ in range(length // CHUNK):
        cache = extend(tokens, cache)
      jax.block_until_ready(cache)
      times.append(time.perf_counter() - started)
    found[length] = (weights + sum(x.nbytes for x in jax.tree.leaves(fresh())), statistics.median(times))
  return found


def main(_) -> None:
  """Measure each run and print the tables."""
  from selfrag_jax.experiments.refrag import build, load_policy
  from selfrag_jax.mesh import configure_xla

  logging.set_verbosity(logging.WARNING)
  configure_xla()
  lines, contexts = [], []
  for workdir in REFRAG.value:
    experiment = build(json.loads((Path(workdir) / "config.json").read_text()))
    pattern, spent = experiment.model.to_dict()["block_pattern"], seconds(workdir)
    with jax.set_mesh(experiment.mesh):
      params = load_policy(experiment, workdir, "rl")
      measured = [answers(experiment, params, hops) for hops in (0, 1, experiment.rollout.max_hops)]
      read = reading(experiment.model, params)
    for name in measured[0]:
      percent = name != "tokens of context"
      shown = [f"{100 * row[name]:.1f} %" if percent else f"{row[name]:.0f}" for row in measured]
      lines.append((name, pattern, *shown))
    lines.append(("training time", pattern, "-", "1", f"{(spent['sft'] + spent['rl']) / spent['sft']:.1f}"))
    base, base_time = read[CONTEXTS[0]]
    lines.append(("memory, with Mamba", pattern, *(f"{read[length][0] / base:.2f}" for length in CONTEXTS)))
    for length, (size, took) in read.items():
      contexts.append((pattern, length, f"{size / 2**20:.2f}", size / base, f"{took:.3f}", took / base_time))
  print("| | blocks | baseline | RAG | REFRAG |\n|---|---|---|---|---|")
  for name, values in EXPECTED.items():
    print(f"| {name} | expected | {' | '.join(values)} |")
    for line in lines:
      if line[0] == name:
        print(f"| | {' | '.join(line[1:])} |")
  print("\n| blocks | tokens read | MiB | against 2,048 | seconds | against 2,048 |\n|---|---|---|---|---|---|")
  for pattern, length, size, more, took, longer in contexts:
    print(f"| {pattern} | {length:,} | {size} | {more:.2f} | {took} | {longer:.2f} |")


if __name__ == "__main__":
  app.run(main)

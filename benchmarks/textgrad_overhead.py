"""Overhead of textual gradients outside the engine, beside the package textgrad: python benchmarks/textgrad_overhead.py

Needs pip install textgrad==0.1.8. In one step, a prompt answers a batch of cases, a loss judges each answer, the sum
goes backward, and the optimizer writes a new prompt. The engine answers at once, so that only the library's work around
its calls is timed. The two libraries take turns in one process; `log off` is the peer without the log of all prompts
that it writes to disk. Then both are imported, each in a process of its own. Prints medians and their ratio, ours to
theirs.
"""

import json
import logging
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import selfrag_jax.textgrad as tg
from benchmarks.gradient_rag import logs_of_peer, peer

TURNS = flags.DEFINE_integer("turns", 15, "Turns of each.")
OUTPUT = flags.DEFINE_string("overhead_output", None, "File for the figures as JSON.")
BATCHES = (3, 100)
FEEDBACK = "The answer has no reason. Ask for one, and for the unit of each quantity. " * 5


class Instant(tg.EngineLM):
  """The engine of all three roles. It counts no tokens, since the peer's engines count none."""

  def generate(self, content: Any, system_prompt: str | None = None, **_: Any) -> str:
    """Answer."""
    return f"<IMPROVED_VARIABLE>{FEEDBACK}</IMPROVED_VARIABLE>"


def step(lib: Any, engine: Any, batch: int) -> float:
  """Make one step; return its seconds."""
  prompt = lib.Variable("Answer the question.", role_description="system prompt")
  model, loss = lib.BlackboxLLM(engine, prompt), lib.TextLoss("Is it right, and does it say why?", engine=engine)
  optimizer = lib.TextualGradientDescent([prompt], engine=engine)
  began = time.perf_counter()
  cases = [
    lib.Variable(f"How many are {i} and {i}?", requires_grad=False, role_description="case") for i in range(batch)
  ]
  lib.sum([loss(model(case)) for case in cases]).backward(engine)
  optimizer.step()
  return time.perf_counter() - began


def imported(module: str) -> float:
  """Return the seconds that an import takes in a process of its own, without the start of Python."""
  code = f"import time; began = time.perf_counter(); import {module}; print(time.perf_counter() - began)"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
  return float(done.stdout)


def main(_: list[str]) -> None:
  """Time both libraries and print a table."""
  with logs_of_peer():
    compare()


def compare() -> None:
  """Time the steps of both libraries in turns."""
  textgrad, make = peer()
  ours = Instant()
  theirs = make(ours)
  rows: dict[str, dict[str, float]] = {}
  log = logging.getLogger("textgrad")
  for batch in BATCHES:
    times: dict[str, list[float]] = {"ours": [], "textgrad": [], "textgrad, log off": []}
    for _ in range(TURNS.value):
      times["ours"].append(step(tg, ours, batch))
      times["textgrad"].append(step(textgrad, theirs, batch))
      log.disabled = True
      times["textgrad, log off"].append(step(textgrad, theirs, batch))
      log.disabled = False
    rows[f"a step with {batch} cases, ms"] = {name: 1000 * statistics.median(t) for name, t in times.items()}
  both = [(imported("selfrag_jax.textgrad"), imported("textgrad")) for _ in range(3)]
  rows["import, ms"] = {
    name: 1000 * statistics.median(t) for name, t in zip(("ours", "textgrad"), zip(*both, strict=False), strict=True)
  }
  for name, row in rows.items():
    for other in [other for other in row if other != "ours"]:
      row[f"ratio to {other}"] = row["ours"] / row[other]
    print(f"{name:28}" + "   ".join(f"{key} {x:.2f}" for key, x in row.items()), flush=True)
  if OUTPUT.value:
    Path(OUTPUT.value).write_text(json.dumps({"turns": TURNS.value, **rows}, indent=1) + "\n")


if __name__ == "__main__":
  app.run(main)

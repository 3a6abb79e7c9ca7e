"""Retrieval of the critiques of one task among 10,000 critiques of real cases, and the time per step that it takes.

  python benchmarks/gradient_recall.py --data=FOLDER [--encoder=all-MiniLM-L6-v2]

FOLDER holds `textgrad_bbh/object_counting.json` and `date_understanding.json` of BIG-Bench-Hard, and lines of GSM8K
in `textgrad_gsm8k/`. 9,200 critiques are of GSM8K, 400 of either task of BIG-Bench-Hard; all texts are drawn from the
same twelve remarks, so that only the cases tell the tasks apart. 50 other cases of each task are queries for 8 records.
Prints precision@8 by task, for the encoder and for hashed words, which are the default. Then it measures a store on the
disk with the defaults (hashed words, near duplicates counted): the milliseconds that a step of the optimizer takes to
embed, search, merge and store three critiques, as the median of 200 steps, and the store's memory, which
--records=100000 measures at the default size.
"""

import json
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import selfrag_jax.textgrad as tg
from selfrag_jax.encoders.base import Encoder
from selfrag_jax.encoders.hashed_words import HashingEncoder

DATA = flags.DEFINE_string("data", None, "Folder with textgrad_bbh and textgrad_gsm8k.", required=True)
ENCODER = flags.DEFINE_string("encoder", "all-MiniLM-L6-v2", "What load_encoder takes.")
RECORDS = flags.DEFINE_integer("records", 10_000, "Records of the store on the disk.")
K, QUERIES, STEPS, ROLE = 8, 50, 200, "system prompt"
REMARKS = (
  "A step was left out, so the result does not follow.",
  "The question was misread: something else was asked for.",
  "The final answer is not in the form that was asked for.",
  "One of the items was counted twice.",
  "The reasoning is right, the last line contradicts it.",
  "The answer is stated without any reasoning.",
  "A condition in the middle of the text was ignored.",
  "The numbers were copied wrongly from the text.",
  "Check the result against the question before answering.",
  "The answer is too long; the instruction should ask for brevity.",
  "Two quantities that have different units were mixed.",
  "List everything that is given first, then work it out.",
)


def read(folder: Path) -> dict[str, list[str]]:
  """Return the cases of each task, in a fixed random order."""
  tasks = {
    name: [
      example["input"] for example in json.loads((folder / "textgrad_bbh" / f"{name}.json").read_text())["examples"]
    ]
    for name in ("object_counting", "date_understanding")
  }
  lines = next((folder / "textgrad_gsm8k").glob("*.jsonl")).read_text("utf-8").splitlines()
  tasks["gsm8k"] = [json.loads(line)["question"] for line in lines]
  return {name: [cases[i] for i in np.random.default_rng(0).permutation(len(cases))] for name, cases in tasks.items()}


class Once(Encoder):
  """An encoder that caches the vector of each text."""

  def __init__(self, encoder: Encoder, name: str):
    self._encoder, self.name, self._known = encoder, name, {}

  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    """Embed texts."""
    new = list(dict.fromkeys(text for text in texts if text not in self._known))
    self._known |= dict(zip(new, np.asarray(self._encoder(new)), strict=True)) if new else {}
    return np.stack([self._known[text] for text in texts])


def precision(encoder: Encoder, tasks: dict[str, list[str]]) -> dict[str, float]:
  """Fill a store of 10,000 records and return precision@8 by task."""
  rng = np.random.default_rng(1)
  remark = lambda: REMARKS[rng.integers(len(REMARKS))]
  store = tg.GradientStore(encoder=encoder, dedupe_threshold=None)
  records = []
  for name, cases in tasks.items():
    kept, times = (cases[QUERIES : QUERIES + 920], 10) if name == "gsm8k" else (cases[QUERIES : QUERIES + 200], 2)
    records += [tg.Critique(ROLE, remark(), case, run=name) for case in kept for _ in range(times)]
  order = rng.permutation(len(records))
  for start in range(0, len(order), 500):
    store.add([records[i] for i in order[start : start + 500]])
  found = {}
  for name, cases in tasks.items():
    rows = store.embed([tg.Critique(ROLE, remark(), case) for case in cases[:QUERIES]])
    hits = [[past.read().run == name for past in nearest] for nearest in store.search(rows, K)]
    found[name] = float(np.mean([sum(row) / K for row in hits]))
  return found


def filled(folder: str, cases: list[str]) -> tuple[tg.GradientStore, float]:
  """Return a store on the disk with the defaults and --records critiques, and the MB that it takes in memory."""
  before = resident()
  store = tg.GradientStore(folder)
  for start in range(0, RECORDS.value, 500):
    places = range(start, min(start + 500, RECORDS.value))
    # a number in each text prevents near duplicates, so that the store has as many records as --records says
    store.add([tg.Critique(ROLE, f"{REMARKS[i % len(REMARKS)]} {i}", f"{i} {cases[i % len(cases)]}") for i in places])
  return store, resident() - before


def resident() -> float:
  """Return the MB of memory that this process uses."""
  return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def milliseconds(store: tg.GradientStore, cases: list[str]) -> np.ndarray:
  """Return the milliseconds that the memory takes in each of 200 steps of three critiques."""
  prompt = tg.Variable("Answer.", role_description=ROLE)
  reply = "<IMPROVED_VARIABLE>Answer.</IMPROVED_VARIABLE>"
  engine = tg.CallableEngine(lambda content, system: reply)
  optimizer = tg.TGD([prompt], engine=engine, use_gradient_rag=True, gradient_store=store)
  taken = []
  for step in range(STEPS):
    prompt.reset_gradients()
    for place in range(3 * step, 3 * step + 3):
      gradient = tg.Variable(REMARKS[place % len(REMARKS)], role_description="feedback")
      gradient.loss_context = {"sample": cases[place % len(cases)]}
      prompt.gradients.add(gradient)
    optimizer.overhead_seconds = 0.0
    optimizer.step()
    taken.append(1000 * optimizer.overhead_seconds)
  return np.array(taken)


def main(_: list[str]) -> None:
  """Measure the store's time and memory, then the precision of both encoders."""
  tasks = read(Path(DATA.value))
  with tempfile.TemporaryDirectory() as folder:
    store, megabytes = filled(folder, tasks["gsm8k"])
    records, taken = len(store), milliseconds(store, tasks["gsm8k"])
    store.close()
  print(
    f"{records:,} records on the disk: {np.median(taken):.1f} ms a step of 3 critiques, {np.quantile(taken, 0.9):.1f} "
    f"in 9 of 10; {megabytes:.0f} MB of memory",
    flush=True,
  )
  from selfrag_jax.encoders.load import load_encoder

  for encoder in (Once(load_encoder(ENCODER.value), ENCODER.value), HashingEncoder()):
    began = time.time()
    found = precision(encoder, tasks)
    shown = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
    print(f"{encoder.name}: precision@{K} {shown}; {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
  app.run(main)

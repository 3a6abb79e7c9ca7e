"""The engine with SmolLM2-135M: 16 requests at once beside one, and beside transformers' `generate` on torch.

  python benchmarks/engine.py --text=FILE [--turns=5] [--requests=16] [--prompt=256] [--new=64]

Both write greedily after the same prompts, passages of the text, with the same weights in float32, each in a process
of its own with its default threads, and they take turns. transformers gets all prompts as one batch; the engine gets
them as requests that come at the same moment, and has no cache of prompts. Prints the tokens per second of one
request and of all, prompts included in the time; the ratio to transformers' (above 1: faster here) with its median,
lowest and highest turn; how long a request waits for its first token and between tokens; and how many of the answers
are the same (two libraries round differently: where two tokens are as likely, they may part). Needs torch and
transformers: `pip install -e '.[test]'`.
"""

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TEXT = flags.DEFINE_string("text", None, "A text in UTF-8, such as a part of WikiText-2.", required=True)
TURNS = flags.DEFINE_integer("turns", 5, "Timed turns of each.", lower_bound=1)
REQUESTS = flags.DEFINE_integer("requests", 16, "Requests at once.", lower_bound=2)
PROMPT = flags.DEFINE_integer("prompt", 256, "Tokens of a prompt.", lower_bound=1)
NEW = flags.DEFINE_integer("new", 64, "Tokens of an answer.", lower_bound=2)
MODEL = "smollm2-135m"
PAUSE = 0.5  # seconds between turns, until the idle threads of the turn before have stopped spinning
Write = Callable[[list[list[int]], int], dict[str, Any]]


def ours(folder: str) -> Write:
  """Return a function that writes n tokens after each prompt at once, and tells answers and times."""
  from selfrag_jax.mesh import configure_xla

  configure_xla()
  from selfrag_jax.generate.engine import Engine
  from selfrag_jax.train.load import load_model

  engine = Engine(load_model(MODEL), slots=REQUESTS.value, prefix_cache_bytes=0)

  def write(prompts: list[list[int]], new: int) -> dict[str, Any]:
    times: list[list[float]] = [[] for _ in prompts]
    start = time.perf_counter()
    generations = [
      engine.submit(
        prompt,
        max_new_tokens=new,
        listener=lambda piece, at=at: at.append(time.perf_counter() - start) if piece.token >= 0 else None,
      )[0]
      for prompt, at in zip(prompts, times, strict=True)
    ]
    while engine.step():
      pass
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "answers": [generation.tokens for generation in generations], "times": times}

  return write


def theirs(folder: str) -> Write:
  """Return the same for transformers' LlamaForCausalLM."""
  import torch
  from transformers import LlamaForCausalLM

  model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
  model.generation_config.eos_token_id = None

  @torch.no_grad()
  def write(prompts: list[list[int]], new: int) -> dict[str, Any]:
    ids = torch.tensor(prompts)
    start = time.perf_counter()
    rows = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "answers": rows[:, ids.shape[1] :].tolist(), "times": []}

  return write


PEERS = {"selfrag_jax": ours, "transformers": theirs}


def work(name: str, argv: list[str], folder: str, pipe: Connection) -> None:
  """Write what the pipe asks for, and send it back."""
  flags.FLAGS(argv)
  write = PEERS[name](folder)
  while (task := pipe.recv()) is not None:
    pipe.send(write(*task))


def prepare(argv: list[str], folder: str, pipe: Connection) -> None:
  """Write the model for transformers, and send prompts: passages of the text of one length."""
  flags.FLAGS(argv)
  from selfrag_jax.model.export import export_safetensors
  from selfrag_jax.model.pretrained import load_pretrained

  model = load_pretrained(MODEL)
  export_safetensors(folder, model.config, model.params, vocab_size=model.base_vocab_size)
  ids = model.tokenizer.encode(Path(TEXT.value).read_text(encoding="utf-8")[: 40 * PROMPT.value * REQUESTS.value])
  pipe.send([ids[i * PROMPT.value : (i + 1) * PROMPT.value] for i in range(REQUESTS.value)])


def percentiles(seconds: list[float]) -> str:
  return f"p50 {np.percentile(seconds, 50) * 1e3:.0f} ms, p99 {np.percentile(seconds, 99) * 1e3:.0f} ms"


def main(argv: list[str]) -> None:
  """Compare and time."""
  context, argv = multiprocessing.get_context("spawn"), sys.argv
  with tempfile.TemporaryDirectory() as folder:
    near, far = context.Pipe()
    writer = context.Process(target=prepare, args=(argv, folder, far))
    writer.start()
    prompts = near.recv()
    writer.join()
    pipes: dict[str, Connection] = {}
    workers = []
    for name in PEERS:
      pipes[name], far = context.Pipe()
      workers.append(context.Process(target=work, args=(name, argv, folder, far), daemon=True))
      workers[-1].start()

    def ask(name: str, prompts: list[list[int]]) -> dict[str, Any]:
      pipes[name].send((prompts, NEW.value))
      answer = pipes[name].recv()
      time.sleep(PAUSE)
      return answer

    for name in PEERS:  # compiles, and warms the caches
      ask(name, prompts)
      ask(name, prompts[:1])
    rates = {}
    for label, asked in (("one request", prompts[:1]), (f"{len(prompts)} requests", prompts)):
      turns = [[ask(name, asked) for name in PEERS] for _ in range(TURNS.value)]
      here, there = zip(*turns, strict=True)
      amount = sum(map(len, here[0]["answers"]))
      rate = lambda turns, amount=amount: amount / statistics.median(turn["seconds"] for turn in turns)
      ratios = sorted(b["seconds"] / a["seconds"] for a, b in turns)
      rates[label] = rate(here)
      same = sum(a == b for a, b in zip(here[0]["answers"], there[0]["answers"], strict=True))
      first = [times[0] for turn in here for times in turn["times"]]
      between = [gap for turn in here for times in turn["times"] for gap in np.diff(times)]
      print(
        f"{label}: {rate(here):.1f} tok/s here, {rate(there):.1f} tok/s there: {statistics.median(ratios):.2f}x "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f}); {same} of {len(asked)} answers the same, {amount} tokens\n"
        f"  first token {percentiles(first)}; between tokens {percentiles(between)}",
        flush=True,
      )
    one, many = rates.values()
    print(f"{len(prompts)} requests beside one: {many / one:.2f}x the tokens per second")
    for pipe in pipes.values():
      pipe.send(None)
    for worker in workers:
      worker.join()


if __name__ == "__main__":
  app.run(main)

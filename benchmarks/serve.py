"""Searches over HTTP beside the library's own, and texts of one client beside those of sixteen.

  python benchmarks/serve.py [--chunks=8000] [--searches=500] [--model=smollm2-135m] [--clients=16] [--requests=32]

Starts `launch/serve.py` on a knowledge base of made-up passages (hashed words, dense). Prints the median and the 99th
percentile of the time of a search, asked one after another: within this process, over HTTP, and their difference. Then
prompts of `--prompt_tokens` random tokens are continued by `--new_tokens`, greedily and streamed, by one client and by
`--clients` at once: tokens per second, and median and 99th percentile of the time to the first token and between
tokens. A first request of each kind is not timed: programs are compiled for it.
"""

import concurrent.futures
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CHUNKS = flags.DEFINE_integer("chunks", 8000, "Chunks of the knowledge base.")
SEARCHES = flags.DEFINE_integer("searches", 500, "Searches of each kind.")
MODEL = flags.DEFINE_string("model", "smollm2-135m", "The model that is served.")
CLIENTS = flags.DEFINE_integer("clients", 16, "Clients that ask at once.")
REQUESTS = flags.DEFINE_integer("requests", 32, "Texts of each kind.")
PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 256, "Tokens of a prompt.")
NEW_TOKENS = flags.DEFINE_integer("new_tokens", 64, "The most tokens of a text.")
WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("n", "r", "s", "ling", "ton", "dor")]
TOP_K, KNOWN_TOKENS = 5, 30_000  # ids below it are ordinary tokens of the model, but for the first few


def build(folder: Path, rng: np.random.Generator) -> None:
  """Build a knowledge base of passages of 60 random words."""
  from selfrag_jax.encoders.hashed_words import HashingEncoder
  from selfrag_jax.retrieval import prepare_knowledge_base

  passages = ({"id": str(n), "content": " ".join(rng.choice(WORDS, 60))} for n in range(CHUNKS.value))
  file = folder.parent / "passages.jsonl"
  file.write_text("".join(json.dumps(passage) + "\n" for passage in passages))
  prepare_knowledge_base([file], folder, "dense", settings={"model_name": HashingEncoder().name, "backend": "numpy"})


class Client:
  """A connection that is kept open, as clients keep theirs."""

  def __init__(self, port: int):
    self._connection = http.client.HTTPConnection("127.0.0.1", port)

  def post(self, path: str, body: Any) -> http.client.HTTPResponse:
    """Send a request; the response is to be read to its end. Raises RuntimeError for an error."""
    self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = self._connection.getresponse()
    if response.status != 200:
      raise RuntimeError(f"{path} answered {response.status}: {response.read()!r:.300}")
    return response

  def search(self, query: str) -> list[Any]:
    """Search the knowledge base."""
    return json.loads(self.post("/v1/search", {"query": query, "knowledge_base": "kb", "top_k": TOP_K}).read())["data"]

  def text(self, prompt: list[int]) -> list[float]:
    """Continue a prompt; return the seconds from the request to each token."""
    body = {"model": "model", "prompt": prompt, "max_tokens": NEW_TOKENS.value, "temperature": 0, "logprobs": 0}
    began, times = time.perf_counter(), []
    for line in self.post("/v1/completions", {**body, "stream": True}):
      if b'"token_logprobs":[' in line:  # one token, whether its text is known yet or not
        times.append(time.perf_counter() - began)
    return times


def timed(search: Callable[[str], Any], queries: list[str]) -> np.ndarray:
  """Return the milliseconds of each search."""
  search(queries[0])
  times = []
  for query in queries:
    began = time.perf_counter()
    search(query)
    times.append(1000 * (time.perf_counter() - began))
  return np.array(times)


def shown(milliseconds: np.ndarray) -> str:
  """Format a median and a 99th percentile."""
  return f"{np.median(milliseconds):10.2f}{np.percentile(milliseconds, 99):10.2f}"


def compare_searches(folder: Path, port: int, rng: np.random.Generator) -> None:
  """Print the time of searches in this process, over HTTP, and what HTTP adds."""
  from selfrag_jax.retrieval import load

  retriever, client = load(folder), Client(port)
  queries = [" ".join(rng.choice(WORDS, 8)) for _ in range(SEARCHES.value)]
  found = [document.id for document in retriever.retrieve(queries[0], TOP_K)]
  assert found == [each["id"] for each in client.search(queries[0])]
  # by turns, so that what else the machine does slows both
  parts = [queries[at : at + 50] for at in range(0, len(queries), 50)]
  pairs = [(timed(lambda query: retriever.retrieve(query, TOP_K), part), timed(client.search, part)) for part in parts]
  near, far = (np.concatenate(each) for each in zip(*pairs, strict=True))
  print(f"\n{len(queries)} searches of {CHUNKS.value:,} chunks, ms{'p50':>10}{'p99':>10}")
  for name, times in (("in the process", near), ("over HTTP", far)):
    print(f"{name:>34}{shown(times)}")
  added = np.median(far) - np.median(near), np.percentile(far, 99) - np.percentile(near, 99)
  print(f"{'difference':>34}{added[0]:10.2f}{added[1]:10.2f}")


def compare_texts(port: int, rng: np.random.Generator) -> None:
  """Print the speed of texts for one client, and for several at once."""
  head = f"{'clients':>10}{'tokens/s':>10}{'first, ms':>12}{'p99':>10}{'between, ms':>14}{'p99':>10}"
  print(f"\nprompts of {PROMPT_TOKENS.value} and texts of at most {NEW_TOKENS.value} tokens\n{head}")
  rates = []
  for clients in (1, CLIENTS.value):
    connections = [Client(port) for _ in range(clients)]
    count = max(REQUESTS.value, clients)

    def ask(clients: int, count: int, connections: list[Client]) -> tuple[list[list[float]], float]:
      prompts = rng.integers(100, KNOWN_TOKENS, (count, PROMPT_TOKENS.value)).tolist()
      shares = [prompts[number::clients] for number in range(clients)]
      began = time.perf_counter()
      with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        jobs = [
          pool.submit(lambda client, share: [client.text(prompt) for prompt in share], client, share)
          for client, share in zip(connections, shares, strict=True)
        ]
        texts = [text for job in jobs for text in job.result()]
      return texts, time.perf_counter() - began

    ask(clients, clients, connections)
    texts, seconds = ask(clients, count, connections)
    first = 1000 * np.array([text[0] for text in texts])
    between = 1000 * np.concatenate([np.diff(text) for text in texts])
    rates.append(sum(map(len, texts)) / seconds)
    print(f"{clients:>10}{rates[-1]:10.1f}  {shown(first)}    {shown(between)}")
  print(f"{CLIENTS.value} clients: {rates[1] / rates[0]:.2f} times the tokens per second of one")


def main(_) -> None:
  """Build a knowledge base, start a server on it, and print both tables."""
  rng = np.random.default_rng(0)
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name) / "kb"
    build(folder, rng)
    flags_ = [f"--model={MODEL.value}", "--name=model", f"--knowledge_base=kb={folder}", "--port=0"]
    command = [sys.executable, str(ROOT / "launch" / "serve.py"), *flags_, f"--slots={CLIENTS.value}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
      assert server.stdout is not None
      line = server.stdout.readline()
      if " at http" not in line:
        raise SystemExit("the server did not start; its error stands above")
      port = int(line.rpartition(":")[2])
      try:
        compare_searches(folder, port, rng)
        compare_texts(port, rng)
      finally:
        server.terminate()


if __name__ == "__main__":
  app.run(main)

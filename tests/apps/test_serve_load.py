"""Many clients at once, which leave at random: no slot is leaked, no answer is mixed, and the process does not grow.

SELFRAG_JAX_REQUESTS lowers the number of requests.
"""

import asyncio
import json
import os
import random
import re
from collections import Counter

import httpx
import pytest

from selfrag_jax.generate.engine import Engine
from tests.generate.models import tiny
from tests.serving import MODEL, build, process

pytestmark = pytest.mark.slow
REQUESTS, CLIENTS = int(os.environ.get("SELFRAG_JAX_REQUESTS", "1000")), 64
PROMPTS = [f"{n} ships land in port {n * n}" + "!" * (n % 5) for n in range(24)]
GROWTH = 24  # MiB that the process may grow by after its first requests


@pytest.fixture(scope="module")
def expected():
  """The text of each prompt, written alone."""
  engine = Engine(tiny("hybrid"))
  return {prompt: engine.submit(prompt, max_new_tokens=48)[0].wait().text for prompt in PROMPTS}


async def whole(client, prompt, expected, draw):
  response = await client.post("/v1/completions", json=body(prompt))
  if response.status_code == 429:
    assert float(response.headers["retry-after"]) > 0
    return "full"
  assert response.status_code == 200, response.text
  assert response.json()["choices"][0]["text"] == expected
  return "whole"


async def streamed(client, prompt, expected, draw):
  """Read a stream, and leave it in the middle every other time."""
  leaves_after = draw.choice([None, draw.randrange(1, 30)])
  text = ""
  async with client.stream("POST", "/v1/completions", json=body(prompt) | {"stream": True}) as response:
    if response.status_code == 429:
      return "full"
    number = 0
    async for line in response.aiter_lines():
      if line == "data: [DONE]":
        assert text == expected
        return "streamed"
      if line:
        text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        assert expected.startswith(text)
        number += 1
      if number == leaves_after:
        return "left"
  raise AssertionError("the stream has no end")


async def impatient(client, prompt, expected, draw):
  """Wait for a moment only."""
  try:
    await client.post("/v1/completions", json=body(prompt) | {"n": 3}, timeout=draw.uniform(0.001, 0.3))
  except httpx.TimeoutException:
    return "timed out"
  return "in time"


async def with_sources(client, prompt, expected, draw):
  messages = [{"role": "user", "content": "Where do ships land?"}]
  asked = {"model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0, "knowledge_base": "facts"}
  try:
    response = await client.post("/v1/chat/completions", json=asked, timeout=draw.choice([0.1, 120]))
  except httpx.TimeoutException:
    return "timed out with sources"
  if response.status_code == 429:
    return "full"
  assert response.status_code == 200, response.text
  reply = response.json()
  return "sources", reply["choices"][0]["message"]["content"]


def body(prompt):
  return {"model": MODEL, "prompt": prompt, "max_tokens": 48, "temperature": 0}


async def ask(url, expected, count, seed):
  """Let the clients ask until there have been `count` requests; return how each of them ended."""
  queue = iter(range(count))
  ends = Counter()

  async def one(number):
    draw = random.Random(f"{seed} {number}")
    limits = httpx.Limits(max_connections=1)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
      for _ in queue:
        kind = draw.choice([whole, whole, streamed, streamed, streamed, impatient, with_sources])
        prompt = draw.choice(PROMPTS)
        end = await kind(client, prompt, expected[prompt], draw)
        ends[end] += 1
        if end == "full":
          await asyncio.sleep(draw.uniform(0, 0.2))

  await asyncio.gather(*(one(number) for number in range(CLIENTS)))
  return ends


async def drained(client, seconds=30):
  """Return when no text is active or waiting."""
  for _ in range(int(seconds / 0.1)):
    state = (await client.get("/ready")).json()
    if (state["active"], state["waiting"]) == (0, 0):
      return
    await asyncio.sleep(0.1)
  raise AssertionError(f"texts that nobody waits for: {state}")


def mebibytes(pid):
  with open(f"/proc/{pid}/status") as status:
    return int(re.search(r"VmRSS:\s+(\d+) kB", status.read())[1]) / 1024


def test_many_clients_that_leave_at_random(expected, tmp_path):
  folder = build(tmp_path / "facts")
  with process(knowledge_bases=(f"facts={folder}",), settings={"max_waiting": 64}) as server:

    async def run():
      async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        ends = await ask(server.url, expected, max(REQUESTS // 4, 50), 0)
        await drained(client)
        before = mebibytes(server.popen.pid)
        ends += await ask(server.url, expected, REQUESTS - REQUESTS // 4, 1)
        await drained(client)
        after = mebibytes(server.popen.pid)
        # all places are free: as many texts as there are places are taken at once
        full = await client.post("/v1/completions", json=body("a") | {"n": 68, "max_tokens": 1})
        assert full.status_code == 200
        return ends, before, after, (await client.get("/metrics")).text

    ends, before, after, counters = asyncio.run(run())
    assert server.stop() == ""
  print(f"\n{dict(ends)}; {before:.0f} MiB after the first quarter, {after:.0f} MiB at the end")
  answers = {end[1] for end in ends if isinstance(end, tuple)}
  assert len(answers) == 1  # one question, one text
  assert {"whole", "streamed", "left", "timed out"} <= ends.keys()
  assert not re.search(r'status="5\d\d"', counters)
  assert after - before < GROWTH

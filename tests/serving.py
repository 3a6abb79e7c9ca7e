"""A server around a tiny random model: inside a test, or as a process of its own.

python tests/serving.py '{"memory": "FOLDER", "settings": {"port": 0}}'
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = "tiny"
KEY = "a-key-of-a-test-0123456789"
FACTS = [
  {"id": "1", "title": "Avalor", "content": "Ships land in Cadiz, the port of Avalor.", "metadata": {"year": 1990}},
  {"id": "2", "title": "Norway", "content": "Oslo is the capital of Norway.", "metadata": {"year": 2005}},
  {"id": "3", "title": "Bergen", "content": "It rains in Bergen on 240 days a year.", "metadata": {"year": 2015}},
]


def services(
  *,
  memory: str | None = None,
  knowledge_bases: tuple[str, ...] = (),
  keys: tuple[str, ...] = (),
  kind: str = "hybrid",
  slots: int = 4,
  context_tokens: int = 512,
  settings: dict[str, Any] | None = None,
) -> Any:
  """Return the services of a server around a tiny model."""
  from selfrag_jax.apps.serve.embedder import Embedder
  from selfrag_jax.apps.serve.keys import Keys
  from selfrag_jax.apps.serve.knowledge import open_knowledge_bases
  from selfrag_jax.apps.serve.memory import open_memory
  from selfrag_jax.apps.serve.services import Services
  from selfrag_jax.apps.serve.settings import ServerSettings
  from selfrag_jax.generate.engine import Engine
  from tests.generate.models import tiny

  embedder, bases = Embedder(), open_knowledge_bases(knowledge_bases)
  kept = open_memory(memory, embedder) if memory else None
  model = dataclasses.replace(tiny(kind), context_tokens=context_tokens)
  engine = Engine(model, slots=slots, prefix_cache_bytes=1 << 22)  # small: tests look at how the process grows
  chosen = ServerSettings(**(settings or {}))
  return Services(engine, MODEL, embedder, kept, bases, Keys(keys), chosen)


@contextlib.contextmanager
def client(*, key: str | None = None, **options: Any) -> Iterator[Any]:
  """Yield a client of a server without a socket; `options` are those of `services`."""
  from fastapi.testclient import TestClient

  from selfrag_jax.apps.serve.app import create_app

  headers = {"Authorization": f"Bearer {key}"} if key else {}
  has = services(**options)
  # a bug is a status of 500 here, as it is for every client
  with TestClient(create_app(has), "http://localhost", False, headers=headers) as made:
    made.services = has
    yield made


@contextlib.contextmanager
def running(**options: Any) -> Iterator[tuple[str, Any]]:
  """Yield the address of a server with a socket, in a thread of this process, and its services."""
  import uvicorn

  from selfrag_jax.apps.serve.run import bind, configure

  has = services(**{**options, "settings": {"port": 0, "shutdown_seconds": 5.0, **options.get("settings", {})}})
  held = bind(has.settings, has.keys)
  server = uvicorn.Server(configure(has))
  thread = threading.Thread(target=server.run, kwargs={"sockets": [held]})
  thread.start()
  try:
    while not server.started:
      time.sleep(0.01)
    yield f"http://127.0.0.1:{held.getsockname()[1]}", has
  finally:
    server.should_exit = True
    thread.join()


def build(folder: Path, records: list[dict[str, Any]] | None = None) -> str:
  """Build a knowledge base in a folder and return the folder."""
  from selfrag_jax.retrieval import prepare_knowledge_base

  file = folder.parent / f"{folder.name}.jsonl"
  file.write_text("".join(json.dumps(record) + "\n" for record in records or FACTS))
  prepare_knowledge_base([file], folder, "bm25", sync=folder.exists())
  return str(folder)


class Process:
  """A server in a process of its own."""

  def __init__(self, command: list[str], env: dict[str, str] | None = None):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **(env or {})}
    self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    self._errors: list[str] = []
    self._reader = threading.Thread(target=lambda: self._errors.extend(self.popen.stderr), daemon=True)
    self._reader.start()
    line = self.popen.stdout.readline()
    if " at http" not in line:
      raise RuntimeError(f"the server did not start: {line}{self.stop()}")
    self.url = line.split()[-1]

  @property
  def errors(self) -> str:
    """What it has written to its standard error."""
    return "".join(self._errors)

  def stop(self, number: int = signal.SIGTERM) -> str:
    """Send a signal, wait for the end, and return the errors."""
    self.popen.send_signal(number)
    self.popen.wait(60)
    self._reader.join(10)
    return self.errors


@contextlib.contextmanager
def process(env: dict[str, str] | None = None, **options: Any) -> Iterator[Process]:
  """Yield a server in a process of its own, on a free port; `options` are those of `services`."""
  options["settings"] = {"port": 0, **options.get("settings", {})}
  started = Process([sys.executable, __file__, json.dumps(options)], env)
  try:
    yield started
  finally:
    started.popen.kill()
    started.popen.wait()


def main() -> None:
  """Serve what the options describe."""
  sys.path.insert(0, str(ROOT))
  from selfrag_jax.apps.serve.run import bind, serve
  from selfrag_jax.mesh import configure_xla

  configure_xla()
  has = services(**json.loads(sys.argv[1]))
  serve(has, bind(has.settings, has.keys))


if __name__ == "__main__":
  main()

"""All that the routes need: the engine, the encoder, the memory and the knowledge bases of one server."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping

from fastapi import Request

from selfrag_jax.apps.serve.embedder import Embedder
from selfrag_jax.apps.serve.engine_thread import EngineThread
from selfrag_jax.apps.serve.errors import APIError
from selfrag_jax.apps.serve.grounded import Answerer
from selfrag_jax.apps.serve.keys import Keys
from selfrag_jax.apps.serve.knowledge import KnowledgeBase, keep_fresh
from selfrag_jax.apps.serve.memory import Memory
from selfrag_jax.apps.serve.settings import ServerSettings
from selfrag_jax.generate.engine import Engine


@dataclasses.dataclass
class Services:
  """What one server offers. `model` is the name that requests give to the engine's model."""

  engine: Engine
  model: str
  embedder: Embedder
  memory: Memory | None = None
  knowledge: Mapping[str, KnowledgeBase] = dataclasses.field(default_factory=dict)
  keys: Keys = dataclasses.field(default_factory=Keys)
  settings: ServerSettings = dataclasses.field(default_factory=ServerSettings)

  def __post_init__(self):
    places = self.engine.slots + self.settings.max_waiting
    self.writer = EngineThread(self.engine, places, self.settings.request_seconds)
    self.answerer = Answerer(self.writer)
    self.metrics = self.writer.metrics
    self.created = int(time.time())

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[None]:
    """Start what works in the background, and close everything at the end."""
    self.writer.start()
    watch = asyncio.create_task(keep_fresh(self.knowledge, self.settings.reload_seconds, self.metrics))
    try:
      yield
    finally:
      watch.cancel()
      await asyncio.to_thread(self.close)

  def close(self) -> None:
    """End the engine and the threads; what was remembered is on the disk."""
    self.writer.stop()
    for part in (self.answerer, self.embedder, self.memory, *self.knowledge.values()):
      if part is not None:
        part.close()

  def check_model(self, name: str, known: str) -> None:
    """Raise APIError, as OpenAI does, unless a request names a model that the route has."""
    if name != known:
      message = f"the model {name[:100]!r} does not exist here; this route has {known}"
      raise APIError(404, message, param="model", code="model_not_found")

  def need_memory(self) -> Memory:
    """Return the memory. Raises APIError if there is none."""
    if self.memory is None:
      raise APIError(404, "this server has no memory; start it with --memory=FOLDER", code="no_memory")
    return self.memory


def services(request: Request) -> Services:
  """Return the services of the server that got a request."""
  return request.app.state.services

"""The start and the end of the server's process."""

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn

from selfrag_jax.apps.ask import open_model
from selfrag_jax.apps.serve.app import create_app
from selfrag_jax.apps.serve.connection import Connection
from selfrag_jax.apps.serve.embedder import Embedder
from selfrag_jax.apps.serve.keys import VARIABLE, Keys
from selfrag_jax.apps.serve.knowledge import open_knowledge_bases
from selfrag_jax.apps.serve.memory import open_memory
from selfrag_jax.apps.serve.services import Services
from selfrag_jax.apps.serve.settings import ServerSettings
from selfrag_jax.experiments.chat_model import load_with_tokenizer
from selfrag_jax.experiments.self_rag import last_phase
from selfrag_jax.generate.engine import Engine
from selfrag_jax.text.printable import printable

# connections that wait to be accepted; asyncio tries to accept as many at once, and logs each that it cannot have
BACKLOG = 128


def bind(settings: ServerSettings, keys: Keys) -> socket.socket:
  """Return a socket that holds the address of the server; nobody is answered yet.

  Raises ValueError for an address that others reach while there is no key, and OSError if it cannot be had.
  """
  if not settings.is_loopback and not keys:
    raise ValueError(
      f"--host={settings.host} lets other machines ask, and there are no API keys: give --api_keys=FILE, or {VARIABLE}"
    )
  family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
  # named as TCP: by that asyncio sets TCP_NODELAY, without which a small answer waits 40 ms for an acknowledgement
  held = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
  try:
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((settings.host, settings.port))
  except OSError as error:
    held.close()
    if error.errno == errno.EADDRINUSE:
      message = f"port {settings.port} of {settings.host} is in use: give another --port, 0 for a free one"
      raise OSError(message) from None
    raise OSError(f"{settings.host}:{settings.port} cannot be listened to: {error.strerror or error}") from None
  except OverflowError:
    held.close()
    raise ValueError(f"--port={settings.port}: ports go up to 65535") from None
  return held


def open_services(
  model: str,
  *,
  name: str | None = None,
  phase: str | None = None,
  slots: int = 16,
  context_tokens: int | None = None,
  encoder: str | None = None,
  memory: str | None = None,
  knowledge_bases: Sequence[str] = (),
  keys: Keys,
  settings: ServerSettings,
) -> Services:
  """Load everything that a server offers.

  model, phase: as `load_model` takes them; requests call it `name` (None: the last part of `model`). encoder: of the
  memory and of embeddings, as `load_encoder` takes it (None: hashed words). memory: its folder. knowledge_bases: each
  NAME=FOLDER. Raises ValueError for a model without a tokenizer, and as the loaders.
  """
  # what takes the least time comes first: a mistake is told before the model is loaded
  bases, embedder = open_knowledge_bases(knowledge_bases), Embedder(encoder)
  kept = open_memory(memory, embedder) if memory else None
  # a run of the Self-RAG phases makes its tokenizer anew; others have that of the model that they began with
  is_self_rag = last_phase(model) is not None
  loaded = open_model(model, phase)[0] if is_self_rag else load_with_tokenizer(model, phase=phase)
  engine = Engine(loaded, slots=slots, context_tokens=context_tokens)
  return Services(engine, name or Path(model).name, embedder, kept, bases, keys, settings)


class _Server(uvicorn.Server):
  """A server that tells its address once it answers, and ends by itself after a signal, with the exit code 0."""

  def __init__(self, config: uvicorn.Config, address: str):
    super().__init__(config)
    self._address = address

  async def startup(self, sockets: list[socket.socket] | None = None) -> None:
    await super().startup(sockets)
    print(self._address, flush=True)

  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    handlers = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
      yield
    finally:
      for number, handler in handlers.items():
        signal.signal(number, handler)


def configure(services: Services) -> uvicorn.Config:
  """Return how uvicorn shall run the app of services."""
  return uvicorn.Config(
    create_app(services),
    http=Connection,
    backlog=BACKLOG,
    ws="none",
    lifespan="on",
    log_level="warning",
    access_log=False,  # what people ask is nobody's business; /metrics counts
    server_header=False,
    timeout_graceful_shutdown=max(1, round(services.settings.shutdown_seconds)),
  )


def serve(services: Services, held: socket.socket) -> None:
  """Answer requests until SIGTERM or Ctrl-C; then finish what runs, as far as there is time, and close everything."""
  host, port = held.getsockname()[:2]
  address = f"{printable(services.model)} at http://{f'[{host}]' if ':' in host else host}:{port}"
  try:
    asyncio.run(_Server(configure(services), address).serve(sockets=[held]))
  finally:
    services.close()  # a second Ctrl-C leaves out the end of the app

"""The ASGI app of the server."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

from selfrag_jax import __version__
from selfrag_jax.apps.serve import chat, embeddings, search, status
from selfrag_jax.apps.serve.documents import ErrorReply
from selfrag_jax.apps.serve.errors import add_handlers
from selfrag_jax.apps.serve.gate import Gate
from selfrag_jax.apps.serve.page import page_routes
from selfrag_jax.apps.serve.services import Services

# said once for all routes: a body that is refused is a 400 here, not FastAPI's 422
ERRORS: dict[int | str, dict[str, Any]] = {
  "4XX": {"model": ErrorReply, "description": "The request is refused."},
  "5XX": {"model": ErrorReply, "description": "The server failed, or is being stopped."},
}


def create_app(services: Services) -> FastAPI:
  """Return the app that offers services; they start with it, and are closed with it."""

  @contextlib.asynccontextmanager
  async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with services.running():
      yield

  app = FastAPI(
    title="selfrag_jax",
    version=__version__,
    lifespan=lifespan,
    docs_url=None,  # these pages load scripts from elsewhere
    redoc_url=None,
    redirect_slashes=False,
    responses=ERRORS,
  )
  app.state.services = services
  add_handlers(app)
  key = Security(HTTPBearer(auto_error=False))  # for the document: the gate has asked for it already
  for router in (chat.router, embeddings.router, search.router, status.keyed):
    app.include_router(router, dependencies=[key])
  for router in (status.router, page_routes()):
    app.include_router(router)
  app.add_middleware(Gate, settings=services.settings, keys=services.keys, metrics=services.metrics)
  return app

"""The routes that tell what the server has, and how it is."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from selfrag_jax.apps.serve.documents import Health, Model, Models, Ready
from selfrag_jax.apps.serve.errors import APIError, json_response
from selfrag_jax.apps.serve.services import Services, services

router, keyed = APIRouter(), APIRouter()  # open to all, and to those who have a key


def _models(has: Services) -> list[dict[str, Any]]:
  kinds = {has.model: "chat", has.embedder.name: "embeddings"}
  return [
    {"id": name, "object": "model", "created": has.created, "owned_by": "selfrag_jax", "kind": kind}
    for name, kind in kinds.items()
  ]


@keyed.get("/v1/models", tags=["models"], response_model=Models)
async def list_models(request: Request) -> Response:
  """List the model that writes, and the encoder; `kind` (chat, embeddings) is not OpenAI's."""
  return json_response({"object": "list", "data": _models(services(request))})


@keyed.get("/v1/models/{model:path}", tags=["models"], response_model=Model)
async def get_model(request: Request, model: str) -> Response:
  """Describe a model."""
  for known in _models(services(request)):
    if known["id"] == model:
      return json_response(known)
  raise APIError(404, f"the model {model[:100]!r} does not exist here", param="model", code="model_not_found")


@router.get("/health", tags=["status"], response_model=Health)
async def health() -> Response:
  """Tell that the process answers."""
  return json_response({"status": "ok"})


@router.get("/ready", tags=["status"], response_model=Ready)
async def ready(request: Request) -> Response:
  """Tell whether texts can be written: 503 if the engine has ended."""
  writer = services(request).writer
  if not writer.is_alive:
    raise APIError(503, "the engine has ended; the log says why", code="not_ready")
  return json_response({"status": "ready", **writer.engine.load()})


@keyed.get("/metrics", tags=["status"], response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
  """Return the counters in the text format of Prometheus."""
  counters = services(request).metrics
  return Response(counters.text(), headers={"Content-Type": counters.content_type})

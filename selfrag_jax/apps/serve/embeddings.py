"""The route that embeds texts."""

import base64

import numpy as np
from fastapi import APIRouter, Request, Response

from selfrag_jax.apps.serve.documents import Embeddings
from selfrag_jax.apps.serve.errors import APIError, json_response
from selfrag_jax.apps.serve.schemas import EmbeddingRequest
from selfrag_jax.apps.serve.services import services

router = APIRouter()


@router.post("/v1/embeddings", tags=["embeddings"], response_model=Embeddings)
async def embed(request: Request, body: EmbeddingRequest) -> Response:
  """Embed texts as vectors, as lists of numbers or as base64 of little-endian float32."""
  has = services(request)
  has.check_model(body.model, has.embedder.name)
  texts = [body.input] if isinstance(body.input, str) else body.input
  if not all(text.strip() for text in texts):
    raise APIError(400, "a text of the input is empty; leave it out", param="input", code="invalid_value")
  if body.dimensions not in (None, has.embedder.width):
    message = f"the vectors of {has.embedder.name} have {has.embedder.width} dimensions, and cannot be shortened"
    raise APIError(400, message, param="dimensions", code="invalid_value")
  rows = await has.embedder.embed(texts)
  count = await has.writer.in_background(has.embedder.count, texts)
  show = _base64 if body.encoding_format == "base64" else np.ndarray.tolist
  data = [{"object": "embedding", "index": i, "embedding": show(row)} for i, row in enumerate(rows)]
  usage = {"prompt_tokens": count, "total_tokens": count}
  return json_response({"object": "list", "data": data, "model": body.model, "usage": usage})


def _base64(row: np.ndarray) -> str:
  return base64.b64encode(row.astype("<f4").tobytes()).decode()

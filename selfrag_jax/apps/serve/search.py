"""The routes that search knowledge bases and the memory, and that change the memory."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from selfrag_jax.apps.serve.documents import Forgotten, KnowledgeBases, MemoryPage, Passage, Passages
from selfrag_jax.apps.serve.errors import json_response
from selfrag_jax.apps.serve.knowledge import find
from selfrag_jax.apps.serve.schemas import ChangedMemory, NewMemory, SearchRequest
from selfrag_jax.apps.serve.services import services

router = APIRouter()


def _listed(data: list[dict[str, Any]], **more: Any) -> Response:
  return json_response({"object": "list", "data": data, **more})


@router.get("/v1/knowledge_bases", tags=["search"], response_model=KnowledgeBases)
async def list_knowledge_bases(request: Request) -> Response:
  """List the knowledge bases, with the number of their documents."""
  bases = services(request).knowledge.values()
  return _listed([{"id": base.name, "object": "knowledge_base", "documents": len(base)} for base in bases])


@router.post("/v1/search", tags=["search"], response_model=Passages)
async def search(request: Request, body: SearchRequest) -> Response:
  """Find the best passages for a query, best first."""
  has = services(request)
  place = has.need_memory() if body.knowledge_base is None else find(has.knowledge, body.knowledge_base)
  return _listed(await place.search(body.query, body.top_k, body.where))


@router.get("/v1/memory", tags=["memory"], response_model=MemoryPage)
async def list_memory(
  request: Request,
  limit: Annotated[int, Query(ge=1, le=1000)] = 100,
  offset: Annotated[int, Query(ge=0, le=1 << 31)] = 0,
  query: Annotated[str, Query(max_length=10_000)] = "",
) -> Response:
  """List the texts of the memory, the newest first, or those like a query, the closest first."""
  data, total = await services(request).need_memory().page(query, limit, offset)
  return _listed(data, total=total)


@router.post("/v1/memory", tags=["memory"], status_code=201, response_model=Passage)
async def remember(request: Request, body: NewMemory) -> Response:
  """Remember a text; it is on the disk when the answer comes."""
  memory = services(request).need_memory()
  return json_response(await memory.add(body.text, body.source, body.key), 201)


@router.get("/v1/memory/{id:path}", tags=["memory"], response_model=Passage)
async def get_memory(request: Request, id: str) -> Response:
  """Return a text of the memory."""
  return json_response(await services(request).need_memory().get(id))


@router.put("/v1/memory/{id:path}", tags=["memory"], response_model=Passage)
async def change_memory(request: Request, id: str, body: ChangedMemory) -> Response:
  """Change a text of the memory, which becomes the newest."""
  return json_response(await services(request).need_memory().change(id, body.text))


@router.delete("/v1/memory/{id:path}", tags=["memory"], response_model=Forgotten)
async def forget(request: Request, id: str) -> Response:
  """Forget a text."""
  memory = services(request).need_memory()
  await memory.do(memory.store.delete, id)
  return json_response({"id": id, "object": "memory", "deleted": True})

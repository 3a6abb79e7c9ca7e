"""The routes that write texts: chat completions, with or without sources, and completions."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from selfrag_jax.apps.serve.documents import ChatCompletion, TextCompletion
from selfrag_jax.apps.serve.errors import APIError, invalid, json_response
from selfrag_jax.apps.serve.knowledge import find
from selfrag_jax.apps.serve.options import CHAT_TOKENS, COMPLETION_TOKENS, length, settings_of
from selfrag_jax.apps.serve.replies import ChatReply, CompletionReply, Reply
from selfrag_jax.apps.serve.schemas import ChatRequest, CompletionRequest, Sampling
from selfrag_jax.apps.serve.services import Services, services
from selfrag_jax.apps.serve.streams import EventStream, unless_gone
from selfrag_jax.apps.serve.texts import Texts

router = APIRouter()
EVENT = {"type": "object", "properties": {"data": {"type": "string", "description": "a chunk as JSON, or [DONE]"}}}
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": EVENT}}}}


@router.post("/v1/chat/completions", tags=["texts"], response_model=ChatCompletion, responses=STREAM)
async def chat(request: Request, body: ChatRequest) -> Response:
  """Write the assistant's next message; from a knowledge base or the memory, the reply has `sources`.

  A source has a number, which `[1]` in the text cites, and id, title, text, source, score and is_cited; the last chunk
  of a stream has them.
  """
  began, has = time.perf_counter(), services(request)
  has.check_model(body.model, has.model)
  asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
  messages = [{"role": _role(message.role), "content": message.text} for message in body.messages]
  n, is_grounded = body.n or 1, body.memory or body.knowledge_base is not None
  reply = ChatReply(has.model, has.engine.tokenizer, logprobs=bool(body.logprobs), count=n)
  most, context = has.settings.max_tokens, has.engine.context_tokens
  if is_grounded:
    _check_grounded(body, messages)
    place = has.need_memory().store if body.memory else find(has.knowledge, body.knowledge_base or "")
    settings = settings_of(body, length(asked, min(CHAT_TOKENS, context // 2), 0, context, most))
    *history, question = messages
    given = {"top_k": body.top_k, "history": history, "settings": settings, "began": began}
    texts = has.answerer.answer(question["content"], place, **given)
  else:
    prompt = await _prompt(has, messages)
    settings = settings_of(body, length(asked, CHAT_TOKENS, len(prompt), context, most))
    texts = has.writer.write([prompt], settings, n, began)
  return await _send(request, body, reply, texts)


def _role(role: str) -> str:
  return "system" if role == "developer" else role


def _check_grounded(body: ChatRequest, messages: list[dict[str, str]]) -> None:
  if (body.n or 1) > 1:
    raise APIError(400, "an answer with sources is one: leave n out", param="n", code="invalid_value")
  if body.logprobs:
    raise APIError(400, "answers with sources have no logprobs: leave it out", param="logprobs", code="invalid_value")
  if messages[-1]["role"] != "user":
    raise APIError(400, "the last message must be the user's question", param="messages", code="invalid_value")


async def _prompt(has: Services, messages: list[dict[str, str]]) -> list[int]:
  try:
    return await has.writer.in_background(has.engine.render, {"messages": messages})
  except ValueError as error:
    raise invalid(error, "messages") from None


@router.post("/v1/completions", tags=["texts"], response_model=TextCompletion, responses=STREAM)
async def complete(request: Request, body: CompletionRequest) -> Response:
  """Continue texts, or lists of token ids."""
  began, has = time.perf_counter(), services(request)
  has.check_model(body.model, has.model)
  prompts = _prompts(body.prompt)
  rows = await has.writer.in_background(lambda: [_ids(has, prompt) for prompt in prompts])
  longest, most = max(map(len, rows)), has.settings.max_tokens
  tokens = length(body.max_tokens, COMPLETION_TOKENS, longest, has.engine.context_tokens, most)
  n, settings = body.n or 1, settings_of(body, tokens)
  scored, count = body.logprobs is not None, n * len(rows)
  reply = CompletionReply(has.model, has.engine.tokenizer, logprobs=scored, count=count)
  return await _send(request, body, reply, has.writer.write(rows, settings, n, began))


def _prompts(prompt: Any) -> list[Any]:
  return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


def _ids(has: Services, prompt: str | list[int]) -> list[int]:
  try:
    return has.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
  except ValueError as error:
    raise invalid(error, "prompt") from None


async def _send(
  request: Request, body: Sampling, reply: Reply, texts: "contextlib.AbstractAsyncContextManager[Texts]"
) -> Response:
  """Return texts as a response, a stream if the request asks for one."""
  if not body.stream:
    return json_response(await unless_gone(request, _whole(reply, texts)))
  async with contextlib.AsyncExitStack() as stack:
    begun = await stack.enter_async_context(texts)
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return EventStream(reply.chunks(begun, with_usage=with_usage), stack.pop_all())
  raise AssertionError("the stack swallows no error")


async def _whole(reply: Reply, texts: "contextlib.AbstractAsyncContextManager[Texts]") -> Mapping[str, Any]:
  async with texts as begun:
    return await reply.whole(begun)

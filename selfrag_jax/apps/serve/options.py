"""The settings of a text from the fields of a request."""

import secrets
from collections.abc import Mapping
from typing import Any

from selfrag_jax.apps.serve.errors import APIError, invalid
from selfrag_jax.apps.serve.schemas import ObjectFormat, Sampling, SchemaFormat
from selfrag_jax.checked import LARGEST_INT
from selfrag_jax.generate.generation import GenerationSettings

CHAT_TOKENS, COMPLETION_TOKENS = 512, 16  # where a request names no number; the second is OpenAI's
LEAST = 1e-6  # of a temperature that is not greedy, and of top_p


def length(asked: int | None, default: int, prompt_tokens: int, context_tokens: int, most: int) -> int:
  """Return the most tokens of a text: as many as were asked for, or the default as far as the context has room.

  Raises APIError for more than `most`, and for more than there is room for.
  """
  if asked is not None and asked > most:
    raise APIError(400, f"max_tokens is {asked:,}; at most {most:,}", param="max_tokens", code="invalid_value")
  room = context_tokens - prompt_tokens
  if room < (asked or 1):
    message = (
      f"the context has {context_tokens:,} tokens; the prompt has {prompt_tokens:,}, and {asked or 1:,} more are asked "
      "for: shorten the prompt, or lower max_tokens"
    )
    raise APIError(400, message, code="context_length_exceeded")
  return asked or min(default, most, room)


def settings_of(body: Sampling, max_new_tokens: int) -> GenerationSettings:
  """Return the settings of the texts of a request. Raises APIError for what the engine does not take."""
  temperature, top_p = 1.0 if body.temperature is None else body.temperature, body.top_p
  stop = [body.stop] if isinstance(body.stop, str) else body.stop
  try:
    return GenerationSettings(
      max_new_tokens=max_new_tokens,
      temperature=temperature if temperature >= LEAST else 0.0,
      top_p=1.0 if top_p is None else max(top_p, LEAST),
      stop=tuple(stop or ()),
      seed=secrets.randbits(62) if body.seed is None else body.seed & LARGEST_INT,
      schema=_schema(body),
    )
  except ValueError as error:
    raise invalid(error) from None


def _schema(body: Sampling) -> Mapping[str, Any] | None:
  match body.response_format:
    case ObjectFormat():
      return {"type": "object"}
    case SchemaFormat(json_schema=given):
      return given.schema_
  return None

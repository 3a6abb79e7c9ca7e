"""Engines behind an HTTP endpoint that speaks OpenAI's protocol: OpenAI, vLLM, Ollama, llama.cpp and others."""

import base64
import os
import threading
from typing import Any

from selfrag_jax.textgrad.engine import MeteredEngine
from selfrag_jax.textgrad.limits import Completion, Content, EngineError

OLLAMA = "http://localhost:11434/v1"
PREFIXES = ("gpt-", "chatgpt-", "o1", "o3", "o4", "claude-", "gemini-", "openai/")  # names that are taken as models
NO_KEY = "none"  # what is sent where there is no key: never that of another endpoint
ENDPOINTS = {  # prefix -> address, name of the environment variable with the key
  "claude-": ("https://api.anthropic.com/v1/", "ANTHROPIC_API_KEY"),
  "gemini-": ("https://generativelanguage.googleapis.com/v1beta/openai/", "GEMINI_API_KEY"),
}


class OpenAIEngine(MeteredEngine):
  """A model behind `BASE_URL/chat/completions`, through the package openai; keys are never logged or cached."""

  def __init__(
    self,
    model_string: str = "gpt-4o-mini",
    base_url: str | None = None,
    api_key: str | None = None,
    *,
    timeout: float = 120.0,
    max_retries: int = 5,
    temperature: float = 0.0,
    max_tokens: int = 2000,
    **options: Any,
  ):
    """Make an engine.

    Args:
      model_string: name of the model.
      base_url: address of the endpoint; OpenAI's, or that of the environment's OPENAI_BASE_URL, by default.
      api_key: key; the environment's OPENAI_API_KEY by default. An endpoint on this machine needs none.
      timeout: seconds that a call may take.
      max_retries: how often a call is made again, with growing pauses, after a time-out, HTTP 408, 409, 429 or 5xx.
      temperature, max_tokens: of every call, as other sampling parameters in `options`.
      **options: limits of `MeteredEngine`.

    Raises ValueError when a key is needed and there is none.
    """
    super().__init__(model_string, temperature=temperature, max_tokens=max_tokens, **options)
    self.base_url = base_url or os.environ.get("OPENAI_BASE_URL")
    self._key = api_key or os.environ.get("OPENAI_API_KEY")
    if not self._key:
      if self.base_url is None:
        raise ValueError("no key: set the environment variable OPENAI_API_KEY, or give the base_url of your own server")
      self._key = NO_KEY
    self._timeout, self._max_retries = timeout, max_retries
    self._client: Any = None
    self._lock = threading.Lock()

  def generate(self, content: Content, system_prompt: str | None = None, **sampling: Any) -> str:
    """Answer a prompt. Raises as `MeteredEngine.generate`, and EngineError for an empty answer."""
    if text := super().generate(content, system_prompt, **sampling):
      return text
    raise EngineError(f"{self._where()} answered nothing")

  def complete(self, content: Content, system_prompt: str | None, **sampling: Any) -> Completion:
    """Ask the endpoint. Raises EngineError when it does not answer after the retries."""
    client = self._connect()
    messages: Any = messages_of(content, system_prompt)
    import openai

    try:
      answer = client.chat.completions.create(model=self.model_string, messages=messages, **sampling)
      text = answer.choices[0].message.content
      usage = answer.usage
    except openai.APIStatusError as error:
      raise EngineError(f"{self._where()} answered HTTP {error.status_code}: {_short(error.message)}") from None
    except openai.APITimeoutError:
      raise EngineError(f"{self._where()} did not answer within {self._timeout:g} s") from None
    except openai.OpenAIError as error:
      raise EngineError(f"{self._where()} could not be asked: {_short(str(error))}") from None
    except (AttributeError, IndexError, TypeError, ValueError) as error:
      raise EngineError(f"{self._where()} sent no chat completion: {_short(str(error))}") from None
    text = text or ""  # `generate` refuses it, when what it cost is booked
    if usage is None:
      return Completion(text, self.count_tokens(content) + self.count_tokens(system_prompt), self.count_tokens(text))
    return Completion(text, usage.prompt_tokens, usage.completion_tokens)

  def _connect(self) -> Any:
    with self._lock:
      if self._client is None:
        try:
          import openai
        except ImportError:
          raise ImportError("engines behind an endpoint need the package openai: pip install openai") from None
        self._client = openai.OpenAI(
          api_key=self._key, base_url=self.base_url, timeout=self._timeout, max_retries=self._max_retries
        )
      return self._client

  def _where(self) -> str:
    return f"{self.model_string} at {self.base_url or 'OpenAI'}"


class ChatExternalClient(OpenAIEngine):
  """A model behind a client that the caller has made, such as `openai.OpenAI(base_url=..., api_key=...)`."""

  def __init__(self, client: Any, model_string: str, **options: Any):
    """Make an engine; `options` are those of `OpenAIEngine` but for address, key and retries, which the client has."""
    super().__init__(model_string, str(client.base_url), "none", **options)
    self._client = client


def endpoint_engine(name: str, **options: Any) -> OpenAIEngine | None:
  """Return the engine of a model whose provider speaks this protocol, or `ollama-MODEL`; None for another name.

  `options` are those of `OpenAIEngine`. The key is that of the endpoint's own environment variable.
  """
  if name.startswith("ollama-"):
    return OpenAIEngine(name.removeprefix("ollama-"), OLLAMA, **{"api_key": NO_KEY, **options})
  if not name.startswith(PREFIXES):
    return None
  for prefix, (url, variable) in ENDPOINTS.items():
    if name.startswith(prefix):
      options = {"base_url": url, "api_key": os.environ.get(variable, NO_KEY), **options}
  return OpenAIEngine(name.removeprefix("openai/"), **options)


def messages_of(content: Content, system_prompt: str | None) -> list[dict[str, Any]]:
  """Return the messages of a call. Raises ValueError for an image of an unknown kind."""
  messages: list[dict[str, Any]] = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
  return [*messages, {"role": "user", "content": content if isinstance(content, str) else [_part(p) for p in content]}]


def _part(part: str | bytes) -> dict[str, Any]:
  if isinstance(part, str):
    return {"type": "text", "text": part}
  kinds = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
  kind = next((kind for magic, kind in kinds.items() if part.startswith(magic)), None)
  if kind is None:
    raise ValueError("the image is no PNG, JPEG, GIF or WebP")
  return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(part).decode()}"}}


def _short(message: str) -> str:
  return message if len(message) <= 300 else message[:300] + " …"

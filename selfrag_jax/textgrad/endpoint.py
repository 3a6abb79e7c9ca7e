"""Engines behind an HTTP endpoint that speaks OpenAI's protocol: OpenAI, vLLM, Ollama, llama.cpp and others."""

import base64
import json
import math
import os
import threading
import urllib.parse
from typing import Any

from selfrag_jax.textgrad.checks import check_text, clip
from selfrag_jax.textgrad.engine import MeteredEngine
from selfrag_jax.textgrad.limits import Completion, Content, EngineError

OLLAMA = "http://localhost:11434/v1"
PREFIXES = ("gpt-", "chatgpt-", "o1", "o3", "o4", "claude-", "gemini-", "openai/")  # the beginnings of model names
NO_KEY = "none"  # sent where there is no key: the key of another endpoint is never sent
OPENAI_KEY = "OPENAI_API_KEY"
OPENAI_HOSTS = ("api.openai.com", "eu.api.openai.com", "us.api.openai.com")  # the hosts that OPENAI_KEY is for
SECRET = 8  # the fewest characters of a key: cutting out a shorter placeholder would damage ordinary words
ENDPOINTS = {  # prefix -> address, environment variable with the key
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
    api_key_env: str | None = None,
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
      api_key: key. An endpoint on this machine needs none.
      api_key_env: name of the environment variable with the key. By default, OPENAI_API_KEY is read if the address is
        OpenAI's own, with https, and nothing for other addresses.
      timeout: seconds that a call may take.
      max_retries: how often a call is made again, with growing pauses, after a time-out, HTTP 408, 409, 429 or 5xx.
      temperature, max_tokens: for every call, like other sampling parameters in `options`.
      **options: limits of `MeteredEngine`.

    Raises ValueError when a key is needed and there is none, and for an address or an option that no endpoint takes.
    """
    if not check_text(model_string, "the name of the model").strip():
      raise ValueError("no model: give the name that the endpoint has for it")
    super().__init__(model_string, temperature=temperature, max_tokens=max_tokens, **options)
    if not 0 < timeout < math.inf or max_retries < 0:
      raise ValueError(f"timeout = {timeout} must be above 0, and max_retries = {max_retries} not below it")
    self.base_url = base_url or os.environ.get("OPENAI_BASE_URL")
    self._is_openai = _is_openai(self.base_url)
    self.address = "" if self._is_openai else f"{(self.base_url or '').rstrip('/')} "
    variable = api_key_env or (OPENAI_KEY if self._is_openai else None)
    self._key = _checked(api_key or (os.environ.get(variable, "") if variable else ""), variable)
    if not self._key:
      if api_key_env:
        raise ValueError(f"no key: the environment variable {api_key_env} is not set")
      if self._is_openai:
        raise ValueError(f"no key: set the environment variable {OPENAI_KEY}, or give the base_url of your own server")
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
      if isinstance(answer, str):
        raise ValueError(repr(answer))
      text, usage = answer.choices[0].message.content or "", answer.usage
      if not isinstance(text, str):
        raise ValueError(f"its text is {type(text).__name__}")
    except openai.APIStatusError as error:
      failed = f"answered HTTP {error.status_code}: {self._refused(error)}"
    except openai.APITimeoutError:
      failed = f"did not answer within {self._timeout:g} s"
    except openai.APIConnectionError as error:
      failed = f"could not be asked: {error.__cause__ or error}"
    except openai.OpenAIError as error:
      failed = f"could not be asked: {error}"
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
      failed = f"sent no chat completion: {error}"
    else:
      text = self._without_key(text)  # `generate` refuses an empty text after its cost is booked
      return Completion(text, *(getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens")))
    raise EngineError(clip(self._without_key(f"{self._where()} {failed}")))  # no cause holds the request

  def _refused(self, error: Any) -> str:
    if 300 <= error.status_code < 400:
      try:
        to = urllib.parse.urlsplit(urllib.parse.urljoin(str(error.response.url), error.response.headers["location"]))
      except (KeyError, ValueError):
        return "it redirects to an invalid address"
      host = to.netloc.rpartition("@")[2]
      return f"it redirects to {to.scheme}://{host}{to.path}, which is not followed; give that as base_url"
    if error.status_code in (401, 403) and self._key == NO_KEY:
      return f"{error.message} (no key was sent: {OPENAI_KEY} goes to OpenAI alone; give api_key or api_key_env)"
    return error.message

  def _without_key(self, text: str) -> str:
    if len(self._key) < SECRET:
      return text
    for form in {self._key, repr(self._key)[1:-1], json.dumps(self._key)[1:-1], urllib.parse.quote(self._key, safe="")}:
      text = text.replace(form, "[key]")
    return text

  def _connect(self) -> Any:
    with self._lock:
      if self._client is None:
        try:
          import openai
        except ImportError:
          raise ImportError("engines behind an endpoint need the package openai: pip install openai") from None
        from selfrag_jax.textgrad.http_client import BoundedClient  # needs httpx, as openai does

        self._client = openai.OpenAI(
          api_key=self._key,
          base_url=self.base_url,
          timeout=self._timeout,
          max_retries=self._max_retries,
          http_client=BoundedClient(self._key, self._timeout, is_openai=self._is_openai),
        )
      return self._client

  def _where(self) -> str:
    return f"{self.model_string} at {self.base_url or 'OpenAI'}"


def _is_openai(url: str | None) -> bool:
  """Tell whether an address is OpenAI's own. Raises ValueError for an invalid address, or one with a password."""
  if url is None:
    return True
  try:
    parts = urllib.parse.urlsplit(check_text(url, "base_url"))
    port = parts.port
  except ValueError as error:
    raise ValueError(f"base_url: {error}") from None
  if parts.username is not None or parts.password is not None or "@" in parts.netloc:
    raise ValueError("base_url holds a user's name or a password (before @); give api_key or api_key_env instead")
  if "?" in url or "#" in url:  # each call appends its path; the part after ? may be a key
    raise ValueError("base_url goes on after its path, by ? or #; give such parameters as extra_query={...}")
  is_printable = url.isprintable() and not any(c.isspace() or c == "\\" for c in url)
  if parts.scheme not in ("http", "https") or not parts.hostname or not is_printable:
    raise ValueError(f"base_url = {clip(url)!r} is no address such as http://localhost:8000/v1")
  return parts.scheme == "https" and parts.hostname in OPENAI_HOSTS and port in (None, 443)


def _checked(key: str, variable: str | None) -> str:
  """Return a key that a header can hold. Raises ValueError, which does not quote the key, for another."""
  key = check_text(key, variable or "api_key").strip()
  if not (key.isascii() and key.isprintable()):
    raise ValueError(f"the key in {variable or 'api_key'} holds characters that no HTTP header may have")
  return key


class ChatExternalClient(OpenAIEngine):
  """A model behind a client that the caller has made, such as `openai.OpenAI(base_url=..., api_key=...)`."""

  def __init__(self, client: Any, model_string: str, **options: Any):
    """Make an engine; `options` are `OpenAIEngine`'s except for address, key and retries, which the client has."""
    super().__init__(model_string, str(client.base_url), NO_KEY, **options)
    key = getattr(client, "api_key", None)
    self._key = key if isinstance(key, str) else NO_KEY  # to recognise an echo of it
    self._client = client


def endpoint_engine(name: str, **options: Any) -> OpenAIEngine | None:
  """Return the engine of a model whose provider speaks OpenAI's protocol, or of `ollama-MODEL`; None for other names.

  `options` are those of `OpenAIEngine`. The key comes from the endpoint's own environment variable.
  """
  if name.startswith("ollama-"):
    return OpenAIEngine(name.removeprefix("ollama-"), **{**options, "base_url": options.get("base_url") or OLLAMA})
  if not name.startswith(PREFIXES):
    return None
  for prefix, (url, variable) in ENDPOINTS.items():
    if name.startswith(prefix) and not options.get("base_url"):
      options = {**options, "base_url": url}
      if not options.get("api_key") and not options.get("api_key_env"):
        options["api_key"] = os.environ.get(variable, NO_KEY)
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

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
    messages: list[dict[str, Any]] = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    messages.append({"role": "user", "content": content if isinstance(content, str) else [_part(p) for p in content]})
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


def get_engine(engine_name: str, **options: Any) -> OpenAIEngine:
  """Return the engine of a name: that of a model, `ollama-MODEL`, or `experimental:MODEL` as TextGrad has it.

  `options` are those of `OpenAIEngine`; `cache`, a file, an `EngineCache`, anything with `get` and `set`, or None, goes
  with `experimental:` alone, as in TextGrad. The key is that of the endpoint's own environment variable. Raises
  ValueError for a name that is none, or a cache that is none.
  """
  is_experimental = engine_name.startswith("experimental:")
  name = engine_name.removeprefix("experimental:")
  if "cache" in options:
    options["cache"] = _cache(options["cache"], engine_name, is_experimental)
  if name.startswith("ollama-"):
    return OpenAIEngine(name.removeprefix("ollama-"), OLLAMA, **{"api_key": NO_KEY, **options})
  if not name.startswith(PREFIXES):
    raise ValueError(
      f"unknown engine {engine_name!r}: give a model such as 'gpt-4o-mini' or 'ollama-qwen3', "
      "or OpenAIEngine(model, base_url=...) for a server of your own"
    )
  for prefix, (url, variable) in ENDPOINTS.items():
    if name.startswith(prefix):
      options = {"base_url": url, "api_key": os.environ.get(variable, NO_KEY), **options}
  return OpenAIEngine(name.removeprefix("openai/"), **options)


def _cache(cache: Any, name: str, is_experimental: bool) -> Any:
  if not is_experimental:
    raise ValueError(f"cache goes with 'experimental:{name}'; or make OpenAIEngine(model, cache=FILE)")
  if cache is True:
    folder = os.path.join(os.path.expanduser(os.environ.get("XDG_CACHE_HOME", "~/.cache")), "selfrag_jax")
    os.makedirs(folder, exist_ok=True)
    return os.path.join(folder, "answers.sqlite")
  if cache is False or cache is None:
    return None
  if isinstance(cache, (str, os.PathLike)):
    return os.fspath(cache)
  if hasattr(cache, "get") and hasattr(cache, "put"):
    return cache
  if hasattr(cache, "get") and hasattr(cache, "set"):
    return _OtherCache(cache)
  raise ValueError(f"cache is a file, an EngineCache, True or False, not {type(cache).__name__}")


class _OtherCache:
  """A cache with `get` and `set`, such as diskcache's, under the names of ours."""

  def __init__(self, cache: Any):
    self.get, self.put = cache.get, cache.set


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

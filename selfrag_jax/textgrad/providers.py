"""An engine for all providers that the package LiteLLM knows."""

import importlib.util
import os
import sys
from typing import Any

from selfrag_jax.textgrad.endpoint import SECRET, messages_of
from selfrag_jax.textgrad.engine import MeteredEngine
from selfrag_jax.textgrad.limits import Completion, Content, EngineError


class LiteLLMEngine(MeteredEngine):
  """A model by LiteLLM's name for it, such as `anthropic/claude-sonnet-4-0` or `bedrock/...`.

  LiteLLM finds the keys: it reads each provider's own environment variables.
  """

  def __init__(
    self,
    model_string: str,
    *,
    timeout: float = 120.0,
    max_retries: int = 5,
    temperature: float = 0.0,
    max_tokens: int = 2000,
    **options: Any,
  ):
    """Make an engine; LiteLLM is imported at the first call.

    Args:
      model_string: LiteLLM's name of the model.
      timeout: seconds that a call may take.
      max_retries: how often LiteLLM makes a call again.
      temperature, max_tokens: for every call, like other sampling parameters in `options`; None omits one.
      **options: limits of `MeteredEngine`, `cache=True` among them.

    Raises ImportError if LiteLLM is not installed, ValueError without a model.
    """
    if not model_string:
      raise ValueError("no model: write 'experimental:gpt-4o', or LiteLLM's name of another model")
    if sys.modules.get("litellm") is None and importlib.util.find_spec("litellm") is None:
      raise ImportError(
        f"{model_string!r} goes through LiteLLM, which is not installed: pip install 'selfrag_jax[litellm]'"
      )
    super().__init__(model_string, temperature=temperature, max_tokens=max_tokens, **options)
    self._timeout, self._max_retries = timeout, max_retries

  def generate(self, content: Content, system_prompt: str | None = None, **sampling: Any) -> str:
    """Answer a prompt. Raises as `MeteredEngine.generate`, and EngineError for an empty answer."""
    if text := super().generate(content, system_prompt, **sampling):
      return text
    raise EngineError(f"{self.model_string} through LiteLLM answered nothing")

  def complete(self, content: Content, system_prompt: str | None, **sampling: Any) -> Completion:
    """Ask LiteLLM. Raises EngineError when it gives no answer."""
    litellm: Any = importlib.import_module("litellm")
    messages = messages_of(content, system_prompt)
    options = {"timeout": self._timeout, "num_retries": self._max_retries, **sampling}
    answer, failed = {}, ""
    try:
      answer = litellm.completion(model=self.model_string, messages=messages, **options)
    except Exception as error:  # each provider has errors of its own
      failed = f"{type(error).__name__}: {error}"
    if failed:  # raised outside of `except`: no cause may hold the request
      raise EngineError(f"{self.model_string} through LiteLLM: {_without_keys(failed)[:300]}")
    try:
      text = answer["choices"][0]["message"]["content"]
      usage = answer.get("usage") or {}
      tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
    except (AttributeError, LookupError, TypeError) as error:
      raise EngineError(f"{self.model_string} through LiteLLM sent no chat completion: {error}") from None
    return Completion(text or "", *tokens)  # `generate` refuses an empty text after its cost is booked


def _without_keys(text: str) -> str:
  """Cut out the values of all environment variables named like a key: only LiteLLM knows which it has sent."""
  for name, value in os.environ.items():
    if name.upper().endswith(("KEY", "TOKEN", "SECRET", "PASSWORD")) and len(value) >= SECRET:
      text = text.replace(value, "[key]")
  return text

"""The choice of an engine by its TextGrad name."""

from typing import Any

from selfrag_jax.textgrad.checks import check_text, closest, did_you_mean
from selfrag_jax.textgrad.endpoint import PREFIXES, endpoint_engine
from selfrag_jax.textgrad.engine import MeteredEngine
from selfrag_jax.textgrad.providers import LiteLLMEngine

EXPERIMENTAL = "experimental:"
ALIASES = {
  "opus": "claude-3-opus-20240229",
  "haiku": "claude-3-haiku-20240307",
  "sonnet": "claude-3-sonnet-20240229",
  "sonnet-3.5": "claude-3-5-sonnet-20240620",
  "together-llama-3-70b": "together-meta-llama/Llama-3-70b-chat-hf",
  "vllm-llama-3-8b": "vllm-meta-llama/Meta-Llama-3-8B-Instruct",
}
PROVIDERS = {
  "azure-": "azure/",
  "together-": "together_ai/",
  "groq-": "groq/",
  "command": "cohere/command",
}  # LiteLLM's prefixes
KNOWN = (*ALIASES, "gpt-4o", "gpt-4o-mini", "gpt-4.1", "gpt-3.5-turbo", "o3-mini", "gemini-2.0-flash", "command-r-plus")


def get_engine(engine_name: str, **options: Any) -> MeteredEngine:
  """Return the engine of a name: a model's, an alias of TextGrad's, `ollama-MODEL`, or `experimental:MODEL`.

  `experimental:`, `azure-`, `together-`, `groq-` and Cohere's `command` go through LiteLLM. `options` are those of the
  engine; `cache` goes with `experimental:` alone, as in TextGrad. Raises ValueError for an unknown name or option and
  an invalid cache, ImportError where LiteLLM is needed and missing.
  """
  name = ALIASES.get(check_text(engine_name, "the name of the engine"), engine_name)
  if name.startswith(EXPERIMENTAL):
    return LiteLLMEngine(name.removeprefix(EXPERIMENTAL), **options)
  if "cache" in options:
    raise ValueError(f"cache goes with '{EXPERIMENTAL}{name}'; or make OpenAIEngine({name!r}, cache=True)")
  for prefix, provider in PROVIDERS.items():
    if name.startswith(prefix):
      return LiteLLMEngine(provider + name.removeprefix(prefix), **options)
  if name.startswith("vllm-"):
    model = name.removeprefix("vllm-")
    own = f"OpenAIEngine({model!r}, base_url='http://localhost:8000/v1')"
    raise ValueError(f"{engine_name!r}: no model is loaded into this process; run `vllm serve {model}` and give {own}")
  if (engine := endpoint_engine(name, **options)) is not None:
    return engine
  guess = did_you_mean(_meant(name))
  raise ValueError(
    f"unknown engine {engine_name!r}{guess}: give a model such as 'gpt-4o-mini' or 'ollama-qwen3', "
    f"'{EXPERIMENTAL}PROVIDER/MODEL' for others, or OpenAIEngine(model, base_url=...) for a server of your own"
  )


def _meant(name: str) -> str:
  plain = name.strip().lower()
  if meant := closest(plain, KNOWN):
    return meant
  prefixes = (*PREFIXES, *PROVIDERS, EXPERIMENTAL, "ollama-", "vllm-")
  for end in (":", "/", "-"):
    head, found, rest = plain.partition(end)
    if found and (meant := closest(head + end, prefixes)):
      return meant + rest
  return ""

"""TextGrad's module names over this package, so that TextGrad's own tests run against it."""

import sys
import types

import selfrag_jax.textgrad as ours
from selfrag_jax.textgrad import *  # noqa: F403

NAMES = {
  "config": ["set_backward_engine", "SingletonBackwardEngine"],
  "engine": ["EngineLM", "get_engine"],
  "engine.base": ["EngineLM"],
  "engine.openai": {"ChatOpenAI": "OpenAIEngine"},
  "engine_experimental": [],
  "engine_experimental.litellm": ["LiteLLMEngine"],
  "autograd": ["LLMCall", "FormattedLLMCall", "MultimodalLLMCall", "StringBasedFunction", "sum", "aggregate"],
}
for path, names in NAMES.items():
  module = types.ModuleType(f"textgrad.{path}")
  for name in names:
    setattr(module, name, getattr(ours, names[name] if isinstance(names, dict) else name))
  sys.modules[module.__name__] = module
  parent, _, last = module.__name__.rpartition(".")
  setattr(sys.modules[parent], last, module)

"""Checks of the engines' options (sampling parameters, limits), and the opening of a cache of answers."""

import inspect
import math
import os
import types
from collections.abc import Mapping
from typing import Any

from selfrag_jax.textgrad.checks import closest, did_you_mean
from selfrag_jax.textgrad.limits import EngineCache

ANSWERS = "answers.sqlite"
# parameters with which a chat completion still returns one text
SAMPLING = frozenset(
  {
    "temperature",
    "top_p",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "reasoning_effort",
    "verbosity",
    "response_format",
    "service_tier",
    "user",
    "metadata",
    "store",
    "safety_identifier",
    "prompt_cache_key",
    "extra_body",
    "extra_headers",
    "extra_query",
  }
)

# parameters that bound the tokens of a call, or change that it returns one answer of one model
BOUNDED = frozenset({"n", "best_of", "stream", "model", "messages", "max_tokens", "max_completion_tokens"})


def check_options(engine: type, sampling: Mapping[str, Any]) -> None:
  """Raise ValueError for an unknown parameter, with the engine's options in the message, and for a bad limit."""
  for name in sampling:
    if name not in SAMPLING:
      own = sorted({option for kind in engine.__mro__[:-1] for option in _keywords(kind)})
      options = f"its options are {', '.join(own)}, and of sampling {', '.join(sorted(SAMPLING))}"
      guess = did_you_mean(closest(name, [*own, *SAMPLING]))
      raise ValueError(f"unknown option {name!r} of {engine.__name__}{guess}; {options}; others go into extra_body")
  for name in ("max_tokens", "max_completion_tokens"):
    check_limit(name, sampling.get(name))
  body = sampling.get("extra_body") or {}
  if not isinstance(body, Mapping):
    raise TypeError(f"extra_body must be a dict by name, not {type(body).__name__}")
  if found := BOUNDED & body.keys():
    raise ValueError(f"{min(found)!r} cannot be in extra_body, where neither the budget nor the cache would know of it")


def check_limit(name: str, limit: Any) -> None:
  """Raise TypeError or ValueError for a limit that is not a number of at least 1; None sets no limit."""
  if limit is None:
    return
  if isinstance(limit, bool) or not isinstance(limit, (int, float)):
    raise TypeError(f"{name} must be a number, not {type(limit).__name__}")
  if not 1 <= limit < math.inf:
    raise ValueError(f"{name} = {limit} must be at least 1")


def _keywords(engine: type) -> list[str]:
  named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
  return [name for name, parameter in inspect.signature(engine).parameters.items() if parameter.kind in named]


def open_cache(cache: Any) -> Any:
  """Return a cache with `get` and `put`, or None.

  True is the file `answers.sqlite` in the folder `selfrag_jax` of the user's caches ($XDG_CACHE_HOME or ~/.cache); a
  path is a file, or a folder for `answers.sqlite`; None and False keep nothing. Caches with `get` and `set`, such as
  diskcache's, are taken as they are. Raises ValueError for another value, EngineError for a file that is no cache.
  """
  if cache is True:
    cache = os.path.join(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "selfrag_jax", "")
  if cache is None or cache is False:
    return None
  if isinstance(cache, (str, os.PathLike)):
    path = os.path.expanduser(os.fspath(cache))
    if path.endswith(os.sep) or os.path.isdir(path):
      path = os.path.join(path, ANSWERS)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    return EngineCache(path)
  if callable(getattr(cache, "get", None)):
    if callable(getattr(cache, "put", None)):
      return cache
    if callable(getattr(cache, "set", None)):
      return types.SimpleNamespace(get=cache.get, put=cache.set)
  raise ValueError(f"cache is a file or folder, an EngineCache, True or False, not {type(cache).__name__}")

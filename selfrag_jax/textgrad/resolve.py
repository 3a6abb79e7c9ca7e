"""The choice of an engine: one that is given, one by name, or the backward engine, which is the default."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from selfrag_jax.textgrad.checks import kind_of
from selfrag_jax.textgrad.engine import EngineLM
from selfrag_jax.textgrad.names import get_engine


class SingletonBackwardEngine:
  """The backward engine, which gives critiques where no other engine is named."""

  _engine: EngineLM | None = None
  _local: contextvars.ContextVar[EngineLM | None] = contextvars.ContextVar("backward_engine", default=None)

  def set_engine(self, engine: EngineLM, override: bool = False) -> None:
    """Set the engine. Raises RuntimeError if one is set already and `override` is false."""
    if SingletonBackwardEngine._engine is not None and not override:
      raise RuntimeError("a backward engine is set already; set_backward_engine(engine, override=True) replaces it")
    SingletonBackwardEngine._engine = engine

  def get_engine(self) -> EngineLM | None:
    """Return the engine of this thread or task, or else the one for all, or None."""
    here = self._local.get()
    return SingletonBackwardEngine._engine if here is None else here


def set_backward_engine(engine: EngineLM | str, override: bool = False, **options: Any) -> None:
  """Set the engine that gives critiques; `options` are those of `get_engine`, for a name.

  Raises RuntimeError if one is set already and `override` is false, TypeError for options beside an engine.
  """
  if options and not isinstance(engine, str):
    raise TypeError(f"the options {', '.join(options)} go with the name of an engine; this one is made already")
  made = get_engine(engine, **options) if isinstance(engine, str) else resolve_engine(engine)
  SingletonBackwardEngine().set_engine(made, override)


@contextlib.contextmanager
def backward_engine(engine: EngineLM | str) -> Iterator[EngineLM]:
  """Use an engine for critiques inside the `with`, in this thread or task alone."""
  chosen = resolve_engine(engine)
  token = SingletonBackwardEngine._local.set(chosen)
  try:
    yield chosen
  finally:
    SingletonBackwardEngine._local.reset(token)


def resolve_engine(engine: EngineLM | str | None) -> Any:
  """Return the engine that is given, the engine of a name, or the backward engine for None.

  Raises ValueError if there is no backward engine, TypeError for a value that cannot be an engine.
  """
  if isinstance(engine, str):
    return get_engine(engine)
  found = engine if engine is not None else SingletonBackwardEngine().get_engine()
  if found is None:
    raise ValueError("no engine: give one, or call set_backward_engine(engine) first")
  if not callable(found) or isinstance(found, type):
    raise TypeError(f"the engine must be an EngineLM or its name, not {kind_of(found)}")
  return found

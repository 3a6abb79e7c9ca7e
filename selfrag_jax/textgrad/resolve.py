"""Which engine is meant: one that is given, one that is named, or the one that gives critiques where none is."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from selfrag_jax.textgrad.endpoint import get_engine
from selfrag_jax.textgrad.engine import EngineLM


class SingletonBackwardEngine:
  """The engine that gives critiques where none is named."""

  _engine: EngineLM | None = None
  _local: contextvars.ContextVar[EngineLM | None] = contextvars.ContextVar("backward_engine", default=None)

  def set_engine(self, engine: EngineLM, override: bool = False) -> None:
    """Set it. Raises RuntimeError if there is one and `override` is false."""
    if SingletonBackwardEngine._engine is not None and not override:
      raise RuntimeError("a backward engine is set already; set_backward_engine(engine, override=True) replaces it")
    SingletonBackwardEngine._engine = engine

  def get_engine(self) -> EngineLM | None:
    """Return it, or None."""
    here = self._local.get()
    return SingletonBackwardEngine._engine if here is None else here


def set_backward_engine(engine: EngineLM | str, override: bool = False) -> None:
  """Set the engine that gives critiques. Raises RuntimeError if there is one and `override` is false."""
  SingletonBackwardEngine().set_engine(resolve_engine(engine), override)


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
  """Return an engine from one, its name, or None for the backward engine. Raises ValueError if there is none."""
  if isinstance(engine, str):
    return get_engine(engine)
  found = engine if engine is not None else SingletonBackwardEngine().get_engine()
  if found is None:
    raise ValueError("no engine: give one, or call set_backward_engine(engine) first")
  return found

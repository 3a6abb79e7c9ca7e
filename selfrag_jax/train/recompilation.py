"""Warnings about a program that a step compiles again, with what is different from the step before."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import NamedSharding

MOST = 5  # differences that a warning names
Arrays = dict[Any, tuple[tuple[int, ...], Any, bool, Any]]  # path in a tree -> shape, dtype, is weakly typed, sharding


class Recompilations:
  """Watches the steps of a phase. The first one compiles its programs; whatever a later one compiles is a warning.

  Args:
    phase: the name that a warning tells.
    programs: a list that grows by the name and the seconds of each program that is compiled.
  """

  def __init__(self, phase: str, programs: Sequence[tuple[str, float]]):
    self._phase, self._programs = phase, programs
    self._before: Arrays | None = None
    self._count = 0

  @contextlib.contextmanager
  def watching(self, step: int, state: Any, batch: Any) -> Iterator[None]:
    """Watch what is compiled within this context, which takes a step."""
    arrays, n_before = _arrays({"state": state, "batch": batch}), len(self._programs)
    yield
    compiled = self._programs[n_before:]
    if compiled and self._before is not None:
      self._count += 1
      logging.warning(
        "step %d of %s compiled %s in %.1f s (recompilation %d): %s",
        step,
        self._phase,
        ", ".join(dict.fromkeys(name for name, _ in compiled)),
        sum(seconds for _, seconds in compiled),
        self._count,
        _difference(self._before, arrays),
      )
    self._before = arrays


def _arrays(tree: Any) -> Arrays:
  return {
    path: (x.shape, x.dtype, getattr(x, "weak_type", False), getattr(x, "sharding", None))
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
    if hasattr(x, "shape") and hasattr(x, "dtype")  # a batch may hold texts, too
  }


def _difference(before: Arrays, now: Arrays) -> str:
  said = []
  for path in {**before, **now}:
    old, new = before.get(path), now.get(path)
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if old is None or new is None:
      said.append(f"{name} is {'new' if old is None else 'gone'}")
    elif old != new:
      is_placed = old[:3] == new[:3]  # where an array lies tells something only if nothing else is different
      said.append(f"{name} was {_shown(*old, is_placed)}, is {_shown(*new, is_placed)}")
  if not said:
    return "its arguments have the shapes, types and shardings of the step before, so something within has changed"
  return "; ".join(said[:MOST]) + (f"; and {len(said) - MOST} more" if len(said) > MOST else "")


def _shown(shape: tuple[int, ...], dtype: Any, is_weak: bool, sharding: Any, with_sharding: bool) -> str:
  text = f"{dtype}[{','.join(map(str, shape))}]" + (" of weak type" if is_weak else "")
  if with_sharding:
    text += f" on {sharding.spec if isinstance(sharding, NamedSharding) else sharding}"
  return text

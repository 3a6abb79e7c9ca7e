"""Public names of a package that are imported when they are first asked for (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
  package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
  """Return `__getattr__`, `__dir__` and `__all__` of a package whose names are imported when they are first asked for.

  modules: the public names that each module defines, by the module's name relative to the package. A module without
  names is itself what is public. A name must not be that of another module of the package: Python would return the
  module as soon as something has imported it.
  """
  homes = {name: module for module, names in modules.items() for name in names or [module]}

  def load(name: str) -> Any:
    if name not in homes:
      raise AttributeError(f"module {package!r} has no attribute {name!r}")
    module = importlib.import_module(f"{package}.{homes[name]}")
    return getattr(module, name) if modules[homes[name]] else module

  return load, lambda: sorted({*vars(sys.modules[package]), *homes}), sorted(homes)

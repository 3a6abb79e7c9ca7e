"""The public names of the packages: all can be imported, a type checker knows them too, and the import is cheap."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "selfrag_jax"
LAZY = sorted(
  ".".join(["selfrag_jax", *path.parent.relative_to(PACKAGE).parts])
  for path in PACKAGE.rglob("__init__.py")
  if "attach_stub" in path.read_text(encoding="utf-8")
)
HEAVY = ("jax", "jaxlib", "flax", "numpy", "tensorflow", "scann", "torch", "matplotlib", "bm25s", "orbax")


def types_only(package: ModuleType) -> dict[str, str]:
  """Return the names that a type checker sees in a package, each with the module that it comes from."""
  stub = Path(package.__path__[0]) / "__init__.pyi"
  imports = [node for node in ast.parse(stub.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
  assert all(alias.asname == alias.name for node in imports for alias in node.names)  # others are private to checkers
  modules = {node: f"{package.__name__}.{node.module}" if node.module else package.__name__ for node in imports}
  return {alias.name: modules[node] for node in imports for alias in node.names}


def test_all_the_packages_that_users_import_from_have_public_names():
  parts = ("encoders", "generate", "memory", "metrics", "model", "retrieval", "tasks", "text", "textgrad", "train")
  assert ["selfrag_jax", *(f"selfrag_jax.{part}" for part in parts)] == LAZY
  assert 20 <= len(importlib.import_module("selfrag_jax").__all__) <= 30


@pytest.mark.parametrize("name", LAZY)
def test_every_public_name_is_there_and_a_type_checker_sees_the_same(name):
  package = importlib.import_module(name)
  seen = types_only(package)
  assert package.__all__ == sorted(seen)
  for public, module in seen.items():
    if module == name:  # a package that is public as a whole
      assert getattr(package, public) is importlib.import_module(f"{name}.{public}")
    else:
      vars(package).pop(public, None)  # looked up earlier, perhaps while another test had replaced the original
      assert getattr(package, public) is getattr(importlib.import_module(module), public)
  assert set(package.__all__) <= set(dir(package))


@pytest.mark.parametrize("name", LAZY)
def test_no_public_name_is_hidden_by_a_module_of_that_name(name):
  package = importlib.import_module(name)
  [folder] = package.__path__
  modules = {path.stem for path in Path(folder).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
  functions = {public for public, module in types_only(package).items() if module != name}
  assert not functions & modules


@pytest.mark.parametrize("name", LAZY)
def test_an_unknown_name_is_an_error_as_of_any_module(name):
  with pytest.raises(AttributeError, match=f"No {name} attribute Nonsense"):
    importlib.import_module(name).Nonsense  # noqa: B018
  with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
    exec(f"from {name} import Nonsense")


def test_importing_the_packages_imports_nothing_heavy_and_takes_less_than_150_ms():
  program = f"""
import sys, time
before = time.process_time()
import selfrag_jax
print(time.process_time() - before)
import {", ".join(LAZY)}
print(*(name for name in {HEAVY} if name in sys.modules))
"""
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
  seconds, heavy = done.stdout.splitlines()
  assert float(seconds) < 0.15
  assert heavy == ""

"""The examples of TextGrad's README and notebooks, run with changed import lines and scripted engines."""

import ast
import importlib.util
import json
import os
import re
import shutil
import sys
import types
from pathlib import Path

import httpx
import pytest

import selfrag_jax.textgrad as tg
from selfrag_jax.textgrad.limits import Completion

SHIM = Path(__file__).parent / "shim"
NEW = "A better text.\nAnswer: 3"  # what the script answers to an optimizer
NOT_RUN = {"chameleon/TextGrad_Chemeleon_ScienceQA.ipynb": "downloads the pictures of ScienceQA and searches with Bing"}
EDITS = {  # notebook -> (what it has, what is run, why)
  "Tutorial-Test-Time-Loss-for-Code.ipynb": [
    ('    raise Exception("This function will run', '    #("This function will run', "its reader is told to remove it"),
    ("size = 10000", "size = 100", "five seconds of a quadratic program"),
  ],
}
NOTEBOOKS = {  # notebook -> what is there in the end
  "Local-Model-With-LMStudio.ipynb": lambda names: names["solution"].value == NEW,
  "TextGrad-Vision-MathVista.ipynb": lambda names: names["response"].value == NEW,
  "Tutorial-MultiModal.ipynb": lambda names: names["response"].value == NEW,
  "Tutorial-Primitives.ipynb": lambda names: names["x"].value == NEW and not names["x"].gradients,
  "Tutorial-Prompt-Optimization.ipynb": lambda names: [len(x) for x in names["results"]["test_acc"]] == [2] * 13,
  "Tutorial-Solution-Optimization.ipynb": lambda names: names["solution"].value == NEW,
  "Tutorial-Test-Time-Loss-for-Code.ipynb": lambda names: "bisect_left" in names["code"].value,
  "experimental_engines/Tutorial-ExperimentalEngines.ipynb": lambda names: names["image_data"].startswith(b"\x89PNG"),
  "experimental_engines/Tutorial-PrimitivesExperimentalEngines.ipynb": lambda names: names["x"].value == NEW,
}


@pytest.fixture
def checkout(monkeypatch, tmp_path):
  """TextGrad's checkout; its engines, its picture and the files of its tasks are ours, and nothing else is."""
  if not (folder := os.environ.get("TEXTGRAD_CHECKOUT")):
    pytest.skip("TEXTGRAD_CHECKOUT names no checkout of github.com/zou-group/textgrad")
  litellm, picture = _load("litellm"), (SHIM / "picture.png").read_bytes()
  dotenv = types.ModuleType("dotenv")
  dotenv.load_dotenv = lambda **options: False  # keys are set below
  for module in (litellm, dotenv):
    monkeypatch.setitem(sys.modules, module.__name__, module)
  monkeypatch.setattr(httpx, "get", lambda url: types.SimpleNamespace(content=picture))

  def complete(self, content, system_prompt, **sampling):
    text = content if isinstance(content, str) else "".join(p for p in content if isinstance(p, str))
    answer = litellm.completion(self.model_string, [{"role": "user", "content": text}])
    return Completion(answer["choices"][0]["message"]["content"], 1, 1)

  monkeypatch.setattr(tg.OpenAIEngine, "complete", complete)
  monkeypatch.setenv("OPENAI_API_KEY", "k")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.setenv("TEXTGRAD_DATA", str(tmp_path))
  monkeypatch.setattr(tg.SingletonBackwardEngine, "_engine", None)
  monkeypatch.chdir(tmp_path)
  examples = [{"input": f"How many are {i} plums?", "target": str(i)} for i in range(152)]
  (tmp_path / "object_counting.json").write_text(json.dumps({"examples": examples}))
  pictures = Path(folder) / "examples" / "notebooks" / "assets"
  if pictures.is_dir():
    shutil.copytree(pictures, tmp_path / ".assets")
  return Path(folder)


def _load(name):
  spec = importlib.util.spec_from_file_location(name, SHIM / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def run(code, names):
  """Run code as a notebook does: import lines lead here, `!` lines are left out, the last value is shown."""
  code = re.sub(r"^[!%].*", "", code, flags=re.M)
  code = re.sub(r"^import textgrad$", "import selfrag_jax.textgrad as textgrad", code, flags=re.M)
  code = re.sub(r"^import textgrad as", "import selfrag_jax.textgrad as", code, flags=re.M)
  code = re.sub(r"^from textgrad\.tasks import", "from selfrag_jax.textgrad.tasks import", code, flags=re.M)
  code = re.sub(r"^from textgrad[\w.]* import", "from selfrag_jax.textgrad import", code, flags=re.M)
  body = ast.parse(code).body
  last = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
  exec(compile(ast.Module(body, []), "cell", "exec"), names)
  for expression in last:
    repr(eval(compile(ast.Expression(expression.value), "cell", "eval"), names))


def test_every_notebook_is_run_or_has_a_reason(checkout):
  folder = checkout / "examples" / "notebooks"
  found = {str(path.relative_to(folder)) for path in folder.rglob("*.ipynb")}
  assert found == set(NOTEBOOKS) | set(NOT_RUN)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook(checkout, name):
  cells = json.loads((checkout / "examples" / "notebooks" / name).read_text("utf-8"))["cells"]
  names = {"__name__": "notebook"}
  for cell in cells:
    if cell["cell_type"] == "code":
      code = "".join(cell["source"])
      for old, new, _ in EDITS.get(name, []):
        code = code.replace(old, new)
      run(code, names)
  assert NOTEBOOKS[name](names)


README = {  # first line of a program -> what is there in the end; each program begins with no backward engine set
  'engine = get_engine("experimental:gpt-4o", cache=False)': lambda names: tg.SingletonBackwardEngine().get_engine(),
  "import httpx": lambda names: names["image_data"].startswith(b"\x89PNG"),
  "import textgrad as tg": lambda names: names["answer"].value == NEW,
  'tg.set_backward_engine("gpt-4o")': lambda names: names["solution"].value == NEW,
  "from textgrad.tasks import load_task": lambda names: names["system_prompt"].value == NEW,
}


def test_the_examples_of_the_readme(checkout, monkeypatch):
  """Programs that follow each other there are run by themselves; they have the names that the README has shown."""
  blocks = re.findall(r"```python\n(.*?)```", (checkout / "README.md").read_text("utf-8"), re.S)
  programs: list[tuple[str, list[str]]] = []
  for block in blocks:
    start = next((line for line in README if line in block.strip().splitlines()[:2]), None)
    start = "from textgrad.tasks import load_task" if "import load_task" in block else start
    if start:
      programs.append((start, []))
    programs[-1][1].append(block)
  assert [start for start, _ in programs] == list(README)
  for start, parts in programs:
    monkeypatch.setattr(tg.SingletonBackwardEngine, "_engine", None)
    names = {"__name__": "readme", "tg": tg, "get_engine": tg.get_engine, "set_backward_engine": tg.set_backward_engine}
    for part in parts:
      run(part, names)
    assert README[start](names), start

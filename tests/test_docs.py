"""The documentation: its Python runs, its commands parse, and its links, files and tables are right."""

import ast
import builtins
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import selfrag_jax.train
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, init_params
from selfrag_jax.retrieval import __main__ as retrieval
from selfrag_jax.retrieval import base, commands
from selfrag_jax.text.tokenizer import ByteTokenizer
from selfrag_jax.textgrad import SingletonBackwardEngine
from selfrag_jax.train import load

ROOT = Path(__file__).resolve().parents[1]
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in FILES}

# a block of Python, and the block of text behind it, which is what it prints
PYTHON = re.compile(r"```python\n(.*?)```(?:\n+It prints:\n+```text\n(.*?)```)?", re.S)
BLOCKS = {page: PYTHON.findall(text) for page, text in PAGES.items() if "```python\n" in text}


class Command(NamedTuple):
  """A command line of a page, as a shell would split it."""

  page: str
  words: tuple[str, ...]

  @property
  def program(self) -> str:
    """The program, without the folder of the environment that it is run from."""
    return self.words[0].removeprefix(".venv/bin/")


def find_commands(page: str, text: str) -> list[Command]:
  """Return the command lines of a page: those of its shell blocks, and those that stand in the text."""
  shell = re.compile(r"```bash\n(.*?)```", re.S)
  lines = [line for block in shell.findall(text) for line in block.replace("\\\n", " ").splitlines()]
  spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
  lines += [span for span in spans if re.match(r"(python3?|pip|ruff|pytest|\w+=\S+ pytest) ", span)]
  lines += [f"python launch/train.py {span}" for span in spans if span.startswith("--config=configs/")]
  found = []
  for line in lines:
    for part in line.split(" && "):
      words = shlex.split(part, comments=True)
      while words and re.match(r"[A-Z_]+=", words[0]):  # variables of the environment
        words = words[1:]
      if words:
        found.append(Command(page, tuple(words)))
  return found


COMMANDS = list(dict.fromkeys(command for page, text in PAGES.items() for command in find_commands(page, text)))
LAUNCHERS = [command for command in COMMANDS if command.program == "python" and command.words[1].startswith("launch/")]
RETRIEVAL = [command for command in COMMANDS if command.words[1:3] == ("-m", "selfrag_jax.retrieval")]
BENCHMARKS = [command for command in COMMANDS if command.program == "python" and "benchmarks/" in command.words[1]]
DRY_RUNS = {
  tuple(word for word in words[2:] if word != "--dry_run" and not word.startswith("--workdir")): None
  for page, words in LAUNCHERS
  # one of two processes would wait for the other
  if words[1] == "launch/train.py" and not re.search("FOLDER|init=|--coordinator", " ".join(words))
}


def called(command: Command) -> str:
  return " ".join(command.words)


def is_self_contained(block: str) -> bool:
  """Tell whether a block uses no name that it does not define, and loads no weights."""
  nodes = list(ast.walk(ast.parse(block)))
  used = {node.id for node in nodes if isinstance(node, ast.Name)}
  defined = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
  defined |= {node.asname or node.name.split(".")[0] for node in nodes if isinstance(node, ast.alias)}
  defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
  defined |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
  return used <= defined | set(dir(builtins)) and "load_model" not in used


def execute(block: str, printed: str, names: dict) -> None:
  """Run a block and compare what it prints with what the page says."""
  out = io.StringIO()
  with contextlib.redirect_stdout(out):
    exec(block, names)
  if printed:
    assert out.getvalue() == printed
  assert "False" not in out.getvalue().splitlines()  # what it compares is equal


@pytest.fixture(autouse=True)
def in_an_empty_folder(monkeypatch, tmp_path):
  """Run in a folder that holds a reader's own notes alone; what a page sets or registers goes when the test ends."""
  monkeypatch.chdir(tmp_path)
  Path("notes").mkdir()
  Path("notes/keys.txt").write_text("The spare key hangs behind the blue door.")
  monkeypatch.setattr(SingletonBackwardEngine, "_engine", None)
  monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
  known = {*base.BUILTIN, *base._registry}
  yield
  for name in base._registry.keys() - known:
    del base._registry[name]


@pytest.fixture
def model(monkeypatch):
  """The small model with random parameters that `load_model` returns on the pages."""
  tokenizer = ByteTokenizer()
  sizes = {"d_model": 32, "n_layers": 2, "n_heads": 2, "ssm_state": 8, "ssm_head_dim": 16}
  config = ModelConfig(tokenizer.vocab_size, block_pattern="MT", **sizes)
  model = load.LoadedModel(config, nn.unbox(init_params(config, jax.random.key(0))), {}, tokenizer)
  for module in (load, selfrag_jax.train, selfrag_jax):  # packages keep a name once it has been looked up
    monkeypatch.setattr(module, "load_model", lambda source, phase=None: model)
  return model


@pytest.mark.parametrize("page", BLOCKS)
def test_the_python_of_a_page_runs(page, model):
  names = {"__name__": "page"}
  for block, printed in BLOCKS[page]:
    execute(block, printed, names)
  if page == "docs/memory.md":
    assert names["slots"].shape == (3, 5)
  if page == "docs/model.md":
    apply = jax.jit(LM(model.config).apply, static_argnames="method")
    alone = jnp.asarray(names["prompts"])[1:, :3]
    expected = apply(model.params, apply(model.params, alone)[:, -1], method="logits")
    np.testing.assert_allclose(names["logits"][1:], expected, atol=1e-4)


ALONE = [(page, *block) for page, blocks in BLOCKS.items() for block in blocks if is_self_contained(block[0])]


@pytest.mark.parametrize(("page", "block", "printed"), ALONE, ids=[page for page, *_ in ALONE])
def test_a_block_that_defines_all_that_it_uses_runs_alone_in_an_empty_folder(page, block, printed):
  execute(block, printed, {"__name__": "page"})


def test_the_blocks_that_are_copied_first_are_self_contained():
  assert len(BLOCKS["README.md"]) == 2  # the second needs weights
  assert len(BLOCKS["docs/retrieval.md"]) == 2
  blocks = BLOCKS["README.md"][:1] + BLOCKS["docs/retrieval.md"]
  assert all(is_self_contained(block) and printed for block, printed in blocks)


def test_the_readme_is_short_and_leads_to_every_page():
  assert len(PAGES["README.md"].splitlines()) <= 150
  assert {page for page in PAGES if f"]({page})" not in PAGES["README.md"]} == {"README.md"}


def test_every_command_is_of_a_kind_that_is_checked():
  checked = {*LAUNCHERS, *RETRIEVAL, *BENCHMARKS}
  others = [command for command in COMMANDS if command not in checked]
  for command in others:
    if command.words[1:3] in (("-m", "venv"), ("-m", "pytest")) or command.program in ("pytest", "ruff", ".ci/run"):
      paths = [word for word in command.words[1:] if word.startswith("tests/")]
      assert all((ROOT / path).exists() for path in paths), called(command)
      continue
    assert (command.program, command.words[1]) == ("pip", "install"), called(command)
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    extras = re.findall(r"\.\[(\w+)\]", called(command))
    assert all(f'    "{extra}": ' in setup for extra in extras), called(command)
  assert min(len(LAUNCHERS), len(RETRIEVAL), len(BENCHMARKS), len(others)) >= 3


# stands in for the launcher's main function: reads the flags and the config, and goes no further
PARSE = """
import importlib, json, os, pathlib, runpy, sys
from absl import app
launcher = sys.argv[1]
sys.path[:0] = ["launch", "."]
for config in pathlib.Path("configs").glob("[!_]*.py"):  # imported once for all command lines
  importlib.import_module(f"configs.{config.stem}")
for words in json.loads(sys.argv[2]):
  if not os.fork():  # flags are global: each command line has a process of its own
    def parse(main, flags_parser):
      rest = flags_parser([launcher, *words])
      if len(rest) > 1:
        sys.exit(f"error: unexpected argument {rest[1]}")
    app.run, sys.argv = parse, [launcher, *words]
    runpy.run_path(launcher, run_name="__main__")
    sys.exit(0)
  if os.wait()[1]:
    sys.exit(f"{launcher} {' '.join(words)}")
"""


@pytest.mark.parametrize("launcher", sorted({command.words[1] for command in LAUNCHERS}))
def test_launchers_take_the_flags_of_every_command(launcher):
  lines = [command.words[2:] for command in LAUNCHERS if command.words[1] == launcher]
  parse = [sys.executable, "-c", PARSE, launcher, json.dumps(lines)]
  done = subprocess.run(parse, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr


@pytest.mark.slow  # each compiles the programs of a config
@pytest.mark.parametrize("words", DRY_RUNS, ids=" ".join)
def test_what_the_pages_train_without_data_passes_a_dry_run(words):
  command = [sys.executable, "launch/train.py", *words, "--dry_run"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
  assert done.returncode == 0, done.stderr
  assert "parameters" in done.stdout


@pytest.mark.parametrize("command", RETRIEVAL, ids=called)
def test_commands_of_knowledge_bases_are_understood(command, monkeypatch):
  monkeypatch.setattr("selfrag_jax.mesh.configure_xla", lambda: None)
  for name in ("build", "add", "delete", "search", "inspect", "validate", "merge"):
    monkeypatch.setattr(commands, name, lambda arguments: 7)
  assert retrieval.main(command.words[3:]) == 7


@pytest.mark.parametrize("command", BENCHMARKS, ids=called)
def test_benchmarks_have_the_flags_of_every_command(command):
  main = (ROOT / command.words[1]).read_text(encoding="utf-8")
  parts = re.findall(r"^from benchmarks\.(\w+) import", main, re.M)  # files beside it, whose flags are its own too
  sources = [main, *((ROOT / "benchmarks" / f"{part}.py").read_text(encoding="utf-8") for part in parts)]
  defined = {name for source in sources for name in re.findall(r"flags\.DEFINE_\w+\(\s*\"(\w+)\"", source)}
  given = {word.lstrip("-").split("=")[0] for word in command.words[2:]}
  assert {re.sub(r"^config\..*", "config", name) for name in given} <= defined  # an override needs the config


def slugs(text: str) -> set[str]:
  """Return the anchors that GitHub gives to the headings of a page."""
  headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
  return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_images_lead_somewhere(page):
  for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
    if target.startswith("https://"):
      continue
    path, _, anchor = target.partition("#")
    file = (ROOT / page).parent / path if path else ROOT / page
    assert file.is_file(), target
    assert not anchor or anchor in slugs(file.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_are_there(page):
  folders = "selfrag_jax|configs|launch|benchmarks|tests|notebooks|docs"
  named = re.findall(rf"(?<![\w/])((?:{folders})/[\w/]+(?:\.\w+)?)", PAGES[page])
  assert not {path for path in named if not (ROOT / path).exists()}


@pytest.mark.parametrize("page", PAGES)
def test_the_rows_of_a_table_have_as_many_cells_as_its_head(page):
  for table in re.findall(r"(?:^\|.*\n)+", PAGES[page], re.M):
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, table

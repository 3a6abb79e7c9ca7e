"""The README's Python runs as it stands, on small arrays, and its links lead somewhere."""

import ast
import builtins
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, init_params
from selfrag_jax.text.tokenizer import ByteTokenizer
from selfrag_jax.textgrad import SingletonBackwardEngine
from selfrag_jax.train import load

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def is_self_contained(block):
  """Tell whether a block uses no name that it does not define, and loads no weights."""
  nodes = list(ast.walk(ast.parse(block)))
  used = {node.id for node in nodes if isinstance(node, ast.Name)}
  defined = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
  defined |= {node.asname or node.name.split(".")[0] for node in nodes if isinstance(node, ast.alias)}
  defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
  return used <= defined | set(dir(builtins)) and "load_model" not in used


@pytest.mark.parametrize("block", list(filter(is_self_contained, BLOCKS)))
def test_a_block_that_defines_all_that_it_uses_runs_alone_in_an_empty_folder(block, monkeypatch, tmp_path, capsys):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(SingletonBackwardEngine, "_engine", None)
  exec(block, {})
  assert "False" not in capsys.readouterr().out.splitlines()  # what it compares is equal


def test_the_blocks_about_retrievers_are_self_contained():
  section = README.split("## Retrieval and knowledge bases")[1].split("\n## ")[0]
  blocks = re.findall(r"```python\n(.*?)```", section, re.S)
  assert len(blocks) == 2
  assert all(map(is_self_contained, blocks))


def test_the_python_of_the_readme_runs(monkeypatch, tmp_path, capsys):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(SingletonBackwardEngine, "_engine", None)  # the README sets one: it goes when the test ends
  tokenizer = ByteTokenizer()
  sizes = {"d_model": 32, "n_layers": 2, "n_heads": 2, "ssm_state": 8, "ssm_head_dim": 16}
  config = ModelConfig(tokenizer.vocab_size, block_pattern="MT", **sizes)
  params = nn.unbox(init_params(config, jax.random.key(0)))
  monkeypatch.setattr(load, "load_model", lambda source, phase: load.LoadedModel(config, params, {}, tokenizer))
  rng = np.random.default_rng(0)
  names = {
    "embeddings": rng.normal(size=(20, 384)).astype(np.float32),
    "queries": rng.normal(size=(3, 384)).astype(np.float32),
    "prompts": jnp.asarray(rng.integers(1, 64, (2, 5)), jnp.int32),
    "lengths": jnp.asarray([5, 3]),
    "my_encoder": lambda texts: rng.normal(size=(len(texts), 384)),
  }
  for block in BLOCKS:
    exec(block, names)
  assert names["slots"].shape == (3, 5)
  assert "The port of Avalor is Cadiz. 1\n" in capsys.readouterr().out
  apply = jax.jit(LM(config).apply, static_argnames="method")
  expected = apply(params, apply(params, names["prompts"][1:, :3])[:, -1], method="logits")
  np.testing.assert_allclose(names["logits"][1:], expected, atol=1e-4)


def test_the_files_that_the_readme_names_are_there():
  named = re.findall(r"\]\(([\w/.]+)\)|(?<![\w/])((?:selfrag_jax|configs|launch|benchmarks)/[\w/]+(?:\.\w+)?)", README)
  missing = {path for pair in named for path in pair if path and not (ROOT / path).exists()}
  assert not missing

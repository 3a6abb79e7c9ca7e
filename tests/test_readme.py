"""The README's Python runs as it stands, on small arrays, and its links lead somewhere."""

import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, init_params
from selfrag_jax.text.tokenizer import ByteTokenizer
from selfrag_jax.textgrad import SingletonBackwardEngine
from selfrag_jax.train import load

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


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
  for block in re.findall(r"```python\n(.*?)```", README, re.S):
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

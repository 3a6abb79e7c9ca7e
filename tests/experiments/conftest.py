"""Fixtures of a small chat model, for the experiments that ask one, and of small optimizations of prompts."""

import json

import flax.linen as nn
import jax
import pytest

from configs.gradient_rag import get_config
from selfrag_jax.experiments import gradient_rag
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import init_params
from selfrag_jax.text.tokenizer import ByteTokenizer
from selfrag_jax.train.load import LoadedModel


class ChatBytes(ByteTokenizer):
  """Bytes, and the tokens of a chat."""

  def __init__(self):
    super().__init__()
    first = self.vocab_size
    self.special = {**self.special, "<|im_start|>": first, "<|im_end|>": first + 1}
    self.vocab_size = first + 2


@pytest.fixture(scope="session")
def chatting_model() -> LoadedModel:
  """A random model over bytes: it says random letters."""
  tokenizer = ChatBytes()
  model = ModelConfig(
    vocab_size=tokenizer.vocab_size, d_model=16, n_layers=1, n_heads=2, block_pattern="T", init_scale=0.5
  )
  return LoadedModel(model, nn.unbox(init_params(model, jax.random.key(0))), {}, tokenizer)


SIZES = {"train": 60, "valid": 30, "test": 60}
SMALL = {
  "rulebook": {"n_topics": 6, "capacity": 6, "noise": 0.2, "sizes": SIZES},
  "pipeline": {"n_topics": 4, "capacity": 24, "noise": 0.2, "sizes": SIZES},
  "router": {"sizes": SIZES},
  "program": {"sizes": {"train": 24, "valid": 8, "test": 8}},
}


def small_config(steps=12, variant="rulebook", **changes):
  made = get_config(variant).to_dict()
  made["task"] |= SMALL[variant]
  made["optimizer"]["steps"] = steps
  return {**made, **changes}


@pytest.fixture
def prompt_config():
  """Return a function of steps and variant to a small config; its keywords change sections."""
  return small_config


@pytest.fixture
def optimize():
  """Return a function that runs such a config in a folder."""

  def run(workdir, *arguments, **changes):
    workdir.mkdir(parents=True, exist_ok=True)
    return gradient_rag.run(gradient_rag.build(small_config(*arguments, **changes)), workdir)

  return run


@pytest.fixture
def behind_endpoints(tmp_path):
  """A config whose engines lie behind endpoints where nobody answers."""
  made = get_config("bbh").to_dict()
  file = tmp_path / "task.json"
  file.write_text(json.dumps({"examples": [{"input": f"{i} + 1?", "target": str(i + 1)} for i in range(300)]}))
  made["task"]["path"] = str(file)
  for part in made["engines"].values():
    part |= {"name": "m", "base_url": "http://127.0.0.1:9/v1"}
  return made

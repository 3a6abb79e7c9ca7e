"""A small model that chats, for the experiments that ask one."""

import flax.linen as nn
import jax
import pytest

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

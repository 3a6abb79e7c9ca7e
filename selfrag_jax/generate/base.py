"""The protocol of a language model that writes text, such as `train.load.LoadedModel`."""

from typing import Protocol

from selfrag_jax.model.config import ModelConfig
from selfrag_jax.text.tokenizer import Tokenizer
from selfrag_jax.typing import Params


class Base(Protocol):
  """A model with stacked parameters, its tokenizer and the longest text that it was made for; None: not known."""

  @property
  def config(self) -> ModelConfig: ...
  @property
  def params(self) -> Params: ...
  @property
  def tokenizer(self) -> Tokenizer | None: ...
  @property
  def context_tokens(self) -> int | None: ...

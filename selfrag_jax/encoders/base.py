"""`TextEncoder`: a function of texts to unit vectors, whose parameters can be trained."""

import abc
import copy
import os
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.encoders.batches import Spread, embed_by_length
from selfrag_jax.ragged import round_up
from selfrag_jax.typing import Array, ArrayLike, Params, PRNGKey

# what tells tokenizers apart: cases, accents, numbers, marks, and how much of a long text is read
PROBE = ("Zoë's 2nd naïve café — it cost 1,299.50 € in ÅRHUS; 東京 too.", "unbelievably overlong " * 1000)
STEP = 16  # rows are as long as the longest of their batch, rounded up to a multiple


class TextEncoder(abc.ABC):
  """A function of texts to unit vectors f32 [N, D]: a tokenizer, and a pure function of parameters and tokens."""

  config: Any
  params: Params
  width: int  # D
  max_tokens: int  # of a text; what is behind them is not read
  _spread: Spread | None = None

  @abc.abstractmethod
  def init(self, key: PRNGKey) -> Params:
    """Draw parameters, boxed with the names of their logical axes."""

  @abc.abstractmethod
  def tokens(self, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts, cut to `max_tokens`."""

  @abc.abstractmethod
  def embed(self, params: Params, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Array:
    """Embed right-padded rows of token ids as unit vectors f32 [B, D]; an empty row is 0."""

  @abc.abstractmethod
  def check_folder(self, folder: str | os.PathLike) -> None:
    """Raise FileExistsError for a folder that `save` would refuse, and change nothing."""

  @abc.abstractmethod
  def save(self, folder: str | os.PathLike, params: Params) -> None:
    """Write the encoder with these parameters to a folder that `load_encoder` takes."""

  @property
  def fingerprint(self) -> str:
    """Say what vectors depend on beside the parameters: the configuration, and how texts become tokens."""
    return f"{self.config} {self.tokens(PROBE)}"

  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    """Embed texts, those of about one length together, on all devices of this host."""
    if self._spread is None or self._spread.params is not self.params:
      self._spread = Spread(self.embed, self.params)
    return embed_by_length(self.tokens(texts), self._spread, self.width, self._rounded)

  def with_params(self, params: Params) -> Self:
    """Return the same encoder with other parameters."""
    other = copy.copy(self)
    other.params = params
    return other

  def _rounded(self, length: int) -> int:
    return min(round_up(max(length, 1), STEP), max(self.max_tokens, length))


def unit(rows_BxD: Array) -> Array:
  """Scale rows to norm 1; zeros stay zeros, with a gradient of 0."""
  square = jnp.sum(rows_BxD**2, axis=1, keepdims=True)
  return rows_BxD * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


def computed_in(dtype: str) -> str:
  """Return what `auto` stands for here."""
  if dtype != "auto":
    return dtype
  return "float32" if jax.default_backend() == "cpu" else "bfloat16"

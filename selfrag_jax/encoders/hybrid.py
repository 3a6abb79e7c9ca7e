"""A language model as encoder beside the words themselves: one vector, whose cosine is a mean of both."""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.encoders.language_model import LMEncoder
from selfrag_jax.encoders.words import embed, fit_words, make_word_bag
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.text.tokenizer import Tokenizer
from selfrag_jax.typing import Array, ArrayLike, Params, PRNGKey


class HybridLMEncoder(LMEncoder):
  """An `LMEncoder` whose vectors also hold a bag of words: hybrid retrieval by one inner product.

  The cosine of two texts is (1 - words) times that of the language model and `words` times that of the bags. The bag's
  weights are fitted with those of the language model; they are no part of `constants`.
  """

  def __init__(self, config: ModelConfig, params: Params, tokenizer: Tokenizer, *, words: float, word_width: int):
    """Make an encoder; `words` in [0, 1] is the share of the bags, and `word_width` the dimensions they take."""
    super().__init__(config, params, tokenizer)
    self._share, self._word_width = words, word_width
    self.params = {**self.params, "words": make_word_bag(tokenizer, config.padded_vocab, word_width)}

  @property
  def width(self) -> int:
    return super().width + self._word_width

  def _weights(self, rows: Iterable[Sequence[int]], n: int) -> np.ndarray:
    kept = list(rows)  # both are weighed whenever the weights are fitted, over the same texts
    self.params = {**self.params, "words": fit_words(self.params["words"], self.tokenizer, kept, n)}
    return super()._weights(kept, n)

  def init(self, key: PRNGKey) -> Params:
    return {**super().init(key), "words": jax.tree.map(jnp.asarray, self.params["words"])}

  def apply(self, params: Params, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Array:
    meaning = super().apply(params, tokens_BxT, lengths_B)
    words = embed(params["words"], self._word_width, tokens_BxT, lengths_B).astype(meaning.dtype)
    return jnp.concatenate([(1 - self._share) ** 0.5 * meaning, self._share**0.5 * words], axis=1)

"""Texts as sparse bags of word pieces in a few dimensions: which pieces two texts share, as BM25 would count them.

A piece counts by the square root of its inverse document frequency, so that one that two texts share counts by the
frequency itself, and by BM25's saturation: ten of them are hardly more than three. Each piece has a few random places
and signs in a vector (a sparse Johnson-Lindenstrauss transform, Kane & Nelson 2014, arXiv 1012.1577), so that inner
products stay what they are, up to noise. `embed` is pure and works inside a compiled decode loop.

`token_bag.py` projects by a full matrix, which for a vocabulary of 49,152 and 2,048 dimensions would hold 400 MB, and
knows neither pieces nor saturation: what was trained on its vectors, and what is stored with them, must not change.
"""

from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np
from flax import struct

from selfrag_jax.encoders.token_bag import document_frequency, inverse_document_frequency
from selfrag_jax.model.pooling import unit
from selfrag_jax.ragged import length_mask
from selfrag_jax.text.tokenizer import Tokenizer
from selfrag_jax.typing import Array, ArrayLike

SATURATION = 1.5  # BM25's k1
PLACES = 4  # of a piece in a vector


@struct.dataclass
class WordBag:
  """The arrays of a bag over V token ids."""

  pieces: ArrayLike  # int32[V], the first id that spells the same piece, in capitals or not, behind a space or not
  weights: ArrayLike  # f32[V], of each piece; 0: ignored
  places: ArrayLike  # int32[V, PLACES], below the width of a vector
  signs: ArrayLike  # f32[V, PLACES], of norm 1


def make_word_bag(tokenizer: Tokenizer, vocab_size: int, width: int, seed: int = 0) -> WordBag:
  """Make a bag whose pieces weigh the same but for control tokens, which weigh nothing; the seed draws the places."""
  first: dict[str, int] = {}
  spelled = [tokenizer.decode([i]).strip().lower() for i in range(tokenizer.vocab_size)]
  pieces = np.arange(vocab_size, dtype=np.int32)
  pieces[: len(spelled)] = [first.setdefault(text, i) for i, text in enumerate(spelled)]
  rng = np.random.default_rng(seed)
  places = np.stack([rng.integers(width, size=vocab_size) for _ in range(PLACES)], axis=1).astype(np.int32)
  signs = rng.choice([-1.0, 1.0], size=places.shape) / PLACES**0.5
  return WordBag(pieces, _without_control(np.ones(vocab_size), tokenizer), places, signs.astype(np.float32))


def fit_words(bag: WordBag, tokenizer: Tokenizer, rows: Iterable[Sequence[int]], n: int) -> WordBag:
  """Weigh the pieces by their inverse document frequency over the token ids of `n` texts."""
  pieces = np.asarray(bag.pieces)
  counts = document_frequency((pieces[np.asarray(row, np.int64)].tolist() for row in rows), len(pieces))
  return bag.replace(weights=_without_control(inverse_document_frequency(counts, n) ** 0.5, tokenizer))


def _without_control(weights: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
  weights = weights.astype(np.float32)
  weights[list(tokenizer.special.values())] = 0
  return weights


def embed(bag: WordBag, width: int, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Array:
  """Embed right-padded rows of token ids as unit vectors f32 [B, width]; a row without a piece that counts as 0."""
  tokens = jnp.asarray(tokens_BxT)
  batch, time = tokens.shape
  mask = length_mask(lengths_B, time, jnp)
  pieces = jnp.where(mask, jnp.asarray(bag.pieces)[tokens], -1)
  times = jnp.sum((pieces[:, :, None] == pieces[:, None, :]) & mask[:, None, :], axis=2)
  weights = jnp.asarray(bag.weights)[pieces] * (SATURATION + 1) / (times + SATURATION)
  values = jnp.where(mask, weights, 0)[..., None] * jnp.asarray(bag.signs)[pieces]
  rows = jnp.arange(batch)[:, None, None]
  return unit(jnp.zeros((batch, width), jnp.float32).at[rows, jnp.asarray(bag.places)[pieces]].add(values))

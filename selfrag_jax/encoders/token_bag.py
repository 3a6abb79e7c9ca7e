"""The token-bag encoder: bags of token ids or hashed words, with IDF weights and a fixed random projection.

Nothing is trained, and `apply` works inside a compiled decode loop. Inner products of the projected bags approximate
those of the TF-IDF vectors (Johnson & Lindenstrauss 1984).
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from selfrag_jax.encoders.base import PROBE, TokenEncoder
from selfrag_jax.encoders.batches import embed_by_length
from selfrag_jax.ragged import length_mask, power_of_two
from selfrag_jax.text.words import words
from selfrag_jax.typing import Array, ArrayLike, PRNGKey

WIDTH, BUCKETS = 256, 1 << 16  # the width of a vector and the number of ids, for hashed words


@struct.dataclass
class TokenBag:
  """The arrays of a token-bag encoder."""

  projection: Array  # f32[V, D], variance 1/D, so that a row has a norm of about 1
  weights: Array  # f32[V], inverse document frequency; 0 for tokens that are ignored


def document_frequency(token_lists: Iterable[Sequence[int]], vocab_size: int) -> np.ndarray:
  """Count for each token id the documents that have it, int64[V]. Raises IndexError for ids >= V."""
  counts = np.zeros(vocab_size, np.int64)
  for tokens in token_lists:
    counts[np.unique(np.asarray(tokens, np.int64))] += 1
  return counts


def inverse_document_frequency(document_frequency: np.ndarray, n_documents: int) -> np.ndarray:
  """Return log(1 + (N - df + 0.5) / (df + 0.5)) (Robertson & Sparck Jones 1976, in the form that is never negative)."""
  return np.log1p((n_documents - document_frequency + 0.5) / (document_frequency + 0.5))


def init_token_bag(
  key: PRNGKey,
  vocab_size: int,
  d_embed: int,
  *,
  document_frequency: ArrayLike | None = None,
  n_documents: int | None = None,
  special_ids: Sequence[int] = (),
) -> TokenBag:
  """Make the arrays for V = `vocab_size` ids and D = `d_embed` dimensions; the same key gives the same projection.

  With `document_frequency` int[V] over N = `n_documents`, a token weighs its `inverse_document_frequency`, else 1.
  `special_ids` weigh 0.
  Raises ValueError if only one of `document_frequency` and `n_documents` is given, or if they or the ids do not fit.
  """
  weights = _weights(vocab_size, document_frequency, n_documents, special_ids)
  return TokenBag(projection=_projection(key, vocab_size, d_embed), weights=weights)


def _projection(key: PRNGKey, vocab_size: int, d_embed: int) -> Array:
  return (jax.random.normal(key, (vocab_size, d_embed), jnp.float32) / np.sqrt(d_embed)).astype(jnp.float32)


@lru_cache(2)
def _shared_projection(vocab_size: int, d_embed: int) -> np.ndarray:
  """The projection of all encoders of these sizes, drawn once; on the host, since each may use other devices."""
  return np.asarray(_projection(jax.random.key(0), vocab_size, d_embed))


def _weights(
  vocab_size: int, document_frequency: ArrayLike | None, n_documents: int | None, special_ids: Sequence[int]
) -> Array:
  if (document_frequency is None) != (n_documents is None):
    raise ValueError("document_frequency and n_documents belong together: give both, or neither for equal weights")
  weights = np.ones(vocab_size)
  if document_frequency is not None and n_documents is not None:
    df = np.asarray(document_frequency)
    if df.shape != (vocab_size,) or df.max() > n_documents:
      raise ValueError(
        f"document_frequency has shape {df.shape} and maximum {df.max()}; "
        f"expected ({vocab_size},) and at most n_documents = {n_documents}: count both over the same documents"
      )
    weights = inverse_document_frequency(df, n_documents)
  if special := [i for i in special_ids if not 0 <= i < vocab_size]:
    raise ValueError(f"special_ids {special} are outside the vocabulary of {vocab_size}; give its padded size")
  weights[list(special_ids)] = 0
  return jnp.asarray(weights, jnp.float32)


def embed(bag: TokenBag, token_ids: ArrayLike, mask: ArrayLike) -> Array:
  """Embed token_ids int32[B, T] where mask bool[B, T]: sum the weighted projections of all occurrences, and normalise.

  Returns f32[B, D] of norm 1, or 0 for a row without a token of weight above 0. Raises ValueError if the shapes differ.
  """
  if jnp.ndim(token_ids) != 2 or jnp.shape(token_ids) != jnp.shape(mask):
    raise ValueError(f"token_ids {jnp.shape(token_ids)} and mask {jnp.shape(mask)} must both be [B, T]")
  weights_BxT = jnp.where(mask, bag.weights[token_ids], 0)
  total = jnp.einsum("bt,btd->bd", weights_BxT, bag.projection[token_ids], precision=jax.lax.Precision.HIGHEST)
  norm = jnp.linalg.norm(total, axis=-1, keepdims=True)
  return jnp.where(norm == 0, 0, total / jnp.where(norm == 0, 1, norm))


@jax.jit
def embed_rows(bag: TokenBag, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Array:
  """Embed right-padded rows of token ids as `embed` does."""
  return embed(bag, tokens_BxT, length_mask(lengths_B, jnp.shape(tokens_BxT)[1], jnp))


def hash_words(text: str) -> list[int]:
  """Return the words of a text, each hashed to a number below `BUCKETS`."""
  return [zlib.crc32(word.encode()) % BUCKETS for word in words(text)]


class TokenBagEncoder(TokenEncoder):
  """An encoder of texts as bags of tokens, by default of hashed words: no weights to load, nothing to train.

  `fit` sets the constants `n_texts` and `frequency` int64 [V], the number of texts that have each token; without it all
  tokens weigh the same. A text whose tokens are in no document would be similar to some documents by chance: `terms`
  and `is_familiar` let a retriever detect such a text.
  """

  def __init__(
    self,
    width: int = WIDTH,
    vocab_size: int = BUCKETS,
    encode: Callable[[str], list[int]] = hash_words,
    special_ids: Sequence[int] = (),
  ):
    """Make an encoder; `encode` maps a text to ids below `vocab_size`, and the weight of `special_ids` is 0."""
    self._width, self._vocab_size, self._encode, self._special_ids = width, vocab_size, encode, special_ids
    self._params: TokenBag | None = None
    self._made_of = self._constants  # the constants from which `_params` were made

  @property
  def width(self) -> int:
    return self._width

  @property
  def fingerprint(self) -> str:
    """The settings; empty for the default settings, as in knowledge bases of earlier versions."""
    settings = (self._width, self._vocab_size, self.tokens(PROBE[:1]), self._special_ids)
    return "" if settings == (WIDTH, BUCKETS, [hash_words(PROBE[0])], ()) else str(settings)

  @property
  def params(self) -> TokenBag:
    if self._params is None or self._made_of is not self._constants:
      weights = _weights(self._vocab_size, *self._counts, self._special_ids)
      projection = jnp.asarray(_shared_projection(self._vocab_size, self._width))
      self._params, self._made_of = TokenBag(projection, weights), self._constants
    return self._params

  @property
  def _counts(self) -> tuple[np.ndarray | None, int | None]:
    n_texts = self.constants.get("n_texts")
    return self.constants.get("frequency"), None if n_texts is None else int(n_texts)

  def init(self, key: PRNGKey) -> TokenBag:
    """Draw the projection, and compute the weights from `constants`."""
    weights = _weights(self._vocab_size, *self._counts, self._special_ids)
    return TokenBag(_projection(key, self._vocab_size, self._width), weights)

  def tokens(self, texts: Sequence[str]) -> list[list[int]]:
    return [self._encode(text) for text in texts]

  def apply(self, params: TokenBag, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Array:
    return embed_rows(params, tokens_BxT, lengths_B)

  def fit(self, texts: Sequence[str]) -> None:
    self._count(map(self._encode, texts), len(texts))

  def fit_tokens(self, rows: Sequence[Sequence[int]]) -> None:
    self._count(rows, len(rows))

  def _count(self, rows: Iterable[Sequence[int]], n: int) -> None:
    self.constants = {"frequency": document_frequency(rows, self._vocab_size), "n_texts": np.array(n)}

  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    """Embed texts as unit vectors f32 [N, D]; a text without a token gives the zero vector."""
    return embed_by_length(self.tokens(texts), partial(self.apply, self.params), self.width, power_of_two)

  def terms(self, text: str) -> frozenset[int]:
    return frozenset(self._encode(text))

  def is_familiar(self, text: str) -> bool:
    """Tell whether a text shares a token with any text that the encoder was fitted to."""
    frequency = self.constants.get("frequency")
    return frequency is not None and bool(frequency[list(self.terms(text))].any())

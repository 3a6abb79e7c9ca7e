"""The default encoder: a bag of token ids with IDF weights and a fixed random projection.

Nothing is trained and nothing runs on the host, so it works inside a compiled decode loop; inner products of the
projected bags approximate those of the TF-IDF vectors (Johnson & Lindenstrauss 1984).
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from selfrag_jax.typing import Array, ArrayLike


@struct.dataclass
class TokenBag:
  """The encoder's constants."""

  projection: Array  # f32[V, D], variance 1/D, so that a row has a norm of about 1
  weights: Array  # f32[V], inverse document frequency; 0 for tokens that do not count


def document_frequency(token_lists: Iterable[Sequence[int]], vocab_size: int) -> np.ndarray:
  """Count in how many of the documents each token id occurs. Returns int64[V]. Raises IndexError for ids >= V."""
  counts = np.zeros(vocab_size, np.int64)
  for tokens in token_lists:
    counts[np.unique(np.asarray(tokens, np.int64))] += 1
  return counts


def init_token_bag(
  vocab_size: int,
  d_embed: int,
  *,
  seed: int = 0,
  document_frequency: ArrayLike | None = None,
  n_documents: int | None = None,
  special_ids: Sequence[int] = (),
) -> TokenBag:
  """Make the encoder of `vocab_size` ids into `d_embed` numbers; the same seed gives the same encoder.

  With `document_frequency` int[V] over `n_documents`, a token weighs log(1 + (N - df + 0.5) / (df + 0.5)) (Robertson &
  Sparck Jones 1976, in the form that is never negative), else 1. `special_ids` weigh 0.
  Raises ValueError if only one of the two is given, or if they or the ids do not fit.
  """
  if (document_frequency is None) != (n_documents is None):
    raise ValueError("document_frequency and n_documents belong together: give both, or neither for equal weights")
  weights = np.ones(vocab_size)
  if document_frequency is not None:
    df = np.asarray(document_frequency)
    if df.shape != (vocab_size,) or df.max() > n_documents:
      raise ValueError(
        f"document_frequency has shape {df.shape} and maximum {df.max()}; "
        f"expected ({vocab_size},) and at most n_documents = {n_documents}: count both over the same documents"
      )
    weights = np.log1p((n_documents - df + 0.5) / (df + 0.5))
  if special := [i for i in special_ids if not 0 <= i < vocab_size]:
    raise ValueError(f"special_ids {special} are outside the vocabulary of {vocab_size}; give its padded size")
  weights[list(special_ids)] = 0
  projection = jax.random.normal(jax.random.key(seed), (vocab_size, d_embed), jnp.float32) / np.sqrt(d_embed)
  return TokenBag(projection=projection.astype(jnp.float32), weights=jnp.asarray(weights, jnp.float32))


def embed(bag: TokenBag, token_ids: ArrayLike, mask: ArrayLike) -> Array:
  """Embed token_ids int32[B, T] where mask bool[B, T]: the weighted sum of their projections, every occurrence counted.

  Returns f32[B, D] of norm 1, or 0 for a row with no token that counts. Raises ValueError when the shapes differ.
  """
  if jnp.ndim(token_ids) != 2 or jnp.shape(token_ids) != jnp.shape(mask):
    raise ValueError(f"token_ids {jnp.shape(token_ids)} and mask {jnp.shape(mask)} must both be [B, T]")
  weights_BxT = jnp.where(mask, bag.weights[token_ids], 0)
  total = jnp.einsum("bt,btd->bd", weights_BxT, bag.projection[token_ids], precision=jax.lax.Precision.HIGHEST)
  norm = jnp.linalg.norm(total, axis=-1, keepdims=True)
  return jnp.where(norm == 0, 0, total / jnp.where(norm == 0, 1, norm))

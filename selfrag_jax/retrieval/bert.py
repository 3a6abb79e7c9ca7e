"""BERT as a Flax module, read from and written to the files of transformers and sentence-transformers."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from selfrag_jax import files
from selfrag_jax.model.layers import linear
from selfrag_jax.text.wordpiece import WordPieceTokenizer
from selfrag_jax.typing import Array, Params, PRNGKey

CONFIG, WEIGHTS, VOCABULARY, LIMITS = "config.json", "model.safetensors", "vocab.txt", "sentence_bert_config.json"


@dataclasses.dataclass(frozen=True)
class BertConfig:
  """A BERT (arXiv 1810.04805). `labels` > 0 adds the pooler and a head of so many outputs."""

  vocab_size: int = 30_522
  d_model: int = 384
  n_layers: int = 6
  n_heads: int = 12
  mlp_dim: int = 1536
  max_positions: int = 512
  norm_epsilon: float = 1e-12
  max_tokens: int = 256  # of a text; what is behind them is not read
  dtype: str = "float32"
  labels: int = 0


class Bert(nn.Module):
  """Post-norm Transformer encoder over token ids int32 [B, T], of which `mask` bool [B, T] are real.

  Returns states [B, T, D], or what the head makes of the first state, f32 [B, labels]. `types` int32 [B, T] tells the
  two texts of a pair apart (None: all 0).
  """

  config: BertConfig

  @nn.compact
  def __call__(self, tokens_BxT: Array, mask_BxT: Array, types_BxT: Array | None = None) -> Array:
    c = self.config
    # the input side of a matrix over fsdp, its wide side over tensor, as in the language model
    split = lambda *axes: nn.with_logical_partitioning(nn.initializers.normal(0.02), axes)
    norm = lambda name: nn.LayerNorm(epsilon=c.norm_epsilon, dtype=c.dtype, name=name)
    product = lambda x, kernel, *_, **__: linear(x, kernel)  # the one contraction that Dense asks for
    dense = lambda width, name, *axes: nn.Dense(
      width, dtype=c.dtype, kernel_init=split(*axes), dot_general=product, name=name
    )
    table = lambda rows, name, axis=None: nn.Embed(
      rows, c.d_model, dtype=c.dtype, embedding_init=split(axis, "embed"), name=name
    )
    x = table(c.vocab_size, "tokens")(tokens_BxT)
    x += table(c.max_positions, "positions")(jnp.arange(tokens_BxT.shape[1]))[None]
    types = table(2, "types")(jnp.zeros((1, 1), jnp.int32) if types_BxT is None else types_BxT)
    x = norm("norm")(x + types)
    for i in range(c.n_layers):
      heads = lambda name, x=x, i=i: dense(c.d_model, f"{name}_{i}", "embed", "heads")(x).reshape(
        *x.shape[:2], c.n_heads, -1
      )
      query, key, value = heads("query"), heads("key"), heads("value")
      attended = jax.nn.dot_product_attention(query, key, value, mask=mask_BxT[:, None, None, :])
      x = norm(f"attention_norm_{i}")(
        x + dense(c.d_model, f"attention_{i}", "heads", "embed")(attended.reshape(x.shape))
      )
      hidden = nn.gelu(dense(c.mlp_dim, f"up_{i}", "embed", "mlp")(x), approximate=False)
      x = norm(f"mlp_norm_{i}")(x + dense(c.d_model, f"down_{i}", "mlp", "embed")(hidden))
    if not c.labels:
      return x
    pooled = jnp.tanh(dense(c.d_model, "pooler", "embed", None)(x[:, 0]))
    return dense(c.labels, "head", "embed", None)(pooled).astype(jnp.float32)  # scores are compared: no rounding


def init_bert(config: BertConfig, key: PRNGKey) -> Params:
  """Draw parameters, boxed with the names of their logical axes."""
  return Bert(config).init(key, jnp.zeros((1, 8), jnp.int32), jnp.ones((1, 8), bool))


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
_HEAD = {"pooler": "bert.pooler.dense", "head": "classifier"}
_FIELDS = {
  "vocab_size": "vocab_size",
  "hidden_size": "d_model",
  "num_hidden_layers": "n_layers",
  "num_attention_heads": "n_heads",
  "intermediate_size": "mlp_dim",
  "max_position_embeddings": "max_positions",
  "layer_norm_eps": "norm_epsilon",
}


def _names(config: BertConfig) -> dict[str, str]:
  """Map the paths of our parameters to the names of theirs."""
  prefix = "bert." if config.labels else ""  # a model with a head holds the one without as a part
  names = {f"{ours}/embedding": f"{prefix}{theirs}.weight" for ours, theirs in _TABLES.items()}
  for ours, theirs in (_NORMS | _DENSE).items():
    for layer in range(config.n_layers) if "{}" in ours else [0]:
      weight = "scale" if ours in _NORMS else "kernel"
      for mine, kind in ((weight, "weight"), ("bias", "bias")):
        names[f"{ours.format(layer)}/{mine}"] = f"{prefix}{theirs.format(layer)}.{kind}"
  for ours, theirs in _HEAD.items() if config.labels else ():
    names |= {f"{ours}/kernel": f"{theirs}.weight", f"{ours}/bias": f"{theirs}.bias"}
  return names


def read_bert(folder: Path, dtype: str, *, labels: int = 0) -> tuple[BertConfig, Params, WordPieceTokenizer]:
  """Read a folder in the format of sentence-transformers, or of transformers for models with a head.

  Raises FileNotFoundError for a missing file, ValueError for another architecture and for tensors that do not fit.
  """
  if missing := [file for file in (CONFIG, WEIGHTS, VOCABULARY) if not (folder / file).exists()]:
    raise FileNotFoundError(f"{folder} has no {missing[0]}; a BERT's folder has {CONFIG}, {WEIGHTS}, {VOCABULARY}")
  fields = json.loads((folder / CONFIG).read_bytes())
  if fields.get("model_type") != "bert" or fields.get("hidden_act") != "gelu":
    raise ValueError(
      f"{folder} is a {fields.get('model_type')} with {fields.get('hidden_act')}; a BERT with gelu is read"
    )
  limits = folder / LIMITS
  longest = json.loads(limits.read_bytes())["max_seq_length"] if limits.exists() else fields["max_position_embeddings"]
  sizes = {ours: fields[theirs] for theirs, ours in _FIELDS.items()}
  config = BertConfig(**sizes, max_tokens=longest, dtype=dtype, labels=labels)
  return config, _read_params(config, folder), WordPieceTokenizer.from_file(folder / VOCABULARY)


def write_bert(folder: Path, config: BertConfig, params: Params, tokenizer: WordPieceTokenizer) -> None:
  """Write a folder that `read_bert`, transformers and sentence-transformers (by the mean of the states) can load."""
  from safetensors.numpy import save

  leaves = flatten_dict(jax.device_get(params)["params"], sep="/")
  tensors = {
    theirs: np.ascontiguousarray(np.asarray(leaves[ours], np.float32).T if ours.endswith("kernel") else leaves[ours])
    for ours, theirs in _names(config).items()
  }
  architecture = "BertForSequenceClassification" if config.labels else "BertModel"
  fields = {theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()} | {
    "model_type": "bert",
    "architectures": [architecture],
    "hidden_act": "gelu",
    "type_vocab_size": 2,
    "pad_token_id": tokenizer.special["[PAD]"],
    **({"num_labels": config.labels} if config.labels else {}),
  }
  folder.mkdir(parents=True, exist_ok=True)
  (folder / CONFIG).unlink(missing_ok=True)  # an older export must not describe the new weights
  files.write_bytes_atomic(folder / WEIGHTS, save(tensors, {"format": "pt"}))
  files.write_bytes_atomic(folder / VOCABULARY, "".join(f"{piece}\n" for piece in tokenizer.pieces).encode())
  files.write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "do_lower_case": True})
  files.write_json(folder / LIMITS, {"max_seq_length": config.max_tokens})
  if not config.labels:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": config.d_model, "pooling_mode_mean_tokens": True}
    files.write_json(folder / "1_Pooling" / CONFIG, pooling)
    steps = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
      {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
      for i, (path, kind) in enumerate(steps)
    ]
    files.write_json(folder / "modules.json", modules)
  files.write_json(folder / CONFIG, fields)


def _read_params(config: BertConfig, folder: Path) -> Params:
  from safetensors import safe_open

  leaves = {}
  with safe_open(folder / WEIGHTS, framework="numpy") as file:
    known = set(file.keys())
    for ours, theirs in _names(config).items():
      if theirs not in known:
        raise ValueError(f"{folder / WEIGHTS} has no tensor {theirs}")
      values = file.get_tensor(theirs).astype(np.float32)
      leaves[ours] = values.T if ours.endswith("kernel") else values
  shapes = nn.unbox(jax.eval_shape(lambda: init_bert(config, jax.random.key(0))))
  params: Mapping[str, Any] = {"params": unflatten_dict(leaves, sep="/")}
  for (path, ours), theirs in zip(jax.tree.leaves_with_path(shapes), jax.tree.leaves(params), strict=True):
    if ours.shape != theirs.shape:
      raise ValueError(
        f"{folder}: {jax.tree_util.keystr(path)} has shape {theirs.shape}, the config makes it {ours.shape}"
      )
  return jax.device_put(params)

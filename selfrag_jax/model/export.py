"""Models for other programs: Hugging Face folders and GGUF files, by the tables of `layouts` from right to left."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
from flax.traverse_util import flatten_dict

from selfrag_jax.model.config import ModelConfig, parse_block_pattern
from selfrag_jax.model.gguf import described_tokenizer
from selfrag_jax.model.layouts import GGUF, HUGGING_FACE
from selfrag_jax.model.layouts.table import ARCHITECTURE, Layout, axis_sizes, rearrange, shape_of, to_file
from selfrag_jax.model.stored import (
  MARK,
  SENTENCE_PIECES,
  TOKENIZER,
  TOKENIZER_CONFIG,
  WEIGHTS,
  check_export,
  export_folder,
)
from selfrag_jax.model.vocabulary import VOCABULARY
from selfrag_jax.storage.atomic import replace_atomic, write_bytes_atomic, write_json
from selfrag_jax.text.chat import end_ids
from selfrag_jax.text.sentencepiece import SentencePieceTokenizer
from selfrag_jax.text.tokenizer import BPETokenizer
from selfrag_jax.typing import Params

TOKENIZER_FILES = (TOKENIZER, TOKENIZER_CONFIG, SENTENCE_PIECES)


def export_safetensors(
  folder: str | os.PathLike,
  config: ModelConfig,
  params: Params,
  *,
  tokenizer: BPETokenizer | SentencePieceTokenizer | None = None,
  vocab_size: int | None = None,
  context_tokens: int | None = None,
  others: Mapping[str, bytes] | None = None,
) -> None:
  """Write `model.safetensors`, `tokenizer.json` and, last, `config.json`, so that transformers can load the folder.

  `params` are stacked and keep their dtype. Only the first `vocab_size` token ids are kept (None: all;
  `Pretrained.base_vocab_size` drops the appended ids). `context_tokens` is kept as the longest text that the model was
  made for. `others` are further files by name. Raises FileExistsError unless the folder is new, empty or an earlier
  export, and ValueError for a model that none of the architectures of `layouts` can express.
  """
  others, folder = others or {}, Path(folder)
  names = (*TOKENIZER_FILES, *others)
  check_export(folder, names)
  rows = _kept_rows(config, vocab_size)
  model_type, layout, fields = _layout_of(config, HUGGING_FACE, "transformers")
  fields |= {"vocab_size": rows, "model_type": model_type, "architectures": [layout.architecture]}
  if context_tokens is not None:
    fields["max_position_embeddings"] = context_tokens
  if tokenizer:
    bos, *ends = end_ids(tokenizer, rows)
    ends = sorted({i for i in ends if i is not None})
    fields |= {"bos_token_id": bos, "eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None}
  tensors = _write_params(layout, config, rows, params)

  from safetensors.numpy import save_file

  with export_folder(folder, fields, names):
    with replace_atomic(folder / WEIGHTS) as path:
      save_file(tensors, path, metadata=MARK)
    if isinstance(tokenizer, SentencePieceTokenizer):
      write_bytes_atomic(folder / SENTENCE_PIECES, tokenizer.model)
    elif tokenizer is not None:
      write_json(folder / TOKENIZER, _tokenizer_json(tokenizer, rows))
      write_json(folder / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast"})
    for name, data in others.items():
      write_bytes_atomic(folder / name, data)


def export_gguf(
  path: str | os.PathLike,
  config: ModelConfig,
  params: Params,
  *,
  context_tokens: int,
  tokenizer: BPETokenizer | SentencePieceTokenizer | None = None,
  vocab_size: int | None = None,
) -> None:
  """Write one GGUF file for llama.cpp, which has not read one here: in float32, to be quantised there.

  The arguments are as above; llama.cpp needs to know the longest text.

  Raises FileExistsError for a path that exists, and ValueError for a model that none of the architectures of `layouts`
  can express, or a tokenizer whose splitting GGUF has no name for.
  """
  from gguf import GGUFValueType, GGUFWriter

  path = Path(path)
  if path.exists():
    raise FileExistsError(f"{path} exists; give a new path")
  rows = _kept_rows(config, vocab_size)
  kind, layout, fields = _layout_of(config, GGUF, "llama.cpp")
  fields = {name: value for name, value in fields.items() if "." in name and value is not None}
  fields |= {f"{kind}.context_length": context_tokens, f"{kind}.vocab_size": rows}
  fields |= described_tokenizer(tokenizer, rows) if tokenizer else {"tokenizer.ggml.model": "none"}
  types = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
  with replace_atomic(path) as temporary:
    writer = GGUFWriter(temporary, kind)
    for name, value in fields.items():
      if name == ARCHITECTURE:  # which the writer has
        continue
      if isinstance(value, list):
        writer.add_array(name, value)
      else:
        writer.add_key_value(name, value, types[type(value)])
    for name, tensor in _write_params(layout, config, rows, params).items():
      writer.add_tensor(name, tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kept_rows(config: ModelConfig, vocab_size: int | None) -> int:
  rows = config.vocab_size if vocab_size is None else vocab_size
  if not 0 < rows <= config.vocab_size:
    raise ValueError(f"vocab_size {rows} is not within the model's {config.vocab_size}")
  return rows


def _layout_of(config: ModelConfig, layouts: Mapping[str, Layout], program: str) -> tuple[str, Layout, dict[str, Any]]:
  """Return the first architecture that can express a model, and its fields. Raises ValueError where none can."""
  problems: list[tuple[int, str]] = []
  for model_type, layout in layouts.items():
    if not set(config.block_pattern or ()) <= set(layout.blocks):
      continue
    fields = {theirs: getattr(config, ours) for theirs, ours in layout.fields.items()} | layout.written(config)
    implied = layout.implied_by({**layout.defaults, **fields})
    implied["block_pattern"] = parse_block_pattern(implied["block_pattern"], config.n_layers)
    others = [name for name, value in implied.items() if getattr(config, name) != value]
    if not others:
      return model_type, layout, fields
    only = f"{layout.architecture or model_type} can only express {implied[others[0]]!r}"
    problems.append((len(others), f"{others[0]} is {getattr(config, others[0])!r}; {only}"))
  blocks = "".join(sorted(set(config.block_pattern or ())))
  mixed = f"block_pattern has the blocks {blocks}; no architecture of {program} that is written here has them all"
  raise ValueError(min(problems)[1] if problems else mixed)


def _write_params(layout: Layout, config: ModelConfig, rows: int, params: Params) -> dict[str, np.ndarray]:
  sizes = axis_sizes(config, rows)
  parts: dict[str, list[np.ndarray]] = {}
  leaves = {name: np.asarray(leaf) for name, leaf in flatten_dict(nn.unbox(params)["params"], sep="/").items()}
  for place in layout.places(config):
    weight = place.weight
    if place.leaf is None:
      tensor = np.full(shape_of(weight.our_axes, sizes), weight.neutral, config.param_dtype)
    else:
      leaf = leaves[place.leaf]
      tensor = leaf[:rows] if place.leaf in VOCABULARY else leaf if place.row is None else leaf[place.row]
    tensor = to_file(tensor, weight.numbers)
    parts.setdefault(place.theirs, []).append(rearrange(tensor, weight.our_axes, weight.their_axes, sizes))
  # safetensors writes the memory of an array and ignores its strides
  return {name: np.ascontiguousarray(np.concatenate(found)) for name, found in parts.items()}


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

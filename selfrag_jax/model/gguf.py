"""A reader of GGUF files: their metadata, their tensors dequantised one at a time, and their tokenizer.

The reader trusts no length in a file: it compares each with the rest of the file before using it.
"""

import json
import mmap
import reprlib
import struct
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from selfrag_jax.model.stored import Stored, Tensors
from selfrag_jax.storage.json_lines import refuse_pointer
from selfrag_jax.text.chat import end_ids
from selfrag_jax.text.sentencepiece import CONTROL, UNKNOWN, SentencePieceTokenizer
from selfrag_jax.text.tokenizer import BPETokenizer, Tokenizer, splitting

# GGUF's name of a pre-tokenizer -> whether it splits numbers into digits; otherwise all split text as GPT-2 does.
DIGITS_ALONE = {"gpt-2": False, "smollm": True}
# the numbers of GGUF's value types
STRING, ARRAY = 8, 9
SCALARS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
MAX_AXES = 4
MAX_ALIGNMENT = 1 << 16


class _Cursor:
  """A position in the header of a file that advances with every value that is read."""

  def __init__(self, data: memoryview):
    self.data, self.at = data, 0

  def take(self, n_bytes: int, what: str) -> memoryview:
    """Return the next `n_bytes`. Raises ValueError if fewer are left of the file."""
    if n_bytes > len(self.data) - self.at:
      raise ValueError(f"it ends within {what}")
    self.at += n_bytes
    return self.data[self.at - n_bytes : self.at]

  def number(self, kind: str, what: str) -> int:
    return struct.unpack(f"<{kind}", self.take(struct.calcsize(kind), what))[0]

  def string(self, what: str) -> str:
    return bytes(self.take(self.number("Q", what), what)).decode("utf-8")

  def value(self, kind: int, what: str) -> Any:
    """Read a value of the type with this number; arrays are lists."""
    if kind != ARRAY:
      [value] = self.values(kind, 1, what)
      return value
    kind, length = self.number("I", what), self.number("Q", what)
    if kind == ARRAY:
      raise ValueError(f"{what} is a list of values of type {kind}; lists of strings and of numbers are read")
    return self.values(kind, length, what)

  def values(self, kind: int, length: int, what: str) -> list[Any]:
    if kind == STRING:
      if length > len(self.data) // 8:  # each string begins with a length of 8 bytes
        raise ValueError(f"it ends within {what}")
      return [self.string(what) for _ in range(length)]
    if kind not in SCALARS:
      raise ValueError(f"{what} has the type {kind}, which GGUF does not have")
    dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
    values = np.frombuffer(self.take(dtype.itemsize * length, what), dtype).tolist()
    # read a float32 as its shortest decimal: 1e-5, not 9.999999747378752e-06
    return [float(str(np.float32(value))) for value in values] if SCALARS[kind] == "f4" else values


def read_gguf(path: str | PathLike) -> tuple[dict[str, Any], Tensors]:
  """Return the metadata by key and the tensors, whose `read` dequantises to float32, outermost axis first.

  Raises ValueError, with the file's name, if the file is not GGUF or is damaged.
  """
  refuse_pointer(path)
  try:
    with open(path, "rb") as file:
      data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return _parse(Path(path), _Cursor(data))
  except ValueError as error:
    raise ValueError(f"{path} is damaged, or no GGUF file that can be read: {error}; download it again") from None


def _parse(path: Path, cursor: _Cursor) -> tuple[dict[str, Any], Tensors]:
  if cursor.take(4, "its first bytes") != b"GGUF":
    raise ValueError("it does not begin with GGUF")
  if (version := cursor.number("I", "its version")) not in (2, 3):
    raise ValueError(f"its version is {version}, 2 and 3 are read (with the least byte first)")
  n_tensors, n_values = cursor.number("Q", "its counts"), cursor.number("Q", "its counts")
  metadata: dict[str, Any] = {}
  for _ in range(n_values):  # every value takes bytes, so that a count that is too large meets the end of the file
    key = cursor.string(f"the key behind {list(metadata)[-1:]}")
    if key in metadata:
      raise ValueError(f"the key {key} occurs twice")
    metadata[key] = cursor.value(cursor.number("I", key), key)
  described = [_describe(cursor) for _ in range(n_tensors)]
  alignment = metadata.get("general.alignment", 32)
  if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
    raise ValueError(f"general.alignment is {alignment!r}, it must be a power of two")
  first, tensors, ends = -(-cursor.at // alignment) * alignment, {}, []
  for name, axes, kind, offset in described:
    if name in tensors:
      raise ValueError(f"the tensor {name} occurs twice")
    tensors[name], end = _stored(path, cursor.data, name, axes, kind, first + offset)
    ends.append((first + offset, end, name))
  ends.sort()
  for (_, end, name), (start, _, other) in pairwise(ends):
    if start < end:
      raise ValueError(f"the tensors {name} and {other} overlap")
  return metadata, tensors


def _describe(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
  """Read name, axes (outermost first), type and offset of a tensor."""
  name = cursor.string("the names of its tensors")
  if (n_axes := cursor.number("I", name)) > MAX_AXES:
    raise ValueError(f"the tensor {name} has {n_axes} axes, at most {MAX_AXES} are read")
  axes = tuple(cursor.number("Q", name) for _ in range(n_axes))[::-1]
  return name, axes, cursor.number("I", name), cursor.number("Q", name)


def _stored(
  path: Path, data: memoryview, name: str, axes: tuple[int, ...], kind: int, start: int
) -> tuple[Stored, int]:
  """Return a tensor, and the byte of the file where it ends."""
  from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

  try:
    quantization = GGMLQuantizationType(kind)
  except ValueError:
    raise ValueError(f"the tensor {name} has the quantisation {kind}, which the package gguf does not know") from None
  per_block, block_bytes = GGML_QUANT_SIZES[quantization]
  width = axes[-1] if axes else 1
  if not axes or min(axes) < 1 or width % per_block:
    raise ValueError(f"the tensor {name} has the shape {axes} in blocks of {per_block}")
  rows = int(np.prod(axes[:-1], dtype=object))
  end = start + rows * (width // per_block) * block_bytes
  if end > len(data):
    raise ValueError(f"the tensor {name} ends at byte {end}, the file at {len(data)}")
  read = partial(_dequantised, path, name, data[start:end], quantization, axes)
  dtype = quantization.name if quantization.name.startswith("I") and quantization.name[1:].isdigit() else "F32"
  return Stored(axes, dtype, read), end


def _dequantised(path: Path, name: str, data: memoryview, quantization: Any, axes: tuple[int, ...]) -> np.ndarray:
  from gguf.quants import dequantize

  numbers = {"F32": np.float32, "F16": np.float16}.get(quantization.name, np.uint8)
  try:
    return dequantize(np.frombuffer(data, numbers).reshape(*axes[:-1], -1), quantization)
  except NotImplementedError:
    raise ValueError(f"{path}: tensor {name} is {quantization.name}, which gguf cannot dequantise") from None


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer | None:
  """Rebuild the file's tokenizer; None if it has none. Raises ValueError if it is of a kind that we cannot run."""
  from gguf import TokenType

  if metadata.get("tokenizer.ggml.model", "none") == "none":
    return None
  if metadata["tokenizer.ggml.model"] == "llama":
    pieces, types = (_list(metadata, name, LISTS[name]) for name in (TOKENS, TYPES))
    scores, unknown = _list(metadata, SCORES, float), metadata.get(UNKNOWN_ID, 0)
    if not len(pieces) == len(types) == len(scores):
      raise ValueError(f"{TOKENS} has {len(pieces)} entries, {TYPES} {len(types)}, {SCORES} {len(scores)}")
    if not isinstance(unknown, int) or not 0 <= unknown < len(pieces):
      raise ValueError(f"{UNKNOWN_ID} is {reprlib.repr(unknown)}; it must be an id of the {len(pieces)} tokens")
    if wrong := [kind for kind in types if type(kind) is not int or not 1 <= kind <= 6]:
      raise ValueError(f"{TYPES} has {reprlib.repr(wrong[0])}; a type is a number from 1 to 6")
    adds_space = metadata.get(ADDS_SPACE, True)
    if not isinstance(adds_space, bool):
      raise ValueError(f"{ADDS_SPACE} is {reprlib.repr(adds_space)}; it must be true or false")
    return SentencePieceTokenizer.from_pieces(pieces, scores, types, unknown=unknown, adds_space=adds_space)
  model, splitting = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
  if model != "gpt2" or splitting not in tuple(DIGITS_ALONE):
    raise ValueError(
      f"the file's tokenizer is {model!r} with tokenizer.ggml.pre {splitting!r}; implemented are 'llama', and "
      f"'gpt2' with one of {sorted(DIGITS_ALONE)}: load the model's Hugging Face folder instead"
    )
  tokens, types, merges = (_list(metadata, name, kind) for name, kind in LISTS.items())
  if len(tokens) != len(types):
    raise ValueError(f"tokenizer.ggml.tokens has {len(tokens)} entries, tokenizer.ggml.token_type {len(types)}")
  control = [i for i, kind in enumerate(types) if kind not in (TokenType.NORMAL, TokenType.BYTE)]
  return BPETokenizer.from_pieces(tokens, merges, control, digits=DIGITS_ALONE[str(splitting)])


TOKENS, TYPES, MERGES, SCORES, UNKNOWN_ID, ADDS_SPACE = (
  f"tokenizer.ggml.{name}"
  for name in ("tokens", "token_type", "merges", "scores", "unknown_token_id", "add_space_prefix")
)
LISTS = {TOKENS: str, TYPES: int, MERGES: str}


def _list(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
  values = metadata.get(name)
  if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
    raise ValueError(f"{name} is missing, or no list of {kind.__name__}; load the model's Hugging Face folder instead")
  return values


def described_tokenizer(tokenizer: BPETokenizer | SentencePieceTokenizer, rows: int) -> dict[str, Any]:
  """Return the fields of a file for a tokenizer, ids below `rows` only: what `gguf_tokenizer` reads.

  Raises ValueError for a tokenizer that splits text in a way that GGUF has no name for here.
  """
  from gguf import TokenType

  if isinstance(tokenizer, SentencePieceTokenizer):
    appended = [(name, -1000.0, CONTROL) for name, i in tokenizer.special.items() if i >= len(tokenizer.pieces)]
    unused = [(f"[UNUSED_{i}]", -1000.0, int(TokenType.UNUSED)) for i in range(tokenizer.vocab_size, rows)]
    described = [*tokenizer.pieces, *appended, *unused][:rows]
    pieces, scores, types = (list(column) for column in zip(*described, strict=True))
    unknown = {UNKNOWN_ID: types.index(UNKNOWN)} if UNKNOWN in types else {}
    lists = {TOKENS: pieces, SCORES: scores, TYPES: types, **_ends(tokenizer, rows)}
    return {"tokenizer.ggml.model": "llama", **lists, **unknown, ADDS_SPACE: tokenizer.adds_space}
  definition = json.loads(tokenizer._rust.to_str())
  by_name = {name: splitting(digits) for name, digits in DIGITS_ALONE.items()}
  names = [name for name, splits in by_name.items() if splits == definition["pre_tokenizer"]]
  if not names or definition["normalizer"]:
    raise ValueError("the tokenizer splits text in a way that GGUF has no name for; export a Hugging Face folder")
  tokens = {i: piece for piece, i in definition["model"]["vocab"].items() if i < rows}
  special = {i: name for name, i in tokenizer.special.items() if i < rows}
  known = tokens | special
  return {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": names[0],
    **_ends(tokenizer, rows),
    TOKENS: [known.get(i, f"[UNUSED_{i}]") for i in range(rows)],
    TYPES: [
      int(TokenType.CONTROL if i in special else TokenType.NORMAL if i in tokens else TokenType.UNUSED)
      for i in range(rows)
    ],
    MERGES: [" ".join(merge) for merge in definition["model"]["merges"]],
  }


def _ends(tokenizer: BPETokenizer | SentencePieceTokenizer, rows: int) -> dict[str, Any]:
  """Return the fields for the tokens that begin and end a text; without them llama.cpp takes ids of other models."""
  ids = {name: i for name, i in zip(("bos", "eos", "eot"), end_ids(tokenizer, rows), strict=True) if i is not None}
  fields = {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items()}
  return {**fields, "tokenizer.ggml.add_bos_token": "bos" in ids, "tokenizer.ggml.add_eos_token": False}

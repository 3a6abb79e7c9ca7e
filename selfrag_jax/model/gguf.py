"""Read GGUF files: their metadata, their tensors dequantised one at a time, and the tokenizer inside."""

from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from typing import Any

import numpy as np

from selfrag_jax.text.tokenizer import BPETokenizer

# How GGUF calls a way of splitting text before the BPE -> whether it takes digits one by one; the rest is GPT-2's.
DIGITS_ALONE = {"gpt-2": False, "smollm": True}


def read_gguf(path: str | PathLike) -> tuple[dict[str, Any], dict[str, Callable[[], np.ndarray]]]:
  """Return the metadata by key, and for every tensor a function that dequantises it, float32 and outermost axis first.

  Raises ValueError if the file is no GGUF.
  """
  from gguf import GGUFReader, GGUFValueType
  from gguf.quants import dequantize

  reader = GGUFReader(path)
  metadata = {name: field.contents() for name, field in reader.fields.items()}
  for name, field in reader.fields.items():
    if field.types == [GGUFValueType.FLOAT32]:
      metadata[name] = float(str(np.float32(metadata[name])))  # 1e-5, not 9.999999747378752e-06
  return metadata, {tensor.name: partial(dequantize, tensor.data, tensor.tensor_type) for tensor in reader.tensors}


def gguf_tokenizer(metadata: Mapping[str, Any]) -> BPETokenizer | None:
  """Rebuild the tokenizer, None if the file has none. Raises ValueError if it is no byte-level BPE that we can run."""
  from gguf import TokenType

  if "tokenizer.ggml.model" not in metadata:
    return None
  model, splitting = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
  if model != "gpt2" or splitting not in DIGITS_ALONE:
    raise ValueError(
      f"the file's tokenizer is {model!r} with tokenizer.ggml.pre {splitting!r}; implemented is 'gpt2' with one of "
      f"{sorted(DIGITS_ALONE)}: load the model's Hugging Face folder instead"
    )
  tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
  control = [i for i, kind in enumerate(types) if kind not in (TokenType.NORMAL, TokenType.BYTE)]
  return BPETokenizer.from_pieces(tokens, metadata["tokenizer.ggml.merges"], control, digits=DIGITS_ALONE[splitting])

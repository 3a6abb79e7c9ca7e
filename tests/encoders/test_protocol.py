"""The one protocol of all encoders: callers need not know the kind, and a wrapper hides nothing of its encoder."""

import subprocess
import sys

import flax.linen as nn
import jax
import numpy as np
import pytest

from selfrag_jax.encoders.base import Encoder, FunctionEncoder, as_encoder
from selfrag_jax.encoders.cached import BlockEncoder, CachedEncoder, CorpusEncoder, encoder_key
from selfrag_jax.encoders.hashed_words import HashingEncoder
from selfrag_jax.encoders.language_model import LMEncoder
from selfrag_jax.encoders.load import load_encoder
from selfrag_jax.encoders.token_bag import TokenBagEncoder
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import init_params
from selfrag_jax.ragged import pad_rows
from selfrag_jax.retrieval.dense import DenseRetriever
from selfrag_jax.retrieval.document import Document
from selfrag_jax.text.tokenizer import ByteTokenizer

TEXTS = ["the zebra of the marsh", "an otter", "", "the heron, the otter and the lynx"]


def lengths(texts):
  return np.array([[len(text), 1, 2] for text in texts], np.float32)


def language_model():
  tokenizer = ByteTokenizer()
  config = ModelConfig(tokenizer.vocab_size, d_model=16, n_layers=1, n_heads=2, init_scale=0.3)
  return LMEncoder(config, nn.unbox(init_params(config, jax.random.key(0))), tokenizer)


TOKEN_ENCODERS = {"hashed words": TokenBagEncoder, "language model": language_model,
                  "ids": lambda: TokenBagEncoder(8, 300, ByteTokenizer().encode, (0, 1))}  # fmt: skip


def test_a_function_is_an_encoder_with_all_defaults():
  encoder = as_encoder(lengths)
  encoder.fit(TEXTS)
  assert (encoder.name, encoder.constants, encoder.learned_params, encoder.width) == ("", {}, {}, 3)
  assert encoder.fingerprint is encoder.count_tokens is None
  assert encoder.is_familiar("anything")
  np.testing.assert_array_equal(encoder(TEXTS), lengths(TEXTS))
  assert encoder == as_encoder(lengths) != as_encoder(lambda texts: lengths(texts))
  assert len({encoder, as_encoder(lengths)}) == 1
  assert as_encoder(encoder) is encoder


def test_the_protocol_and_the_names_import_no_jax():
  code = (
    "import sys\nfrom selfrag_jax.encoders import base, hashed_words, load\n"
    "assert load.load_encoder('hashing-8')(['a']).shape == (1, 8)\n"
    "heavy = {'jax', 'flax', 'tensorflow'} & set(sys.modules)\nassert not heavy, heavy"
  )
  subprocess.run([sys.executable, "-c", code], check=True)


def test_encoders_are_loaded_by_name():
  assert isinstance(load_encoder("token-bag"), TokenBagEncoder)
  default = HashingEncoder()
  np.testing.assert_array_equal(load_encoder(default.name)(TEXTS), default(TEXTS))
  assert load_encoder("hashing-64").width == 64


@pytest.mark.parametrize("make", TOKEN_ENCODERS.values(), ids=TOKEN_ENCODERS)
def test_compiled_programs_and_stores_get_the_same_vectors(make):
  encoder, apply = make(), None
  for fit in (lambda: None, lambda: encoder.fit(TEXTS)):
    fit()
    apply = apply or jax.jit(encoder.apply)
    rows = apply(encoder.params, *pad_rows(encoder.tokens(TEXTS), 64))
    np.testing.assert_allclose(encoder(TEXTS), rows, atol=1e-6)
    assert rows.shape == (len(TEXTS), encoder.width)
    assert not np.any(rows[2])
  assert apply._cache_size() == 1  # what is fitted is an argument: it compiles nothing again
  described = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert described(nn.unbox(encoder.init(jax.random.key(1)))) == described(encoder.params)


@pytest.mark.parametrize("make", TOKEN_ENCODERS.values(), ids=TOKEN_ENCODERS)
def test_constants_are_all_that_a_fit_changes(make):
  encoder, other = make(), make()
  plain = encoder(TEXTS)
  encoder.fit(TEXTS)
  assert not np.allclose(encoder(TEXTS), plain)
  other.constants = encoder.constants
  np.testing.assert_array_equal(other(TEXTS), encoder(TEXTS))
  by_tokens = make()
  by_tokens.fit_tokens(by_tokens.tokens(TEXTS))
  np.testing.assert_array_equal(by_tokens(TEXTS), encoder(TEXTS))


def test_keys_tell_encoders_apart():
  fitted = TokenBagEncoder()
  fitted.fit(TEXTS)
  others = [TokenBagEncoder(), fitted, TokenBagEncoder(12), TOKEN_ENCODERS["ids"](), language_model()]
  assert len({encoder_key(encoder, "") for encoder in others}) == len(others)
  assert encoder_key(TokenBagEncoder(), "a") == encoder_key(TokenBagEncoder(), "a") != encoder_key(fitted, "a")


def test_an_encoder_around_another_one_hides_nothing_of_it(tmp_path):
  members = {name for name in vars(Encoder) if not name.startswith("_")}
  assert members - {"name"} <= vars(CachedEncoder).keys()
  for make in (HashingEncoder, *TOKEN_ENCODERS.values()):
    for wrap in (lambda encoder: CorpusEncoder(encoder, TEXTS), lambda encoder: BlockEncoder(encoder, "x", tmp_path)):
      wrapped, encoder = wrap(make()), make()
      for each in (wrapped, encoder):
        each.fit(TEXTS)
      for name in ("name", "width", "fingerprint"):
        assert getattr(wrapped, name) == getattr(encoder, name)
      for name in ("constants", "learned_params"):
        jax.tree.map(np.testing.assert_array_equal, getattr(wrapped, name), getattr(encoder, name))
      if encoder.count_tokens:
        assert wrapped.count_tokens(TEXTS) == encoder.count_tokens(TEXTS)
      for text in (*TEXTS, "unheard"):
        assert (wrapped.terms(text), wrapped.is_familiar(text)) == (encoder.terms(text), encoder.is_familiar(text))
      np.testing.assert_array_equal(wrapped(TEXTS), encoder(TEXTS))


def test_a_language_model_counts_the_tokens_of_whole_texts():
  encoder = language_model()
  assert encoder.count_tokens(["abc", "x" * 1000, ""]) == [3, 1000, 0]
  assert TokenBagEncoder().count_tokens is None


def test_a_bag_of_unheard_words_finds_nothing_by_way_of_another_encoder_either():
  documents = [Document(str(i), content=f"the zebra of marsh{i}") for i in range(20)]
  retriever = DenseRetriever(encoder=CorpusEncoder(TokenBagEncoder(), [d.text for d in documents]), backend="numpy")
  retriever.add_documents(documents)
  assert retriever.retrieve("unheard nonsense") == []
  assert retriever.retrieve("marsh7", 1)[0].id == "7"


def test_a_function_is_not_taken_for_what_it_is_not():
  encoder = FunctionEncoder(lengths)
  assert encoder != lengths
  encoder.constants = {"n": np.ones(2)}  # a folder had them; they are kept, and change nothing
  np.testing.assert_array_equal(encoder(TEXTS), lengths(TEXTS))

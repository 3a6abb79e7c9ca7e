"""Bags of word pieces: inner products are those of BM25's saturated weights, and case and spaces do not matter."""

from collections import Counter

import jax
import numpy as np
import pytest

from selfrag_jax.encoders.hybrid import HybridLMEncoder
from selfrag_jax.encoders.language_model import LMEncoder
from selfrag_jax.encoders.words import SATURATION, embed, fit_words, make_word_bag
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import init_params
from selfrag_jax.ragged import pad_rows
from selfrag_jax.text.tokenizer import WordTokenizer

WORDS = [f"w{i}" for i in range(60)]
TOKENIZER = WordTokenizer([*WORDS, "Oslo", "oslo"])
RNG = np.random.default_rng(0)
TEXTS = [" ".join(RNG.choice(WORDS[: 10 + i], RNG.integers(5, 40))) for i in range(40)]


def bag(width=4096):
  rows = [TOKENIZER.encode(text) for text in TEXTS]
  return fit_words(make_word_bag(TOKENIZER, TOKENIZER.vocab_size + 3, width), TOKENIZER, rows, len(rows))


def embedded(made, texts, width=4096):
  tokens, lengths = pad_rows([TOKENIZER.encode(text) for text in texts], 48)
  return np.asarray(jax.jit(embed, static_argnums=1)(made, width, tokens, lengths))


def expected(texts):
  """Cosines in float64, with nothing projected."""
  n, counts = len(TEXTS), [Counter(text.lower().split()) for text in [*TEXTS, *texts]]
  frequency = Counter(word for count in counts[:n] for word in count)
  weight = lambda word: np.log1p((n - frequency[word] + 0.5) / (frequency[word] + 0.5)) ** 0.5
  names = sorted({word for count in counts for word in count})
  saturated = lambda count, word: count[word] * (SATURATION + 1) / (count[word] + SATURATION)
  vectors = np.array([[weight(word) * saturated(count, word) for word in names] for count in counts[n:]])
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  return vectors @ vectors.T


def test_inner_products_are_those_of_saturated_weights():
  vectors = embedded(bag(), TEXTS)
  np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
  gap = vectors @ vectors.T - expected(TEXTS)
  assert np.abs(gap).max() < 0.1
  assert gap.std() < 0.02
  narrow = embedded(bag(64), TEXTS, 64)
  assert (narrow @ narrow.T - expected(TEXTS)).std() > 3 * gap.std()  # the noise is that of the width


def test_case_and_order_do_not_matter_and_pads_and_control_tokens_do_not_count():
  made = bag()
  one, other = embedded(made, ["Oslo w1 w2", "w2 oslo w1"])
  np.testing.assert_allclose(one, other, atol=1e-6)
  assert np.abs(one).sum() > 1
  control = np.full((1, 4), TOKENIZER.special["<|end|>"])
  assert not np.asarray(embed(made, 4096, control, [4])).any()
  assert not np.asarray(embed(made, 4096, control, [0])).any()
  short, long = (np.asarray(embed(made, 4096, *pad_rows([TOKENIZER.encode("w1 w2")], n)[:2])) for n in (2, 9))
  np.testing.assert_allclose(short, long, atol=1e-6)


@pytest.mark.parametrize("words", [0.25, 1.0])
def test_the_cosine_of_a_hybrid_is_the_mean_of_both(words):
  config = ModelConfig(TOKENIZER.vocab_size, d_model=16, n_layers=1, n_heads=2)
  params = init_params(config, jax.random.key(0))
  alone = LMEncoder(config, jax.tree.map(lambda x: x, params), TOKENIZER)
  both = HybridLMEncoder(config, params, TOKENIZER, words=words, word_width=512)
  rows = [TOKENIZER.encode(text) for text in TEXTS]
  for encoder in (alone, both):
    encoder.fit_tokens(rows)
  lm, joined = alone(TEXTS), both(TEXTS)
  assert joined.shape == (len(TEXTS), both.width) == (len(TEXTS), 32 + 512)
  made = fit_words(make_word_bag(TOKENIZER, config.padded_vocab, 512), TOKENIZER, rows, len(rows))
  bags = embedded(made, TEXTS, 512)
  np.testing.assert_allclose(joined @ joined.T, (1 - words) * lm @ lm.T + words * bags @ bags.T, atol=1e-5)
  np.testing.assert_allclose(np.linalg.norm(joined, axis=1), 1, rtol=1e-5)
  before = both.params["words"].weights
  both.fit_scale_to_tokens(rows[:20])
  assert (both.params["words"].weights != before).any()
  assert set(both.constants) == set(alone.constants)

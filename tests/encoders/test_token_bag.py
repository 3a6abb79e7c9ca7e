"""The token bag against a loop in numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from selfrag_jax.encoders.token_bag import document_frequency, embed, init_token_bag

jit_embed, KEY = jax.jit(embed), jax.random.key(0)


def test_embedding_equals_a_loop():
  rng = np.random.default_rng(0)
  V, D, B, T = 50, 16, 8, 12
  documents = [rng.integers(0, V, rng.integers(1, 20)) for _ in range(30)]
  df = [sum(token in document for document in documents) for token in range(V)]
  np.testing.assert_array_equal(document_frequency(documents, V), df)
  bag = init_token_bag(KEY, V, D, document_frequency=np.array(df), n_documents=30, special_ids=[0, 3])
  projection = np.asarray(bag.projection, np.float64)

  token_ids, mask = rng.integers(0, V, (B, T)), rng.random((B, T)) < 0.7
  token_ids[0, :4], mask[0, :4] = [3, 5, 5, 0], True  # special tokens and a repeated one
  expected = np.zeros((B, D))
  for b in range(B):
    for token in token_ids[b][mask[b]]:
      if token not in (0, 3):
        expected[b] += np.log(1 + (30 - df[token] + 0.5) / (df[token] + 0.5)) * projection[token]
    expected[b] /= np.linalg.norm(expected[b])
  np.testing.assert_allclose(jit_embed(bag, token_ids, mask), expected, atol=1e-6)


def test_bags_without_a_token_that_counts_are_zero():
  bag = init_token_bag(KEY, 10, 4, special_ids=[2])
  token_ids = np.array([[1, -1, 99], [2, 2, 2]])
  result = np.asarray(jit_embed(bag, token_ids, np.array([[False] * 3, [True] * 3])))
  np.testing.assert_array_equal(result, 0)


def test_order_and_padding_do_not_matter_and_counts_do():
  bag = init_token_bag(KEY, 20, 8)
  bags = np.array([[4, 9, 9, -1], [9, 4, 9, 7], [4, 9, 7, 7]])
  first, second, third = np.asarray(jit_embed(bag, bags, np.array([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 0, 0]], bool)))
  np.testing.assert_allclose(first, second, atol=1e-6)
  assert np.abs(first - third).max() > 0.05


def test_inner_products_are_those_of_the_bags():
  rng = np.random.default_rng(1)
  bag = init_token_bag(KEY, 100, 2048)
  token_ids = rng.integers(0, 100, (6, 30))
  counts = np.stack([np.bincount(row, minlength=100) for row in token_ids]).astype(float)
  counts /= np.linalg.norm(counts, axis=1, keepdims=True)
  embedded = np.asarray(jit_embed(bag, token_ids, np.ones((6, 30), bool)))
  np.testing.assert_allclose(embedded @ embedded.T, counts @ counts.T, atol=0.1)


def test_the_key_is_the_projection():
  first, same, other = (init_token_bag(jax.random.key(seed), 64, 32) for seed in (1, 1, 2))
  np.testing.assert_array_equal(first.projection, same.projection)
  assert (first.projection != other.projection).mean() > 0.99
  assert first.projection.dtype == jnp.float32
  np.testing.assert_allclose(np.square(first.projection).mean(), 1 / 32, rtol=0.1)


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"n_documents": 3}, "belong together"),
    ({"document_frequency": np.ones(8)}, "belong together"),
    ({"document_frequency": np.ones(7), "n_documents": 3}, r"shape \(7,\)"),
    ({"document_frequency": np.full(8, 4), "n_documents": 3}, "maximum 4"),
    ({"special_ids": [2, 8, -1]}, r"special_ids \[8, -1\] are outside the vocabulary of 8"),
  ],
)
def test_errors_name_the_fix(kwargs, message):
  with pytest.raises(ValueError, match=message):
    init_token_bag(KEY, 8, 4, **kwargs)


def test_shapes_must_agree():
  with pytest.raises(ValueError, match=r"\(2, 3\) and mask \(2, 4\) must both be \[B, T\]"):
    embed(init_token_bag(KEY, 8, 4), np.ones((2, 3), int), np.ones((2, 4), bool))

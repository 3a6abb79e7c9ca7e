"""Sampling: the tokens that each option can and cannot draw, and one log-probability for all options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2_contingency, chisquare

from selfrag_jax.generate.sampling import SamplingConfig, sample, sample_rows
from selfrag_jax.model.likelihood import token_log_probs

PROBS = np.array([0.4, 0.25, 0.2, 0.1, 0.05])
LOGITS = jnp.log(jnp.asarray(PROBS, jnp.float32))[None].repeat(4000, axis=0) + 3.0


def frequencies(config):
  return np.bincount(sample(jax.random.key(0), LOGITS, config), minlength=5)


@pytest.mark.parametrize(
  ("config", "expected"),
  [
    (SamplingConfig(), PROBS),
    (SamplingConfig(top_k=2), [0.4, 0.25, 0, 0, 0]),
    (SamplingConfig(top_k=99), PROBS),
    (SamplingConfig(top_p=0.64), [0.4, 0.25, 0, 0, 0]),
    (SamplingConfig(top_p=0.66), [0.4, 0.25, 0.2, 0, 0]),
    (SamplingConfig(top_p=1e-6), [1, 0, 0, 0, 0]),
    (SamplingConfig(temperature=0.5), PROBS**2),
    (SamplingConfig(temperature=0.0, top_k=3), [1, 0, 0, 0, 0]),
    # top-p counts what top-k left: 0.65 of 0.85 is enough
    (SamplingConfig(top_k=3, top_p=0.75), [0.4, 0.25, 0, 0, 0]),
  ],
)
def test_tokens_are_drawn_from_what_is_kept(config, expected):
  expected = np.asarray(expected) / np.sum(expected)
  drawn = frequencies(config)
  assert (drawn[expected == 0] == 0).all()
  if (expected > 0).sum() > 1:
    assert chisquare(drawn[expected > 0], expected[expected > 0] * drawn.sum()).pvalue > 1e-3


def test_log_probs_are_those_of_the_softmax():
  np.testing.assert_allclose(token_log_probs(LOGITS[:5], jnp.arange(5)), np.log(PROBS), rtol=1e-5)
  squared = PROBS**2 / (PROBS**2).sum()
  np.testing.assert_allclose(token_log_probs(LOGITS[:5], jnp.arange(5), temperature=0.5), np.log(squared), rtol=1e-5)


WRONG = [
  *({"temperature": value} for value in (-1, float("nan"), float("inf"), 1e-40, 1e-7, "1", None)),
  *({"top_k": value} for value in (-1, 2.5, "3", None)),
  *({"top_p": value} for value in (0.0, 1.1, -1, float("nan"), 1e-46, "1", None)),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_impossible_options_are_refused(wrong):
  with pytest.raises(ValueError, match="need temperature 0 or"):
    SamplingConfig(**wrong)


@pytest.mark.parametrize("least", [{"temperature": 1e-6}, {"top_p": 1e-6}])
@pytest.mark.parametrize("size", [1.0, 1e30])
def test_the_least_options_give_the_likeliest_token_and_its_finite_probability(least, size):
  logits, config = jnp.asarray([[-2.0, 1.0, 0.5]]) * size, SamplingConfig(**least)
  assert [int(sample(jax.random.key(seed), logits, config)[0]) for seed in range(5)] == [1] * 5
  np.testing.assert_allclose(token_log_probs(logits, jnp.asarray([1]), 1e-6), 0, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_the_written_gradient_of_a_log_probability_is_the_derived_one(temperature):
  rng = np.random.default_rng(0)
  with jax.enable_x64():
    logits = jnp.asarray(rng.normal(size=(3, 4, 50)) * 5).at[..., 40:].set(jnp.finfo("float64").min)
    tokens, weights = jnp.asarray(rng.integers(40, size=(3, 4))), jnp.asarray(rng.normal(size=(3, 4)))

    def derived(logits):
      return jnp.take_along_axis(jax.nn.log_softmax(logits / (temperature or 1)), tokens[..., None], axis=-1)[..., 0]

    value = lambda log_probs: lambda logits: jnp.sum(weights * log_probs(logits))
    written = value(lambda logits: token_log_probs(logits, tokens, temperature))
    np.testing.assert_allclose(written(logits), value(derived)(logits), rtol=1e-12)
    np.testing.assert_allclose(jax.grad(written)(logits), jax.grad(value(derived))(logits), atol=1e-14)


@pytest.mark.parametrize(
  "config",
  [
    SamplingConfig(),
    SamplingConfig(top_k=2),
    SamplingConfig(top_k=99),
    SamplingConfig(top_p=0.64),
    SamplingConfig(top_k=3, top_p=0.75),
    SamplingConfig(temperature=0.3, top_p=0.9),
    SamplingConfig(temperature=0.0, top_k=3),
  ],
)
def test_rows_with_settings_of_their_own_draw_as_batches_with_one_setting_do(config):
  keys = jax.random.split(jax.random.key(0), 8000)
  # every second row has other settings, which must not matter
  settings = [(config.temperature, 0.7), (config.top_k, 4), (config.top_p, 0.5)]
  of_rows = [jnp.asarray(np.resize(pair, 8000)) for pair in settings]
  rows = sample_rows(keys, LOGITS[:1].repeat(8000, axis=0), *of_rows)
  drawn, expected = np.bincount(rows[::2], minlength=5), frequencies(config)
  assert ((drawn > 0) == (expected > 0)).all()
  if (both := np.stack([drawn, expected])[:, expected > 0]).shape[1] > 1:
    assert chi2_contingency(both).pvalue > 1e-3


def test_a_row_draws_the_same_whatever_is_beside_it():
  key = jax.random.split(jax.random.key(3), 2)
  alone = sample_rows(key[:1], LOGITS[:1], jnp.ones(1), jnp.zeros(1, jnp.int32), jnp.ones(1))
  beside = sample_rows(key, LOGITS[:2], jnp.asarray([1.0, 0.5]), jnp.asarray([0, 2]), jnp.asarray([1, 0.5]))
  assert alone[0] == beside[0]

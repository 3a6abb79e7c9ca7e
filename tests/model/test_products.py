"""Products with rounded inputs: equal numpy's products of the rounded numbers, forward and backward."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from selfrag_jax.generate.step import begin, next_logits, read
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.layers import turn
from selfrag_jax.model.likelihood import sequence_log_probs
from selfrag_jax.model.lm import init_params, unstack
from selfrag_jax.model.products import product


def rounded(x):
  return np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32), np.float64)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(16, 5, 24), (24, 40, 3), (7, 6, 6), (1, 8, 2)])
def test_value_and_gradients_are_products_of_rounded_numbers(rows, inputs, outputs, transposed):
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  x, w, g = draw(rows, inputs), draw(*((outputs, inputs) if transposed else (inputs, outputs))), draw(rows, outputs)
  value, gradients = jax.vjp(lambda x, w: product(x, w, "bfloat16", transposed=transposed), x, w)
  dx, dw = gradients(jnp.asarray(g))
  matrix = rounded(w).T if transposed else rounded(w)
  dmatrix = rounded(x).T @ rounded(g)
  assert (value.dtype, dx.dtype, dw.dtype) == (jnp.float32,) * 3
  close = lambda ours, exact: np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5)
  close(value, rounded(x) @ matrix)
  close(dx, rounded(g) @ matrix.T)
  close(dw, dmatrix.T if transposed else dmatrix)
  assert np.abs(np.asarray(value) - x @ (w.T if transposed else w)).max() > 1e-3  # they were rounded


@pytest.mark.parametrize("transposed", [False, True])
def test_inputs_are_their_own_dtype_unless_told_otherwise(transposed):
  x, w = np.ones((2, 3), np.float32) / 3, np.ones((4, 3) if transposed else (3, 4), np.float32) / 7
  for dtype in (None, "float32"):
    np.testing.assert_allclose(product(x, w, dtype, transposed=transposed), x @ (w.T if transposed else w), rtol=3e-7)


@pytest.mark.parametrize("pattern", ["TT", "MM"])
def test_a_model_with_rounded_products_has_about_the_same_loss_and_gradient(pattern):
  config = ModelConfig(vocab_size=200, d_model=64, n_layers=2, n_heads=2, block_pattern=pattern, ssm_chunk=16)
  params = nn.unbox(init_params(config, jax.random.key(0)))
  tokens = jax.random.randint(jax.random.key(1), (3, 32), 0, 200)

  def loss_and_gradient(matmul_dtype):
    model = dataclasses.replace(config, matmul_dtype=matmul_dtype)
    loss = lambda params: -sequence_log_probs(model, params, tokens, jnp.ones_like(tokens)).mean()
    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    return float(value), np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradient)])

  exact, gradient = loss_and_gradient(None)
  near, rounded_gradient = loss_and_gradient("bfloat16")
  assert near == pytest.approx(exact, abs=2e-3)
  assert near != exact
  cosine = gradient @ rounded_gradient / np.linalg.norm(gradient) / np.linalg.norm(rounded_gradient)
  assert cosine > 0.999


@pytest.mark.parametrize("pattern", ["T", "M"])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("matmul_dtype", [None, "bfloat16"])
def test_turned_weights_extend_caches_as_the_plain_ones_do(pattern, rows, matmul_dtype):
  config = ModelConfig(
    40, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, block_pattern=pattern, ssm_state=8, ssm_head_dim=16,
    mlp_dim=24, matmul_dtype=matmul_dtype,
  )  # fmt: skip
  plain = unstack(config, nn.unbox(init_params(config, jax.random.key(0))))
  turned = turn(plain)
  shape = lambda params, name: jax.tree.leaves(params["params"]["layers_0"]["mixer"][name])[0].shape
  name = "q" if pattern == "T" else "in_proj"
  assert shape(turned, name) == (*shape(plain, name)[1:], 16)
  tokens, lengths = np.arange(rows * 3).reshape(rows, 3) % 40, np.arange(rows) % 4
  states = [
    jax.jit(read, static_argnums=0)(config, params, begin(config, rows, 8), tokens, lengths)
    for params in (plain, turned)
  ]
  logits = [next_logits(config, *pair) for pair in zip((plain, turned), states, strict=True)]
  for ours, theirs in zip(*map(jax.tree.leaves, ((states[1], logits[1]), (states[0], logits[0]))), strict=True):
    np.testing.assert_allclose(ours, theirs, atol=2e-5 if matmul_dtype is None else 2e-3)

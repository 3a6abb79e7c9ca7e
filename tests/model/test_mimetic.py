"""Mimetic weights: products that are near the identity, in the layers that are named, and nowhere else."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import init_params

WIDTH = 64


def layers(**changes):
  """Return the config and the mixers' weights of a fresh L, T and M layer."""
  fields = {"n_heads": 4, "block_pattern": "LTM", "window": 4, "init_scale": 0.1, "mimetic_init": True} | changes
  config = ModelConfig(61, d_model=WIDTH, n_layers=3, **fields)
  params = nn.unbox(init_params(config, jax.random.key(0)))["params"]["segments_0"]
  mixers = [params[f"layer_{i}"]["mixer"] for i in range(3)]
  return config, [{k: np.asarray(v[0]) for k, v in mixer.items() if k != "norm"} for mixer in mixers]


def product(config, first, second):
  """Return the sum over heads of first [D, K, E] times second [H, E, D]."""
  shared = config.n_heads // config.kv_heads
  return sum(first[:, head // shared] @ second[head] for head in range(config.n_heads))


def share_of_identity(matrix):
  """Return the multiple of the identity that is nearest to a matrix, and the size of the rest beside it."""
  share = np.trace(matrix) / len(matrix)
  return share, np.linalg.norm(matrix - share * np.eye(len(matrix))) / np.linalg.norm(share * np.eye(len(matrix)))


@pytest.mark.parametrize("heads", [{}, {"head_dim": 64}, {"n_kv_heads": 2, "head_dim": 32}])
def test_a_layer_of_a_window_passes_on_half_of_what_it_sees(heads):
  config, (window, full, _) = layers(**heads)
  share, rest = share_of_identity(product(config, window["v"], window["o"]))
  assert share == pytest.approx(0.5, abs=0.05)
  assert rest < 1.5
  assert abs(share_of_identity(product(config, full["v"], full["o"]))[0]) < 0.05


@pytest.mark.parametrize("heads", [{}, {"head_dim": 64}, {"n_kv_heads": 2}])
def test_a_layer_that_sees_everything_looks_for_what_is_like_it(heads):
  config, (window, full, _) = layers(**heads)
  shared = config.n_heads // config.kv_heads
  alike = lambda layer: np.corrcoef(np.repeat(layer["k"], shared, axis=1).ravel(), layer["q"].ravel())[0, 1]
  assert alike(full) == pytest.approx(0.9, abs=0.02)
  assert full["k"].std() == pytest.approx(config.init_scale, rel=0.05)
  assert abs(alike(window)) < 0.1


def test_other_weights_are_those_of_a_model_that_is_not_mimetic():
  _, (window, full, state) = layers()
  _, (window_drawn, full_drawn, state_drawn) = layers(mimetic_init=False)
  same = [(window, window_drawn, "qk"), (full, full_drawn, "vo"), (state, state_drawn, tuple(state))]
  for ours, drawn, names in same:
    for name in names:
      np.testing.assert_array_equal(ours[name], drawn[name], err_msg=name)


@pytest.mark.parametrize(("mimetic", "least", "most"), [(True, 1.0, 1.0), (False, 0.0, 0.2)])
def test_what_is_like_a_token_has_the_highest_score(mimetic, least, most):
  _, (_, full, _) = layers(n_heads=1, mimetic_init=mimetic)
  tokens = np.random.default_rng(0).standard_normal((50, WIDTH))
  scores = (tokens @ full["q"][:, 0]) @ (tokens @ full["k"][:, 0]).T
  assert least <= np.mean(scores.argmax(1) == np.arange(50)) <= most


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_keep_their_dtype(dtype):
  fields = {"block_pattern": "LT", "window": 4, "mimetic_init": True, "param_dtype": dtype}
  config = ModelConfig(61, d_model=32, n_layers=2, n_heads=2, **fields)
  assert {leaf.dtype for leaf in jax.tree.leaves(init_params(config, jax.random.key(0)))} == {jnp.dtype(dtype)}

"""Optimizers: the parameters that they change, and the size of the change."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import init_params
from selfrag_jax.train.optimizer import (
  MATRIX_AXES,
  OptimizerConfig,
  decay_mask,
  make_optimizer,
  make_schedule,
  muon_dimensions,
)


def names(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


@pytest.fixture(scope="module")
def params():
  config = ModelConfig(
    20, d_model=16, n_layers=4, n_heads=4, n_kv_heads=2, block_pattern="TTMM", qk_norm=True, tie_embeddings=False,
    ssm_state=8, ssm_head_dim=8,
  )  # fmt: skip
  return nn.unbox(init_params(config, jax.random.key(0)))


def step(config, params, gradients):
  """Return by how much one step moves each leaf, by name."""
  optimizer = make_optimizer(config, total_steps=10)
  return names(jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])(gradients, params))


def test_decay_concerns_matrices_only(params):
  mask, leaves = names(decay_mask(params)), names(params)
  for name, decays in mask.items():
    stacked = name.startswith("params/segments")
    # a matrix has two axes beside the one that stacks layers; the convolution's kernel is a filter for each channel
    is_matrix = leaves[name].ndim - stacked >= 2 and "conv" not in name
    assert decays == is_matrix, name
  assert any(mask.values())
  assert not all(mask.values())


def test_adamw_decays_matrices_and_nothing_else(params):
  zero = jax.tree.map(jnp.zeros_like, params)
  moved = step(OptimizerConfig(learning_rate=0.1, weight_decay=0.5), params, zero)
  for name, decays in names(decay_mask(params)).items():
    np.testing.assert_allclose(moved[name], -0.05 * names(params)[name] if decays else 0, rtol=1e-5, err_msg=name)


def test_muon_decays_hidden_matrices_and_nothing_else(params):
  zero = jax.tree.map(jnp.zeros_like, params)
  moved = step(OptimizerConfig(name="muon", learning_rate=0.1, weight_decay=0.5), params, zero)
  for name, leaf in names(params).items():
    decays = name.split("/")[-1] in MATRIX_AXES
    np.testing.assert_allclose(moved[name], -0.05 * leaf if decays else 0, rtol=1e-5, err_msg=name)


def test_muon_takes_the_hidden_matrices(params):
  is_leaf = lambda x: x is None or hasattr(x, "reduction_axis")
  taken = jax.tree_util.tree_leaves_with_path(muon_dimensions(params), is_leaf=is_leaf)
  taken = {jax.tree_util.keystr(path, simple=True, separator="/"): axes for path, axes in taken}
  decayed = names(decay_mask(params))
  for name, axes in taken.items():
    assert (axes is not None) == (decayed[name] and "embed" not in name), name


def test_muon_orthogonalises_each_layer_on_its_own(params):
  rng = np.random.default_rng(0)
  # layers whose gradients differ a thousandfold: orthogonalised together, one of them would vanish
  sizes = lambda x: np.array([1000] + [1] * (len(x) - 1)).reshape(-1, *[1] * (x.ndim - 1))
  gradients = jax.tree.map(lambda x: (sizes(x) * rng.normal(size=x.shape)).astype(np.float32), params)
  moved = step(OptimizerConfig(name="muon", learning_rate=1.0, clip_norm=0), params, gradients)
  # how each leaf of a layer is a matrix: (its axes in, its axes out)
  axes_in = {name: 2 if name == "o" else 1 for name in MATRIX_AXES}
  seen = set()
  for name, update in moved.items():
    kind = name.split("/")[-1]
    if kind not in MATRIX_AXES:
      continue
    for layer in np.asarray(update):
      fan_in = int(np.prod(layer.shape[: axes_in[kind]]))
      matrix = layer.reshape(fan_in, -1)
      scale = 0.2 * max(matrix.shape) ** 0.5  # arXiv 2502.16982: the root mean square of AdamW
      values = np.linalg.svd(matrix, compute_uv=False) / scale
      # five Newton-Schulz steps bring them near 1, not to it
      assert values.min() > 0.3, name
      assert values.max() < 1.4, name
      seen.add(kind)
  assert seen == set(MATRIX_AXES)


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear"])
def test_schedules_at_their_corners(kind):
  config = OptimizerConfig(learning_rate=1.0, schedule=kind, warmup_steps=4, final_fraction=0.1)
  rate = make_schedule(config, total_steps=24)
  np.testing.assert_allclose([rate(step) for step in range(5)], [0.25, 0.5, 0.75, 1, 1], rtol=1e-6)
  end, middle = {"constant": (1, 1), "cosine": (0.1, 0.55), "linear": (0.1, 0.55)}[kind]
  np.testing.assert_allclose([rate(14), rate(24), rate(99)], [middle, end, end], rtol=1e-6)
  assert end <= rate(23) <= 1.1 * end + 0.05
  assert all(rate(step) >= rate(step + 1) for step in range(4, 24))


def test_one_step_of_warmup_and_none_begin_at_the_peak():
  for warmup in (0, 1):
    rate = make_schedule(OptimizerConfig(learning_rate=0.5, warmup_steps=warmup), total_steps=3)
    np.testing.assert_allclose([rate(0), rate(1), rate(2)], 0.5)


def test_the_norm_is_clipped_and_0_does_not_clip():
  params, gradients = {"scale": jnp.zeros(2)}, {"scale": jnp.array([3.0, 4.0])}
  # the first moment of AdamW holds the gradient as it came out of the clipping, times 1 - b1
  moments = lambda clip: (
    (optimizer := make_optimizer(OptimizerConfig(b1=0.5, clip_norm=clip), 10))
    .update(gradients, optimizer.init(params), params)[1][1][0]
    .mu["scale"]
  )
  np.testing.assert_allclose(moments(1.0), [0.3, 0.4], rtol=1e-6)
  np.testing.assert_allclose(moments(0), [1.5, 2.0], rtol=1e-6)


@pytest.mark.parametrize("field", ["name", "schedule"])
def test_an_unknown_choice_is_named(field):
  with pytest.raises(ValueError, match=f"{field} is 'lion'; one of"):
    OptimizerConfig(**{field: "lion"})

"""Attention in a window: blocks of a row give what the mask gives, without scores of every token for every other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from selfrag_jax.model.attention import attend, attend_in_window, causal_mask
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, init_params


def masked(q, k, v, segments, window, *how):
  index = jnp.arange(q.shape[2])
  same = segments[:, :, None] == segments[:, None]
  return attend(q, k, v, causal_mask(index, index, window)[None] & same, *how)


def with_gradients(attend, q, k, v, *rest):
  def loss(q, k, v):
    attended = attend(q, k, v, *rest)
    return (attended * jnp.cos(jnp.arange(attended.size)).reshape(attended.shape)).sum(), attended

  gradients, attended = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
  return (attended, *gradients)


@pytest.mark.parametrize(("time", "window"), [(7, 1), (7, 3), (64, 16), (65, 16), (95, 31), (20, 30)])
@pytest.mark.parametrize(("heads", "kv_heads", "how"), [(2, 2, ()), (4, 2, (1.5, 0.7)), (4, 1, (None, None))])
def test_blocks_of_a_row_give_what_the_mask_gives(time, window, heads, kv_heads, how):
  rng = np.random.default_rng(time)
  with jax.enable_x64():
    qkv = [jnp.asarray(rng.standard_normal((3, n, time, 8))) for n in (heads, kv_heads, kv_heads)]
    segments = jnp.asarray(np.sort(rng.integers(1, 4, (3, time)), axis=1)).at[2, time // 2 :].set(0)
    found, expected = (with_gradients(f, *qkv, segments, window, *how) for f in (attend_in_window, masked))
    for one, other in zip(found, expected, strict=True):
      np.testing.assert_allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("time", [39, 40])
def test_a_layer_of_a_window_has_no_score_of_every_token_for_every_other(time):
  config = ModelConfig(61, d_model=24, n_layers=1, n_heads=2, mlp_dim=52, block_pattern="L", window=16, dtype="float32")
  traced = jax.make_jaxpr(LM(config).apply)(init_params(config, jax.random.key(0)), jnp.zeros((1, time), jnp.int32))
  assert (f"{time},{time}]" in str(traced)) == (time < 40)

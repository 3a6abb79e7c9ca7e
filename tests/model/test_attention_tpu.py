"""The attention of a TPU, interpreted, against that of every device; and that programs for a TPU use it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_programs import text_of_gradient

from selfrag_jax.model import attention_tpu
from selfrag_jax.model.attention import attend, causal_mask
from selfrag_jax.model.config import ModelConfig

ROWS, TIME, WIDTH = 2, 384, 32


def arrays(heads, kv_heads):
  rng = np.random.default_rng(0)
  of = lambda n: jnp.asarray(rng.standard_normal((ROWS, n, TIME, WIDTH)), jnp.float32)
  ends = np.array([[100, 260, 350], [1, 2, 384]])
  segments = 1 + (np.arange(TIME)[None, :, None] >= ends[:, None]).sum(-1)
  segments[0, 350:] = 0  # padding
  return of(heads), of(kv_heads), of(kv_heads), jnp.asarray(segments, jnp.int32)


def slowly(q, k, v, segments, _, window, *how):
  index = jnp.arange(TIME)
  mask = (segments[:, :, None] == segments[:, None]) & causal_mask(index, index, window)[None]
  return attend(q, k, v, mask, *how)


@pytest.mark.parametrize(
  ("heads", "kv_heads", "options"),
  [
    *[(2, 2, (None, None, None)), (4, 2, (None, None, None)), (4, 1, (50, None, None)), (2, 2, (1, None, None))],
    *[(2, 1, (None, 5.0, None)), (2, 1, (None, None, 0.5))],
  ],
)
def test_the_kernel_attends_as_every_device_does_and_so_does_its_gradient(heads, kv_heads, options):
  *qkv, segments = arrays(heads, kv_heads)
  weights = jnp.cos(jnp.arange(WIDTH))

  def loss(attend, *qkv):
    attended = attend(*qkv, segments, segments, *options)
    return (attended * weights[None, None, None]).sum(), attended

  run = lambda attend: jax.jit(jax.value_and_grad(partial(loss, attend), argnums=(0, 1, 2), has_aux=True))(*qkv)
  found, expected = run(partial(attention_tpu.attend, interpret=True)), run(slowly)
  np.testing.assert_allclose(found[0][1], expected[0][1], atol=2e-5)
  for one, other in zip(found[1], expected[1], strict=True):
    np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize(("time", "size"), [(4096, 512), (384, 128), (1536, 512), (264, 8), (1, 1)])
def test_blocks_divide_a_row(time, size):
  assert attention_tpu.block_size(time) == size


@pytest.mark.parametrize(
  ("time", "kernels", "has_kernel"), [(256, "auto", True), (264, "auto", False), (256, "xla", False)]
)
@pytest.mark.parametrize("sizes", [(4, 1, 1), (1, 2, 2)])
def test_a_program_for_a_tpu_has_the_kernel_where_rows_are_whole_blocks(sizes, time, kernels, has_kernel):
  model = ModelConfig(
    vocab_size=128, d_model=128, n_layers=1, n_heads=2, mlp_dim=128, dtype="bfloat16", kernels=kernels
  )
  text = text_of_gradient(model, sizes, time)
  assert ("splash" in text) == has_kernel
  assert (f"{time},{time}]" in text) == (not has_kernel)

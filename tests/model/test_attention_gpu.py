"""The attention of a GPU, computed by XLA, against that of every device; and that programs for a GPU use the kernel."""

from functools import partial
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from selfrag_jax.mesh import absent
from selfrag_jax.model import attention_gpu
from selfrag_jax.model.attention import attend, causal_mask
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, init_params, packed_states
from selfrag_jax.ragged import length_mask

TIME, WIDTH = 160, 32
LENGTHS = np.array([160, 1, 97, 0], np.int32)
SIZES = {"vocab_size": 64, "d_model": 128, "n_heads": 2, "mlp_dim": 128, "block_pattern": "TM", "n_layers": 2}


def arrays(heads, kv_heads, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.standard_normal((len(LENGTHS), n, TIME, WIDTH)), dtype) for n in (heads, kv_heads, kv_heads)]


def slowly(q, k, v, lengths, window, scale):
  index = jnp.arange(TIME)
  return attend(q, k, v, jnp.broadcast_to(causal_mask(index, index, window), (len(q), TIME, TIME)), None, scale)


def gradients(attend, qkv, *options):
  weights = jnp.cos(jnp.arange(WIDTH))[None, None, None] * length_mask(LENGTHS, TIME, jnp)[:, None, :, None]

  def loss(*qkv):
    attended = attend(*qkv, jnp.asarray(LENGTHS), *options).astype(jnp.float32)
    return (attended * weights).sum(), attended

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*qkv)


CASES = [(2, 2, None, None), (4, 2, None, None), (4, 1, 50, None), (2, 2, 1, None), (2, 1, None, 0.5)]


@pytest.mark.parametrize(("heads", "kv_heads", "window", "scale"), CASES)
def test_the_arguments_of_the_kernel_say_what_every_device_computes(heads, kv_heads, window, scale):
  qkv = arrays(heads, kv_heads)
  found = gradients(partial(attention_gpu.attend, implementation="xla"), qkv, window, scale)
  expected, real = gradients(slowly, qkv, window, scale), length_mask(LENGTHS, TIME, np)[:, None, :, None]
  np.testing.assert_allclose(found[0][1], np.where(real, expected[0][1], 0), atol=2e-6)
  for one, other in zip(found[1], expected[1], strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="the kernel runs on a GPU alone")
@pytest.mark.parametrize(("heads", "kv_heads", "window", "scale"), CASES)
def test_the_kernel_attends_as_every_device_does_on_a_gpu(heads, kv_heads, window, scale):
  qkv = arrays(heads, kv_heads, jnp.bfloat16)
  found, expected = (gradients(how, qkv, window, scale) for how in (attention_gpu.attend, slowly))
  real = length_mask(LENGTHS, TIME, np)[:, None, :, None]
  np.testing.assert_allclose(found[0][1], np.where(real, expected[0][1], 0), atol=0.05)
  for one, other in zip(found[1], expected[1], strict=True):
    np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), atol=0.2)


def test_what_stands_at_pads_changes_nothing():
  qkv = arrays(2, 1)
  at_pads = [jnp.where(length_mask(LENGTHS, TIME, jnp)[:, None, :, None], x, jnp.nan) for x in qkv]
  of = partial(attention_gpu.attend, implementation="xla")
  for one, other in zip(*(jax.tree.leaves(gradients(of, x, None, None)) for x in (qkv, at_pads)), strict=True):
    np.testing.assert_array_equal(one, other)


def uses_the_kernel(monkeypatch, run, capability="9.0", **changes) -> bool:
  """Tell whether the gradient of a model, traced for a GPU, has the kernel, forward and backward."""
  monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)  # of a library that is not here
  model = ModelConfig(**{**SIZES, "dtype": "bfloat16", **changes})
  with absent([SimpleNamespace(platform="gpu", compute_capability=capability)]):
    params = jax.eval_shape(lambda: nn.unbox(init_params(model, jax.random.key(0))))
    text = str(jax.make_jaxpr(jax.grad(lambda params: run(model, params).astype(jnp.float32).sum()))(params))
  assert ("dot_product_attention_fwd" in text) == ("dot_product_attention_bwd" in text)
  return "dot_product_attention_fwd" in text


def of_rows(model, params, time=256):
  return packed_states(model, params, jnp.zeros((2, time), jnp.int32), lengths_B=jnp.array([200, 256]))


def packed(model, params):
  return packed_states(model, params, jnp.zeros((2, 256), jnp.int32), jnp.ones((2, 256), jnp.int32))


def test_a_program_for_a_gpu_has_the_kernel_where_rows_are_one_document(monkeypatch):
  uses = partial(uses_the_kernel, monkeypatch)
  assert uses(of_rows)
  assert uses(of_rows, remat="full")
  assert uses(of_rows, block_pattern="LT", window=16)
  assert uses(lambda model, params: LM(model).apply(params, jnp.zeros((2, 256), jnp.int32)))
  assert not uses(packed)
  assert not uses(partial(of_rows, time=64))
  assert not uses(of_rows, kernels="xla")
  assert not uses(of_rows, dtype="float32")
  assert not uses(of_rows, attention_softcap=30.0)
  assert not uses(of_rows, capability="7.5")
  assert not uses(of_rows, capability="gfx942")
  assert not uses(of_rows, d_model=512)  # heads of 256 numbers

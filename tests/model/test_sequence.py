"""Rows whose tokens lie on several devices: the states, and their gradients, that one device computes."""

import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_programs import text_of_gradient

from selfrag_jax.aot.collectives import collectives
from selfrag_jax.mesh import batch_sharding, make_mesh, shardings_of
from selfrag_jax.model import attention_tpu, sequence
from selfrag_jax.model.attention import attend, causal_mask
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, init_params, packed_states

ROWS, TIME = 4, 77  # no multiple of the parts
# documents that end within a part, at its end (16 of 96 padded tokens in 6), and that fill several; then padding
ENDS = np.array([[16, 40, 70], [3, 5, 7], [64, 65, 77], [77, 77, 77]])
SEGMENTS = 1 + (np.arange(TIME)[None, :, None] >= ENDS[:, None]).sum(-1).astype(np.int32)
SEGMENTS[0, 70:] = 0
SEGMENTS[2, 65:] = 1  # an id that comes again is another document to the SSM, and the same one to attention


def model(pattern, dtype="float64", **changes):
  sizes = {"d_model": 32, "n_layers": len(pattern), "n_heads": 4, "n_kv_heads": 2, "block_pattern": pattern}
  ssm = {"ssm_state": 8, "ssm_head_dim": 16, "ssm_chunk": 16, "ssm_groups": 2}
  return ModelConfig(
    vocab_size=500, **sizes, **ssm, **{"init_scale": 0.3, "dtype": dtype, "param_dtype": dtype} | changes
  )


def value_and_gradient(config, params, tokens, segments):
  def loss(params):
    states = packed_states(config, params, tokens, segments)
    return jnp.sum(states * jnp.cos(jnp.arange(states.size).reshape(states.shape))), states

  return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def on_mesh(config, mesh, tokens, segments):
  boxed = init_params(config, jax.random.key(0))
  params = jax.device_put(nn.unbox(boxed), shardings_of(boxed, mesh))
  with jax.set_mesh(mesh):
    return value_and_gradient(config, params, *jax.device_put((tokens, segments), batch_sharding(mesh)))


def drawn(time=TIME):
  return np.random.default_rng(0).integers(0, 500, (ROWS, time), dtype=np.int32)


@pytest.mark.parametrize(
  ("pattern", "options"),
  [
    ("T", {}),
    ("L", {"window": 20, "qk_norm": True}),
    ("M", {}),
    ("TMM", {"remat": "full"}),
    ("MT", {"mamba_mlp": True}),
  ],
)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 8), (1, 2, 1, 4), (2, 1, 2, 2), (1, 2, 2, 2)])
def test_parts_of_rows_have_the_states_and_the_gradient_of_one_device(pattern, options, sizes):
  with jax.enable_x64(True):
    config, tokens = model(pattern, **options), drawn()
    params = nn.unbox(init_params(config, jax.random.key(0)))
    (_, expected), expected_gradient = value_and_gradient(config, params, tokens, SEGMENTS)
    (_, states), gradient = on_mesh(config, make_mesh(*sizes[:3], sequence=sizes[3]), tokens, SEGMENTS)
    same = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    same(states, expected)
    jax.tree.map(same, jax.device_get(gradient), jax.device_get(expected_gradient))


@pytest.mark.parametrize(
  ("dtype", "params_in", "bar"),
  [("float32", "float32", 1e-4), ("bfloat16", "float32", 0.1), ("bfloat16", "bfloat16", 0.1)],
)
def test_parts_of_rows_in_narrow_dtypes(dtype, params_in, bar):
  config, tokens = model("TM", dtype, param_dtype=params_in, init_scale=0.1), drawn()
  params = nn.unbox(init_params(config, jax.random.key(0)))
  (_, expected), expected_gradient = value_and_gradient(config, params, tokens, SEGMENTS)
  (_, states), gradient = on_mesh(config, make_mesh(2, 1, 1, sequence=4), tokens, SEGMENTS)
  np.testing.assert_allclose(np.float32(states), np.float32(expected), atol=bar)
  for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
    assert one.dtype == params_in
    one, other = np.float64(np.asarray(one, np.float32)), np.float64(np.asarray(other, np.float32))
    assert np.linalg.norm(one - other) < 3 * bar * np.linalg.norm(other)  # of four numbers, some


@pytest.mark.parametrize("taps", [1, 12])
def test_convolutions_of_any_length(taps):
  with jax.enable_x64(True):
    config, tokens = model("M", ssm_conv=taps), drawn()
    params = nn.unbox(init_params(config, jax.random.key(0)))
    expected = LM(config).apply(params, tokens, SEGMENTS)
    states = on_mesh(config, make_mesh(1, 1, 1, sequence=8), tokens, SEGMENTS)[0][1]
    np.testing.assert_allclose(states, expected, atol=1e-9)


def test_parts_are_not_split_again():
  split = partial(sequence.on_parts, lambda _, x: sequence.on_parts(lambda _, x: x, {}, x), {})
  with jax.set_mesh(make_mesh(1, 1, 1, sequence=8)), pytest.raises(ValueError, match="manual already"):
    jax.jit(split)(jnp.zeros((1, 8)))


def test_rows_shorter_than_the_parts():
  with jax.enable_x64(True):
    config, tokens = model("TM"), drawn(3)
    found = on_mesh(config, make_mesh(1, 1, 1, sequence=8), tokens, SEGMENTS[:, :3])[0][1]
    params = nn.unbox(init_params(config, jax.random.key(0)))
    expected = LM(config).apply(params, tokens, SEGMENTS[:, :3])
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_rows_that_the_devices_cannot_share():
  with jax.enable_x64(True):
    config, tokens = model("TM"), drawn()[:3]
    mesh = make_mesh(1, 2, 2, sequence=2)
    boxed = init_params(config, jax.random.key(0))
    params = jax.device_put(nn.unbox(boxed), shardings_of(boxed, mesh))
    (_, expected), _ = value_and_gradient(config, jax.device_get(params), tokens, SEGMENTS[:3])
    with jax.set_mesh(mesh):
      (_, found), _ = value_and_gradient(config, params, tokens, SEGMENTS[:3])
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_parts_send_keys_ends_of_rows_and_states_and_no_activations():
  """Of the tokens, only keys, values and segments go to other parts; of the Mamba layer, its state and three inputs."""
  config = model("TM", "float32", remat="none")
  mesh, time = make_mesh(1, 1, 1, sequence=8), 512
  boxed = init_params(config, jax.random.key(0))
  params = jax.device_put(nn.unbox(boxed), shardings_of(boxed, mesh))
  rows = jax.device_put((drawn(time), np.ones((ROWS, time), np.int32)), batch_sharding(mesh))
  with jax.set_mesh(mesh):
    text = jax.jit(partial(packed_states, config)).lower(params, *rows).compile().as_text()
  weights = {leaf.shape for leaf in jax.tree.leaves(params)}
  sent = [shape for one in collectives(text) for shape in one.shapes if shape not in weights]
  keys = ROWS * 2 * time * 8
  assert sum(np.prod(shape) == keys for shape in sent) == 2
  assert max(np.prod(shape) for shape in sent) == keys


@pytest.mark.parametrize("window", [None, 200])
def test_the_kernel_of_a_tpu_attends_from_parts(window):
  time, width = 1024, 32
  rng = np.random.default_rng(0)
  of = lambda n: jnp.asarray(rng.standard_normal((2, n, time, width)), jnp.float32)
  q, k, v = of(2), of(1), of(1)
  segments = jnp.asarray(1 + (np.arange(time) >= np.array([[300], [700]])), jnp.int32)
  by_time = lambda x: jnp.swapaxes(x, 1, 2)

  def of_part(_, q, k, v, segments):
    k, v = (sequence.every(by_time(x), 2) for x in (k, v))
    every = sequence.every(segments, 1)
    return by_time(attention_tpu.attend(by_time(q), k, v, segments, every, window, None, interpret=True))

  def of_whole(q, k, v):
    mask = (segments[:, :, None] == segments[:, None]) & causal_mask(jnp.arange(time), jnp.arange(time), window)[None]
    return by_time(attend(*map(by_time, (q, k, v)), mask))

  weights = jnp.cos(jnp.arange(width))
  run = lambda attend: jax.jit(
    jax.value_and_grad(lambda *qkv: (attend(*qkv) * weights[None, None, None]).sum(), argnums=(0, 1, 2))
  )
  with jax.set_mesh(make_mesh(2, 1, 1, sequence=4)):
    found = run(lambda *qkv: sequence.on_parts(of_part, {}, *qkv, segments))(*map(by_time, (q, k, v)))
  for one, other in zip(*map(jax.tree.leaves, (found, run(of_whole)(*map(by_time, (q, k, v))))), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-4)


def test_a_program_for_a_tpu_has_the_kernels_on_parts_of_rows():
  config = ModelConfig(
    vocab_size=128, d_model=256, n_layers=2, block_pattern="TM", n_heads=2, mlp_dim=128, ssm_head_dim=64,
    ssm_state=128, dtype="bfloat16", remat="mixed",
  )  # fmt: skip
  text = text_of_gradient(config, (2, 1, 1), 1280, sequence=2)
  assert len(re.findall(r"custom-call\(.*ssd_forward", text)) == 1  # a backward pass does not run it again
  assert "ssd_backward" in text
  assert "splash" in text
  assert not re.search(r"(640|1280),1280\]", text)

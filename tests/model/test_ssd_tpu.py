"""The SSD kernels of a TPU, interpreted, against the chunked form; and that programs for a TPU use them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_programs import text_of_gradient

from selfrag_jax.aot.chips import topology
from selfrag_jax.mesh import absent, make_mesh
from selfrag_jax.model import ssd_tpu
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.ssd import ssd_chunked

TIME, CHUNK = 384, 128
# documents that end within chunks and with them, of one token, and longer than a chunk
SEGMENTS = np.stack([np.repeat([1, 2, 1, 3], [100, 28, 1, 255]), np.repeat([4, 1, 0], [200, 150, 34])]).astype(np.int32)


def draw(batch, heads, width, groups, states, dtype):
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
  dt = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), (batch, TIME, heads)))
  return (
    normal(batch, TIME, heads, width),
    jnp.asarray(dt, jnp.float32),
    jnp.asarray(-rng.uniform(1, 16, heads), jnp.float32),
    normal(batch, TIME, groups, states),
    normal(batch, TIME, groups, states),
    jnp.asarray(rng.standard_normal((batch, heads, width, states)), jnp.float32),
  )


def value_and_grad(ssd, arguments, segment_ids):
  """Outputs, and the gradients of a fixed random projection of them with respect to every input."""

  def loss(*arguments):
    *inputs, state = arguments
    found = ssd(*inputs, segment_ids_BxT=segment_ids, initial_state_BxHxPxN=state, chunk_size=CHUNK)
    rng = np.random.default_rng(1)
    return sum((a * jnp.asarray(rng.standard_normal(a.shape), a.dtype)).sum() for a in found), found

  return jax.jit(jax.value_and_grad(loss, argnums=tuple(range(6)), has_aux=True))(*arguments)


def assert_equal(found, expected, bar):
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert one.dtype == other.dtype
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    assert np.abs(one - other).max() <= bar * np.abs(other).max()


INTERPRETED = partial(ssd_tpu.ssd, interpret=True)


@pytest.mark.parametrize(
  ("heads", "width", "groups", "states", "packed", "dtype", "bar"),
  [
    (4, 64, 1, 32, True, jnp.float32, 2e-6),  # one block of all heads
    (16, 16, 1, 16, False, jnp.float32, 2e-6),  # two blocks
    (32, 16, 2, 128, True, jnp.float32, 2e-6),  # two blocks in each of two groups
    (4, 64, 1, 32, True, jnp.bfloat16, 1e-2),
  ],
)
def test_the_kernels_compute_what_every_device_does_and_so_do_their_gradients(
  heads, width, groups, states, packed, dtype, bar
):
  arguments, segments = draw(2, heads, width, groups, states, dtype), SEGMENTS if packed else None
  (_, outputs), gradients = value_and_grad(INTERPRETED, arguments, segments)
  (_, expected), expected_gradients = value_and_grad(ssd_chunked, arguments, segments)
  assert_equal((outputs, gradients), (expected, expected_gradients), bar)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (2, 2, 2)])
def test_every_mesh_computes_the_same(sizes):
  for groups in (1, 2):
    arguments = draw(8, 16, 16, groups, 128, jnp.float32)
    segments = np.tile(SEGMENTS, (4, 1))
    (_, expected), expected_gradients = value_and_grad(ssd_chunked, arguments, segments)
    with jax.set_mesh(make_mesh(*sizes)):
      (_, outputs), gradients = value_and_grad(INTERPRETED, arguments, segments)
    assert_equal((outputs, gradients), (expected, expected_gradients), 2e-6)


@pytest.mark.parametrize(
  ("heads", "groups", "width", "block"),
  [(64, 1, 64, 8), (64, 8, 64, 8), (32, 1, 16, 8), (24, 1, 8, 24), (4, 1, 64, 4), (12, 1, 64, 12), (16, 4, 64, None)],
)
def test_blocks_of_heads_are_whole_tiles_of_one_group(heads, groups, width, block):
  assert ssd_tpu.block_heads(heads, groups, width) == block


@pytest.mark.parametrize(
  ("time", "kernels", "has_kernel"), [(256, "auto", True), (264, "auto", False), (256, "xla", False)]
)
@pytest.mark.parametrize("sizes", [(4, 1, 1), (1, 2, 2)])
def test_a_program_for_a_tpu_has_the_kernels_where_rows_are_whole_chunks(sizes, time, kernels, has_kernel):
  model = ModelConfig(
    vocab_size=128,
    d_model=256,
    n_layers=1,
    block_pattern="M",
    ssm_head_dim=64,
    ssm_state=128,
    dtype="bfloat16",
    kernels=kernels,
  )
  text = text_of_gradient(model, sizes, time)
  assert ("ssd_forward" in text) == ("ssd_backward" in text) == has_kernel


@pytest.mark.parametrize("chip", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernels_compile_for_tpus(chip, dtype):
  with absent(topology(chip)[1]):
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in draw(4, 16, 64, 1, 128, dtype)]
    with jax.set_mesh(make_mesh()):
      jax.jit(lambda *a: value_and_grad(ssd_tpu.ssd, a, None)).lower(*arguments).compile()


@pytest.mark.parametrize(
  ("change", "fit"),
  [
    ({}, True),
    ({"time": CHUNK}, True),
    ({"time": CHUNK + 8}, False),
    ({"chunk": 64}, False),  # no whole lanes
    ({"chunk": 2048, "time": 4096}, False),  # VMEM does not hold what tokens give to each other
    ({"dtype": jnp.float16}, False),
    ({"batch": 6}, False),  # for four devices
    ({"heads": 6, "width": 16}, True),  # one block of all heads
    ({"groups": 2, "states": 64}, False),
  ],
)
def test_what_the_kernels_do_not_fit_is_left_to_every_device(change, fit):
  sizes = {"batch": 4, "time": TIME, "heads": 16, "width": 64, "groups": 1, "states": 128, "chunk": CHUNK}
  of = sizes | {"dtype": jnp.bfloat16} | change
  x = jax.ShapeDtypeStruct((of["batch"], of["time"], of["heads"], of["width"]), of["dtype"])
  B = jax.ShapeDtypeStruct((of["batch"], of["time"], of["groups"], of["states"]), of["dtype"])
  with absent(topology("v5e:2x2")[1]), jax.set_mesh(make_mesh()):
    assert ssd_tpu.fits(x, B, of["chunk"]) == fit
  assert not ssd_tpu.fits(x, B, of["chunk"])  # the program is not for TPUs

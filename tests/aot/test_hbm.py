"""What programs move to and from a device's memory, where it is known, as compiled for a TPU that is not there."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from selfrag_jax.aot.chips import topology
from selfrag_jax.aot.hbm import moved
from selfrag_jax.aot.hlo import arrays, parse
from selfrag_jax.mesh import make_mesh, replicated

MIB = 2**20


@pytest.fixture(scope="module")
def device():
  return replicated(make_mesh(1, 1, 1, topology("v5e:1x1")[1]))


def moved_by(device, f, *shapes, donated=(), dtype=jnp.float32):
  given = [jax.ShapeDtypeStruct(shape, dtype if shape else jnp.int32, sharding=device) for shape in shapes]
  text = jax.jit(f, donate_argnums=donated, out_shardings=device).lower(*given).compile().as_text()
  return {path: size / MIB for path, size in moved(parse(text)).items() if size > 1024}


def test_a_sum_reads_its_operands_and_writes_its_result(device):
  size = 256  # MiB: more than a core's cache
  found = moved_by(device, lambda x, y: x + 2 * y, (size * 256, 1024), (size * 256, 1024))
  assert found[""] == pytest.approx(3 * size, rel=0.01)


def test_a_product_reads_both_factors_once(device):
  found = moved_by(device, lambda x, w: jnp.tanh(x @ w), (65536, 1024), (1024, 1024), dtype=jnp.bfloat16)
  assert found[""] == pytest.approx(128 + 2 + 128, rel=0.02)


def test_a_row_that_is_taken_or_set_costs_no_more_than_itself(device):
  memory, rows = (2**20, 128), (1024, 128)  # 512 MiB and 1/2 MiB
  taken = moved_by(device, lambda x, i: lax.dynamic_slice(x, (i, 0), rows) * 2, memory, ())
  assert taken[""] <= 4 * 0.5
  put = moved_by(device, lambda x, y, i: lax.dynamic_update_slice(x, y * 2, (i, 0)), memory, rows, (), donated=(0,))
  assert put[""] <= 4 * 0.5
  gathered = moved_by(device, lambda x, i: x[jnp.arange(1024) * i] * 2, memory, ())
  assert gathered[""] <= 4 * 0.5
  # the whole array, where it may not be overwritten
  kept = moved_by(device, lambda x, y, i: lax.dynamic_update_slice(x, y * 2, (i, 0)), memory, rows, ())
  assert kept[""] >= 1024


def test_a_scan_counts_as_often_as_it_turns_and_another_loop_by_itself(device):
  weights = (16, 2048, 2048)  # 8 MiB each
  layer = lambda x, w: (jnp.tanh(x @ w), None)
  scanned = moved_by(device, lambda x, w: lax.scan(layer, x, w)[0], (8, 2048), weights, dtype=jnp.bfloat16)
  assert scanned[""] == pytest.approx(16 * 8, rel=0.1)
  assert list(scanned) == [""]

  def until(x, w):
    again = lambda state: (state[0].sum() < 100) & (state[1] < 9)
    return lax.while_loop(again, lambda state: (layer(state[0], w[state[1]])[0], state[1] + 1), (x, 0))[0]

  looped = moved_by(device, until, (8, 2048), weights, dtype=jnp.bfloat16)
  assert looped["while"] == pytest.approx(8, rel=0.1)


def test_types_are_padded_to_their_tiles_and_say_where_they_lie():
  (array,) = arrays("f32[3,5]{1,0:T(8,128)S(1)}")
  assert (array.shape, array.space, array.bytes) == ((3, 5), 1, 8 * 128 * 4)
  (transposed,) = arrays("bf16[300,5]{0,1:T(8,128)(2,1)}")
  assert (transposed.space, transposed.bytes) == (0, 8 * 384 * 2)
  assert [array.bytes for array in arrays("(s4[4]{0}, pred[2,3]{1,0}, f32[])")] == [2, 6, 4]

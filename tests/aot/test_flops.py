"""FLOPs of traced programs against those that are counted by hand, and against the formula of the model."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from selfrag_jax.aot.flops import count
from selfrag_jax.mesh import make_mesh
from selfrag_jax.model.config import ModelConfig, flops_per_token
from selfrag_jax.model.lm import LM, init_params


def work(f, *shapes):
  return dict(count(jax.jit(f).trace(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]).jaxpr))


def test_products_count_by_their_sizes_and_nothing_else_does():
  assert work(lambda x, y: jnp.tanh(x @ y) + 1, (3, 4), (4, 5)) == {"": 2 * 3 * 4 * 5}
  assert work(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (7, 3, 4), (7, 4, 5)) == {"": 2 * 7 * 3 * 4 * 5}
  assert work(lambda x, y: jnp.convolve(x, y, "valid"), (10,), (3,)) == {"": 2 * 8 * 3}
  assert work(lambda x: x + 1, (3,)) == {}


def test_a_gradient_costs_two_more_products_and_a_rematerialised_one_three():
  loss = lambda x, y: jnp.sum((x @ y) ** 2)
  assert work(jax.grad(loss, (0, 1)), (8, 16), (16, 4)) == {"": 3 * 2 * 8 * 16 * 4}
  two = lambda x, y: jnp.sum(jax.checkpoint(lambda x, y: jnp.sin(x @ y) @ y)(x, y))
  assert work(jax.grad(two, (0, 1)), (8, 8), (8, 8))[""] == 7 * 2 * 8**3  # two forward, four backward, one again


def test_loops_branches_and_devices():
  body = lambda x: x @ x
  scanned = lambda x: jax.lax.scan(lambda x, _: (body(x), None), x, None, length=6)[0]
  assert work(scanned, (5, 5)) == {"": 6 * 250}
  searched = lambda x: jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: scanned(body(x)), body(x))
  assert work(searched, (5, 5)) == {"": 250, "while": 7 * 250}
  nested = lambda x: jax.lax.while_loop(lambda x: x.sum() < 1, searched, x)
  assert work(nested, (5, 5)) == {"while": 250, "while/while": 7 * 250}
  either = lambda x: jax.lax.cond(x.sum() > 0, body, scanned, x)
  assert work(either, (5, 5)) == {"": 6 * 250}
  mesh = make_mesh(2, 2, 2)
  split = jax.shard_map(body, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False)
  with jax.set_mesh(mesh):
    assert work(lambda x: split(jnp.tile(x, (2, 1))), (5, 5)) == {"": 8 * 250}  # every device computes its part


@pytest.mark.parametrize("pattern", ["TT", "MM", "TMM"])
def test_a_model_asks_for_what_its_formula_says(pattern):
  config = ModelConfig(
    1000, d_model=64, n_layers=len(pattern), n_heads=4, n_kv_heads=2, block_pattern=pattern, ssm_head_dim=16,
    ssm_state=16, ssm_chunk=32, remat="none",
  )  # fmt: skip
  params = jax.eval_shape(lambda: nn.unbox(init_params(config, jax.random.key(0))))
  tokens = jax.ShapeDtypeStruct((2, 256), jnp.int32)
  forward = lambda params, tokens: LM(config).apply(params, LM(config).apply(params, tokens), method="logits").sum()
  expected = 512 * flops_per_token(config, 256)
  assert count(jax.jit(forward).trace(params, tokens).jaxpr).total() == pytest.approx(expected, rel=0.06)
  gradient = count(jax.jit(jax.grad(forward)).trace(params, tokens).jaxpr).total()
  assert gradient == pytest.approx(3 * expected, rel=0.07)

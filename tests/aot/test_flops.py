"""FLOPs of traced and compiled programs against those counted by hand, and against the formula of the model."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from selfrag_jax.aot.chips import topology
from selfrag_jax.aot.flops import compiled, count
from selfrag_jax.aot.hlo import parse
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


def compiled_work(f, *shapes, device=None):
  sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)
  arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
  return dict(compiled(parse(jax.jit(f).trace(*arguments).lower().compile().as_text())))


PRODUCTS = {
  "product": (lambda x, y: jnp.tanh(x @ y), ((256, 384), (384, 512)), 2 * 256 * 384 * 512),
  "transposed": (lambda x, y: x.T @ y, ((384, 256), (384, 512)), 2 * 256 * 384 * 512),
  "batch": (lambda x, y: jnp.einsum("bhij,bhjk->bhik", x, y), ((2, 3, 128, 64), (2, 3, 64, 128)), 12 * 128 * 128 * 64),
  "heads": (lambda x, y: jnp.einsum("btd,dhe->bhte", x, y), ((2, 128, 256), (256, 4, 128)), 2 * 256 * 256 * 512),
  "scan": (
    lambda x: jax.lax.scan(lambda x, _: (jnp.tanh(x @ x), None), x, None, length=6)[0], ((128, 128),), 6 * 2 * 128**3
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("target", ["here", "v5e"])
def test_a_compiled_product_counts_what_was_asked_for(name, target):
  f, shapes, expected = PRODUCTS[name]
  device = topology("v5e:1x1")[1][0] if target == "v5e" else None
  assert compiled_work(f, *shapes, device=device) == {"": expected}


def test_a_compiled_convolution_counts_no_padding():
  f = lambda x, y: jax.lax.conv(x, y, (1,), "SAME")
  assert compiled_work(f, (2, 16, 128), (32, 16, 3)) == {"": 2 * 2 * 16 * 32 * (3 * 128 - 2)}


def test_a_product_that_every_device_repeats_counts_on_each():
  mesh = make_mesh(8, 1, 1)
  split, whole = (
    jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, p)) for p in (P("data"), P())
  )
  for x, share in ((split, 1 / 8), (whole, 1)):
    module = parse(jax.jit(lambda x, y: x @ y).trace(x, whole).lower().compile().as_text())
    assert compiled(module) == {"": share * 2 * 64**3}


def test_products_of_a_kernel_are_counted_alone_beside_a_compiled_program():
  def kernel(x, y, out):
    out[...] = x[...] @ y[...]

  tile = pl.BlockSpec((128, 128), lambda i, j: (i, j))
  specs = {"in_specs": [pl.BlockSpec((128, 256), lambda i, j: (i, 0)), pl.BlockSpec((256, 128), lambda i, j: (0, j))]}
  of = pl.pallas_call(
    kernel, out_shape=jax.ShapeDtypeStruct((512, 256), jnp.float32), grid=(4, 2), out_specs=tile, **specs
  )
  traced = jax.jit(lambda x, y: of(x, y) @ y.T).trace(
    *(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 256), (256, 256)))
  )
  product = 2 * 512 * 256 * 256
  assert dict(count(traced.jaxpr)) == {"": 2 * product}
  assert dict(count(traced.jaxpr, kernels_alone=True)) == {"": product}


def test_a_product_of_cublas_is_read_from_its_settings():
  line = (
    '  %c = (f32[8,128,512]{2,1,0}, s8[64]{0}) custom-call(%x, %y), custom_call_target="__cublas$lt$matmul", '
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["2"],"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}\n'
  )
  text = "HloModule f\n\nENTRY %main () -> f32[] {\n  %x = bf16[8,64,128]{2,1,0} parameter(0)\n"
  text += "  %y = bf16[8,512,64]{2,1,0} parameter(1)\n" + line + "}\n"
  assert compiled(parse(text)) == {"": 2 * 8 * 128 * 512 * 64}


@pytest.mark.parametrize(
  ("target", "mask", "window", "products", "pairs"),
  [
    ("Softmax", "PADDING_CAUSAL", 0, 2, 64 * 65 // 2),
    ("SoftmaxBackward", "PADDING_CAUSAL", 0, 5, 64 * 65 // 2),
    ("Softmax", "CAUSAL", 2, 2, 1 + 63 * 2),
    ("Softmax", "NO_MASK", 0, 2, 64 * 64),
  ],
)
def test_the_attention_of_cudnn_is_read_from_its_settings(target, mask, window, products, pairs):
  line = (
    "  %a = (bf16[3,8,64,32]{3,1,2,0}, f32[3,8,64]{2,1,0}, u8[0]{0}) custom-call(%q, %k, %v, %n, %n), "
    f'custom_call_target="__cudnn$fmha{target}", backend_config={{"cudnn_fmha_backend_config": {{"fmha_scale": 0.125, '
    '"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["3", "8", "64", "64"], "tuple_shapes": []}, '
    f'"mask_type": "{mask}", "sliding_window_length": {window}}}}}'
  )
  text = f"HloModule m, entry_computation_layout={{()->()}}\n\nENTRY %main (q: bf16[3,64,8,32]) -> () {{\n{line}\n}}\n"
  assert compiled(parse(text)) == {"": products * 2 * 3 * 8 * pairs * 32}
  assert parse(text).kernels == {f"cudnn$fmha{target}": 1}


def test_calls_of_kernels_are_counted_and_a_loop_counts_once():
  call = '  %{} = f32[8]{{0}} custom-call(%x), custom_call_target="{}"'.format
  text = "\n".join([
    "HloModule m", "", "%body (x: f32[8]) -> f32[8] {", call("scan.1", "tpu_custom_call"), "}", "",
    "%condition (x: f32[8]) -> pred[] {", "  %n = s32[] constant(7)",
    "  ROOT %less = pred[] compare(%i, %n), direction=LT", "}", "",
    "ENTRY %main (x: f32[8]) -> f32[8] {", call("scan.2", "tpu_custom_call"), call("other", "tpu_custom_call"),
    call("custom-call.3", "AllocateBuffer"),
    "  ROOT %w = f32[8]{0} while(%x), condition=%condition, body=%body", "}",
  ])  # fmt: skip
  assert parse(text).kernels == {"scan": 2, "other": 1}

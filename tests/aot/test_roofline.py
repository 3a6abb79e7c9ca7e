"""The least times of programs whose work, traffic and collectives are known."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from configs.rag import get_config
from selfrag_jax.aot import flops
from selfrag_jax.aot.chips import topology
from selfrag_jax.aot.programs import Program
from selfrag_jax.aot.roofline import Bound, bounds, speed, utilization
from selfrag_jax.chips import CHIPS
from selfrag_jax.experiments.rag import build, planned
from selfrag_jax.mesh import make_mesh
from selfrag_jax.model.config import StepWork

V5E = CHIPS["v5e"]
ROWS, WIDTH = 4 * 8192, 4096


@pytest.fixture(scope="module")
def program():
  """Rows over four devices times a weight whose rows are split over two of them."""
  mesh = make_mesh(2, 2, 1, topology("v5e:2x2")[1])
  of = lambda shape, *spec: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))
  traced = jax.jit(lambda x, w: x @ w, out_shardings=NamedSharding(mesh, P(("data", "fsdp")))).trace(
    of((ROWS, WIDTH), ("data", "fsdp")), of((WIDTH, WIDTH), "fsdp")
  )
  text = traced.lower().compile().as_text()
  useful = StepWork(ROWS, 2.0 * ROWS * WIDTH * WIDTH)
  return dict(mesh.shape), Program("update", 0, 0, 0, 0.0, text, flops.count(traced.jaxpr), useful)


def test_products_memory_and_wire_take_what_they_must(program):
  mesh, compiled = program
  (bound,) = bounds(compiled, mesh, V5E).values()
  assert bound.products == pytest.approx(2 * ROWS * WIDTH**2 / 4 / V5E.flops)
  weight, rows = 2 * WIDTH**2, 2 * ROWS // 4 * WIDTH
  # half of the weight comes from the other device; whether all of it lies in the cache then, the compiler decides
  assert 2 * rows + weight // 2 <= bound.memory * V5E.bandwidth <= 2 * rows + 2.6 * weight
  assert bound.wire == pytest.approx(weight / 2 / V5E.interconnect, rel=0.01)


def test_the_utilization_is_useful_work_over_the_least_time(program):
  mesh, compiled = program
  (bound,) = bounds(compiled, mesh, V5E).values()
  overlapped, in_turn = utilization(compiled, mesh, V5E) or (0, 0)
  assert overlapped == pytest.approx(bound.products / max(bound))
  assert in_turn == pytest.approx(bound.products / (bound.products + bound.wire))
  assert speed(compiled, mesh, V5E) == pytest.approx((ROWS / bound.overlapped, ROWS / bound.in_turn))
  without = compiled._replace(useful=None)
  assert utilization(without, mesh, V5E) is speed(without, mesh, V5E) is None


def test_a_loop_of_unknown_length_has_a_bound_of_its_own_and_no_utilization(program):
  mesh, compiled = program
  looping = compiled._replace(work=Counter({"": 1.0, "while": 4 * V5E.flops}))
  assert bounds(looping, mesh, V5E)["while"].products == 1
  assert utilization(looping, mesh, V5E) is None


def test_what_overlaps_takes_as_long_as_the_longest():
  assert Bound(1.0, 3.0, 2.0).overlapped == 3.0
  assert Bound(1.0, 3.0, 2.0).in_turn == 5.0


def test_the_flops_of_a_model_are_those_of_its_products_without_recomputation():
  config = get_config("transformer")
  config.rag.batch_size, config.rag.accumulate, config.pretrain.steps, config.choose.steps = 8, 1, 0, 0
  experiment = build(config.to_dict())
  with jax.set_mesh(experiment.mesh):
    phase = planned(experiment)["rag"]
    products = flops.count(phase.trace()["update"].jaxpr).total()
  # more are asked for: attention also looks ahead, and the backward pass computes the logits again
  assert 1 <= products / phase.model_work().flops <= 1.5

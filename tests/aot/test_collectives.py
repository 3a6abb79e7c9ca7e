"""Collectives as they are read from compiled programs whose collectives are known."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from selfrag_jax.aot.collectives import collectives
from selfrag_jax.mesh import make_mesh

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}


def compiled(f, *shapes):
  specs = P(("data", "fsdp", "tensor"))
  mesh = make_mesh(**SIZES)
  mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
  with jax.set_mesh(mesh):
    return jax.jit(mapped).lower(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]).compile().as_text()


@pytest.mark.parametrize(
  "axes", [("fsdp",), ("data",), ("tensor",), ("data", "fsdp"), ("fsdp", "tensor"), tuple(SIZES)]
)
def test_a_collective_names_its_kind_its_bytes_and_the_axes_that_it_spans(axes):
  size = 2 ** len(axes)
  summed, gathered = collectives(
    compiled(lambda x: jax.lax.all_gather(jax.lax.psum(x * 2, axes), axes, tiled=True)[:3] * 3, (24, 5))
  )
  assert (summed.kind, summed.bytes, summed.axes(SIZES), len(summed.devices)) == ("all-reduce", 60, axes, size)
  assert (gathered.kind, gathered.bytes, gathered.axes(SIZES)) == ("all-gather", 60 * size, axes)
  assert summed.loops == gathered.loops == ()
  assert summed.wire_bytes == 2 * 60 * (size - 1) / size
  assert gathered.wire_bytes == 60 * (size - 1)


def test_a_scattered_sum_counts_what_goes_in_and_a_permutation_what_moves():
  def program(x):
    moved = jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])
    return jax.lax.psum_scatter(moved * 2, "tensor", tiled=True)

  moved, scattered = sorted(collectives(compiled(program, (32, 8))), key=lambda found: found.kind)
  assert (moved.kind, moved.bytes, moved.wire_bytes) == ("collective-permute", 128, 128)
  assert (scattered.kind, scattered.bytes, scattered.wire_bytes) == ("reduce-scatter", 128, 64)


def test_loops_are_named_from_the_outside_in_with_their_iterations():
  def program(x):
    def inner(x, _):
      return jax.lax.psum(x, "fsdp") / 2, None

    def outer(x):
      return jax.lax.pmax(jax.lax.scan(inner, x, None, length=5)[0], "tensor") / 2

    return jax.lax.while_loop(lambda x: x.sum() > 1, outer, x)

  found = collectives(compiled(program, (8, 16)))
  by_axes = {one.axes(SIZES): one for one in found}
  assert [loop.trips for loop in by_axes["fsdp",].loops] == [None, 5]
  assert [loop.trips for loop in by_axes["tensor",].loops] == [None]
  assert by_axes["fsdp",].loops[0] == by_axes["tensor",].loops[0]
  assert all("while" in loop.name for loop in by_axes["fsdp",].loops)


def test_branches_and_calls_are_read_too():
  def program(x):
    return jax.lax.cond(x.sum() > 0, partial(jax.lax.psum, axis_name="data"), lambda x: jax.lax.pmin(x, "tensor"), x)

  assert {one.axes(SIZES) for one in collectives(compiled(program, (8, 4)))} == {("data",), ("tensor",)}


def test_one_branch_of_a_condition_is_the_one_that_makes_more():
  def often(x):
    return jax.lax.scan(lambda x, _: (jax.lax.psum(x, "fsdp") / 2, None), x, None, length=9)[0]

  def program(x):
    return jax.lax.cond(x.sum() > 0, often, lambda x: jax.lax.pmin(x, "tensor"), x)

  text = compiled(program, (8, 4))
  assert {one.axes(SIZES) for one in collectives(text)} == {("fsdp",), ("tensor",)}
  assert {one.axes(SIZES) for one in collectives(text, one_branch=True)} == {("fsdp",)}


def test_the_fusion_of_a_sum_and_the_slice_that_is_taken_of_it_sends_as_a_scattered_sum():
  text = """HloModule jit_f, num_partitions=8

%all-reduce-scatter.1 (p: f32[64]) -> f32[8] {
  %p = f32[64]{0} parameter(0)
  %x = f32[64]{0} all-reduce(%p), replica_groups=[1,8]<=[8]
  ROOT %y = f32[8]{0} dynamic-slice(%x, %x), dynamic_slice_sizes={8}
}

ENTRY %main (p: f32[64]) -> f32[8] {
  %p = f32[64]{0} parameter(0)
  ROOT %x = f32[8]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
  (found,) = collectives(text)
  assert (found.kind, found.bytes, found.wire_bytes) == ("reduce-scatter", 256, 224)


STEPS = """HloModule jit_f, num_partitions=8

%begin (p: f32[8]) -> f32[64] {
  %p = f32[8]{0} parameter(0)
  ROOT %x = f32[64]{0} all-gather(%p), channel_id=1, replica_groups=[1,8]<=[8], metadata={op_name="gather"}
}

%async_collective_fusion.1 (p: f32[8]) -> f32[64] {
  %p = f32[8]{0} parameter(0)
  ROOT %x = f32[64]{0} all-gather(%p), channel_id=1, replica_groups=[1,8]<=[8], metadata={op_name="NAME"}
}

%below (n: s32[]) -> pred[] {
  %n = s32[] parameter(0)
  %end = s32[] constant(5)
  ROOT %less = pred[] compare(%n, %end), direction=LT
}

%body (n: s32[]) -> s32[] {
  %n = s32[] parameter(0)
  ROOT %x = s32[] fusion(%n), kind=kCustom, calls=%async_collective_fusion.1
}

ENTRY %main (p: f32[8]) -> f32[64] {
  %p = f32[8]{0} parameter(0)
  %begun = f32[64]{0} fusion(%p), kind=kCustom, calls=%begin
  ROOT %loop = s32[] while(%p), condition=%below, body=%body, metadata={op_name="while"}
}
"""


def test_a_step_that_is_taken_in_a_loop_is_not_sent_again():
  (found,) = collectives(STEPS.replace("NAME", "gather"))
  assert found.loops == ()
  alone, other = collectives(STEPS.replace("NAME", "another"))
  assert (alone.loops, other.loops[0].trips) == ((), 5)


ENTRY = """HloModule jit_f, num_partitions=8

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
LINE
}
"""


@pytest.mark.parametrize(
  ("line", "kind", "size", "devices"),
  [
    ("f32[4]{0} all-reduce(%p), channel_id=1, replica_groups={}, to_apply=%p", "all-reduce", 16, range(8)),
    ("f32[4]{0} all-reduce(%p), channel_id=1, replica_groups={{1,5},{0,2}}, to_apply=%p", "all-reduce", 16, (1, 5)),
    ("f32[4]{0} all-reduce(%p), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%p", "all-reduce", 16, (0, 4)),
    ("f32[4]{0} all-reduce(%p), replica_groups=mesh['a'=2,'b'=4] {'a'}, to_apply=%p", "all-reduce", 16, (0, 4)),
    ("f32[4]{0} all-reduce(%p), replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, to_apply=%p",
     "all-reduce", 16, (0, 2, 4, 6)),
    ("(bf16[4]{0:T(8,128)(2,1)}, bf16[32]{0:T(8,128)(2,1)S(1)}) all-gather-start(%p), replica_groups=[1,8]<=[8]",
     "all-gather", 64, range(8)),
    ("(s4[4]{0}, pred[4]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}",
     "collective-permute", 4, (0, 1)),
    ("(s4[4]{0}, pred[4]{0}) all-to-all(%p, %p), replica_groups=[1,8]<=[8]", "all-to-all", 6, range(8)),
  ],
)  # fmt: skip
def test_all_ways_to_write_groups_and_asynchronous_types(line, kind, size, devices):
  text = ENTRY.replace("LINE", f"  ROOT %x = {line}").replace(", to_apply=%p", "")
  (found,) = collectives(text)
  assert (found.kind, found.bytes, found.devices) == (kind, size, tuple(devices))


def test_what_cannot_be_read_is_said():
  with pytest.raises(ValueError, match="no HLO of a compiled program"):
    collectives("module @jit_f {\n}")
  with pytest.raises(ValueError, match="not known: f32"):
    collectives(ENTRY.replace("LINE", "  ROOT %x = f32[4] all-reduce(%p), replica_groups=spiral"))

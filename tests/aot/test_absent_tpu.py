"""Ahead-of-time compilation for an absent TPU: a rollout and its update, without the host, and their collectives."""

import dataclasses
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from selfrag_jax.aot.chips import topology
from selfrag_jax.aot.collectives import collectives
from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.mesh import PRESETS, absent, make_mesh, replicated
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import init_params
from selfrag_jax.tasks.two_hop_search import TwoHopSearch
from selfrag_jax.train.optimizer import make_optimizer
from selfrag_jax.train.phases.refrag import Refrag, RLConfig
from selfrag_jax.train.rollouts import MemoryConfig, RolloutRunner
from selfrag_jax.train.state import abstract_state

SHARDS, QUESTIONS, ROWS = 4, 4, 8
D_EMBED = 96  # a width that nothing else has
TASK = TwoHopSearch(n_entities=8, n_relations=2)
MODEL = ModelConfig(
  vocab_size=TASK.tokenizer.vocab_size, d_model=128, n_layers=2, n_heads=2, block_pattern="TM", ssm_chunk=16,
  ssm_head_dim=64, dtype="bfloat16",
)  # fmt: skip
# nothing that leaves the device, be it a callback, a feed or a transfer
HOST = re.compile(r"is_host_transfer=true| (infeed|outfeed)\(|xla_(ffi_)?python")


def mesh_of(data, fsdp, tensor, sequence=1):
  return make_mesh(data, fsdp, tensor, topology("v5e:2x2")[1], sequence=sequence)


@pytest.fixture(scope="module")
def mesh():
  return mesh_of(2, 2, 1)


@pytest.fixture(scope="module")
def programs(mesh):
  return {name: traced.lower().compile() for name, traced in traced_on(mesh).items()}


def traced_on(mesh, questions=QUESTIONS, encoder="token_bag"):
  rl = RLConfig(questions_per_step=questions, rollouts_per_question=ROWS // QUESTIONS)
  params = abstract_state(partial(init_params, MODEL), make_optimizer(rl.optimizer, 1), mesh).params
  runner = RolloutRunner(TASK, MODEL, MemoryConfig(D_EMBED, encoder), mesh, params if encoder == "lm" else None)
  rollout = RolloutConfig(max_hops=1, max_query_tokens=4, max_answer_tokens=2)
  with absent(mesh.devices.ravel().tolist()), jax.set_mesh(mesh):
    phase = Refrag("rl", runner, MODEL, rl, rollout, mesh=mesh, seed=0, params=params, evaluate=lambda _: {})
    return phase.trace()


@pytest.mark.parametrize("name", ["rollout", "update"])
def test_the_programs_of_a_step_compile_for_a_v5e_slice_and_never_ask_the_host(programs, name):
  text = programs[name].as_text()
  # arrays in tiles of 128 lanes: XLA lays them out so for a TPU alone
  assert re.search(r"entry_computation_layout=.*:T\(8,128\)", text.splitlines()[0])
  assert not HOST.search(text)
  assert programs[name].memory_analysis().temp_size_in_bytes < 2**30


def test_a_callback_would_be_seen(mesh):
  x = jax.ShapeDtypeStruct((8, 128), np.float32, sharding=replicated(mesh))
  calling = jax.jit(lambda x: jax.pure_callback(lambda x: x, x, x)).lower(x).compile()
  assert HOST.search(calling.as_text())


def test_a_weight_is_gathered_once_forward_and_once_backward(programs):
  # one instruction may stand in several computations of an asynchronous fusion; its channel tells
  gathers = set(re.findall(r" all-gather(?:-start)?\(.*channel_id=(\d+)", programs["update"].as_text()))
  weights = len(("q", "k", "v", "o", "up", "gate", "down", "in_proj", "out_proj", "head"))
  assert 0 < len(gathers) <= 2 * weights + 1  # the rows of the tokens are one more


def test_one_axis_that_splits_rows_and_weights_gathers_the_weights():
  mesh = mesh_of(1, 4, 1)
  split = lambda shape, *axes: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*axes)))
  program = jax.jit(lambda x, up, down: jax.nn.silu(x @ up) @ down, out_shardings=NamedSharding(mesh, P("fsdp")))
  compiled = program.lower(
    split((2**16, 2048), "fsdp"), split((2048, 8192), "fsdp"), split((8192, 2048), None, "fsdp")
  ).compile()
  assert [one.kind for one in collectives(compiled.as_text())] == ["all-gather"] * 2


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 4, 1), (1, 2, 2), (1, 2, 1, 2), (2, 1, 1, 2)])
def test_no_weight_is_sent_within_a_loop_of_the_rollout_and_each_once_before(sizes, mesh, programs):
  program = programs["rollout"] if sizes == (2, 2, 1) else traced_on(mesh_of(*sizes))["rollout"].lower().compile()
  sends_weights_once(program, mesh_of(*sizes))


def test_no_weight_of_an_encoder_is_sent_within_a_loop(mesh):
  program = traced_on(mesh, encoder="lm")["rollout"].lower().compile()
  sends_weights_once(program, mesh, models=2)


MACHINES = {
  "host": "v5e:2x2", "v5e-16": "v5e:4x4", "v5e-256": "v5e:16x16", "v5p-256": "v5p:8x8x4",
  "v6e-256": "v6e:16x16", "h100-4": "h100:4", "h100-8": "h100:8", "slices": "v5e:4x4*2",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_no_weight_is_sent_within_a_loop_on_any_preset_of_the_mesh(preset):
  try:
    devices = topology(MACHINES[preset])[1]
  except ImportError as error:
    pytest.skip(str(error))
  mesh = make_mesh(**dataclasses.asdict(PRESETS[preset]), devices=devices)
  rollout = traced_on(mesh, questions=mesh.size)["rollout"].lower().compile()
  weights = sends_weights_once(rollout, mesh)
  print(f"{preset}: {dict(mesh.shape)}, {sum(weights):,} bytes of weights a device, once, none in a loop")


def sends_weights_once(program, mesh, models=1):
  """Check that the weights are gathered once, outside of all loops, and return their bytes."""
  width, projected = MODEL.d_model, MODEL.ssm_inner + MODEL.conv_channels + MODEL.ssm_heads
  columns = [MODEL.padded_vocab, *[width] * 4, *[MODEL.mlp_width] * 3, projected, MODEL.ssm_inner]
  weights = sorted(
    width * n * 2 // mesh.shape["tensor"] for n in columns * models
  )  # bytes on a device: bfloat16, split by tensor alone
  gathers = [one for one in collectives(program.as_text()) if one.kind == "all-gather" and one.bytes >= weights[0]]
  assert not any(one.loops for one in gathers)
  sent = sorted(2 * math.prod(shape) for one in gathers for shape in one.shapes)  # a GPU gathers several at once
  sent = sent[-len(weights) :] if len(gathers) < len(weights) else sent
  assert sent == (weights if mesh.shape["fsdp"] * mesh.shape["sequence"] > 1 else [])
  return sent


def test_a_prompt_is_read_once_for_all_rollouts_of_its_question(mesh):
  text, prompt = traced_on(mesh)["rollout"].lower().as_text(), TASK.batch("train", range(QUESTIONS)).prompts.shape[1]
  states = lambda rows: f"tensor<{rows}x{prompt}x{MODEL.d_model}xbf16>"
  assert states(QUESTIONS) in text
  assert states(ROWS) not in text


def gathered(program):
  """Return (dtype, number of elements, shape) of every array that an all-gather yields."""
  results = " ".join(re.findall(r" = (.*) all-gather(?:-start)?\(", program.as_text()))
  arrays = [(dtype, [int(n) for n in sizes.split(",")]) for dtype, sizes in re.findall(r"(\w+)\[([\d,]+)\]", results)]
  return [(dtype, math.prod(shape), shape) for dtype, shape in arrays]


def test_the_search_gathers_queries_and_candidates_never_the_memory(programs):
  arrays = gathered(programs["rollout"])
  assert {size for _, size, shape in arrays if D_EMBED in shape} == {ROWS * D_EMBED}
  assert {dtype for dtype, size, _ in arrays if size == ROWS * SHARDS} == {"f32", "s32"}


def test_axes_need_not_follow_those_of_the_hardware_and_slices_share_the_batch():
  assert make_mesh(16, 16, 1, topology("v5p:8x8x4")[1]).shape == {"data": 16, "fsdp": 16, "sequence": 1, "tensor": 1}
  mesh = make_mesh(-1, 8, 1, topology("v5e:4x4*2")[1])
  assert mesh.shape == {"data": 4, "fsdp": 8, "sequence": 1, "tensor": 1}
  assert [{device.slice_index for device in row.flat} for row in mesh.devices] == [{0}, {0}, {1}, {1}]

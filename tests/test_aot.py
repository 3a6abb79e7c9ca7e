"""Ahead-of-time compilation for a TPU that is not there: a rollout and its update, with no host callback."""

import os

import jax
import pytest
from jax.experimental import topologies

from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.mesh import make_mesh
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.tasks.two_hop_search import TwoHopSearch
from selfrag_jax.train.episodes import MemoryConfig, Player
from selfrag_jax.train.optimizer import make_optimizer
from selfrag_jax.train.phases.refrag import Refrag
from selfrag_jax.train.settings import EvalConfig, RLConfig
from selfrag_jax.train.state import abstract_state


@pytest.fixture(scope="module")
def phase():
  os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # no metadata server to ask
  mesh = make_mesh((2, 2, 1), topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices)
  task = TwoHopSearch(n_entities=8, n_relations=2)
  model = ModelConfig(
    vocab_size=task.tokenizer.vocab_size, d_model=128, n_layers=2, n_heads=2, block_pattern="TM", ssm_chunk=16,
    ssm_head_dim=64, dtype="bfloat16",
  )  # fmt: skip
  player = Player(task, model, MemoryConfig(d_embed=128), mesh)
  rl = RLConfig(questions_per_step=4, rollouts_per_question=2)
  params = abstract_state(model, make_optimizer(rl.optimizer, 1), mesh).params
  rollout = RolloutConfig(max_hops=1, max_query_tokens=4, max_answer_tokens=2)
  with jax.set_mesh(mesh):
    yield Refrag("rl", player, model, rl, rollout, EvalConfig(), mesh=mesh, seed=0, params=params)


def test_rollout_and_update_compile_for_a_v5e_slice(phase):
  for name, lowered in phase.lower().items():
    compiled = lowered.compile()
    text = compiled.as_text()
    assert "tpu" in text[:2000].lower() or " while(" in text
    for operation in ("xla_python", "infeed(", "outfeed(", "SendToHost", "RecvFromHost"):
      assert operation not in text, (name, operation)
    assert compiled.memory_analysis().temp_size_in_bytes < 2**30
    if name == "rollout":  # the sharded search gathers candidates, never the memory
      assert "all-gather" in text

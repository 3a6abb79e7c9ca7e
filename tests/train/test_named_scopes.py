"""The names of scopes in the traced programs, by which a trace is read."""

import re

import flax.linen as nn
import jax

from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.mesh import make_mesh
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import init_params
from selfrag_jax.tasks.two_hop_search import TwoHopSearch
from selfrag_jax.train.phases.refrag import Refrag, RLConfig
from selfrag_jax.train.rollouts import MemoryConfig, RolloutRunner

TASK = TwoHopSearch(n_entities=8, n_relations=2)
MODEL = ModelConfig(
  TASK.tokenizer.vocab_size, d_model=16, n_layers=2, n_heads=2, block_pattern="TM", ssm_state=8, ssm_head_dim=16
)


def scopes(traced):
  """Return the names of scopes in a traced program, those of the backward pass without `transpose(jvp(...))`."""
  names = re.findall(r'loc\("([^"]*)"', traced.lower().as_text(debug_info=True))
  return {part for name in names for part in re.split(r"[/()]", name)}


def test_blocks_loss_optimizer_and_the_parts_of_a_rollout_have_names():
  mesh = make_mesh(1, 1, 1, jax.devices()[:1])
  with jax.set_mesh(mesh):
    params = nn.unbox(init_params(MODEL, jax.random.key(0)))
    runner = RolloutRunner(TASK, MODEL, MemoryConfig(d_embed=16), mesh)
    config = RLConfig(questions_per_step=2, rollouts_per_question=2)
    start = {"mesh": mesh, "seed": 0, "params": params, "evaluate": lambda _: {}}
    traced = Refrag("rl", runner, MODEL, config, RolloutConfig(1, 1, 4, 2), **start).trace()
  assert {"loss", "optimizer", "embed", "T", "M"} <= scopes(traced["update"])
  assert {"prefill", "decode", "sample", "retrieve", "read", "embed", "T", "M"} <= scopes(traced["rollout"])

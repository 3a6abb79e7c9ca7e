"""The language model as an encoder: padding does not count, dimensions are standardised, rollouts search with it."""

import jax
import numpy as np
import pytest

from selfrag_jax.generate.encoder import encode, init_lm_encoder
from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.mesh import make_mesh
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, init_params
from selfrag_jax.tasks.two_hop_search import TwoHopSearch
from selfrag_jax.train.episodes import MemoryConfig, Player
from selfrag_jax.train.optimizer import make_optimizer
from selfrag_jax.train.settings import OptimizerConfig
from selfrag_jax.train.state import LossSums, make_update, state_from_params

TASK = TwoHopSearch(n_entities=8, n_relations=2)
MODEL = ModelConfig(
  vocab_size=TASK.tokenizer.vocab_size, d_model=32, n_layers=2, n_heads=2, block_pattern="TM",
  ssm_state=8, ssm_head_dim=16, ssm_chunk=8, init_scale=0.3,
)  # fmt: skip
KEYS = TASK.kb.key_tokens()


@pytest.fixture(scope="module")
def params():
  import flax.linen as nn

  return nn.unbox(jax.jit(lambda key: init_params(MODEL, key))(jax.random.key(0)))


def test_embeddings_are_standardised_means_of_real_tokens(params):
  encoder = init_lm_encoder(MODEL, params, KEYS, KEYS >= 0, batch=5)
  embedded = encode(encoder, KEYS, KEYS >= 0)
  np.testing.assert_allclose(embedded.mean(axis=0), 0, atol=1e-5)
  np.testing.assert_allclose(embedded.std(axis=0), 1, atol=1e-4)
  states = np.asarray(jax.jit(LM(MODEL).apply)(params, KEYS)).mean(axis=1)
  np.testing.assert_allclose(embedded, (states - states.mean(axis=0)) / states.std(axis=0), atol=1e-4)
  padded = np.pad(KEYS, ((0, 0), (0, 4)), constant_values=-1)
  np.testing.assert_allclose(encode(encoder, padded, padded >= 0), embedded, atol=1e-4)
  assert (encode(encoder, KEYS, np.zeros_like(KEYS, bool)) == 0).all()


def test_a_rollout_finds_a_document_by_its_key(params):
  mesh = make_mesh((1, 1, 1), jax.devices()[:1])
  player = Player(TASK, MODEL, MemoryConfig(encoder="lm"), mesh, encoder_params=params)
  memory = player.memory("train", range(2))
  assert memory.embeddings.shape == (32, MODEL.d_model)
  episodes = player.play(params, "train", range(2), RolloutConfig(1, 1, 4, 2), jax.random.key(0), kind="oracle")
  assert episodes.host.tokens.shape[0] == 2
  from selfrag_jax.memory.topk import search

  found = search(memory, encode(player.encoder, KEYS, KEYS >= 0), 1, group_ids=np.ones(16, np.int32))
  np.testing.assert_array_equal(found.slots[:, 0], 16 + np.arange(16))


def test_a_model_from_scratch_is_no_encoder():
  with pytest.raises(ValueError, match="set init, or use token_bag"):
    Player(TASK, MODEL, MemoryConfig(encoder="lm"), make_mesh((1, 1, 1), jax.devices()[:1]))


def test_training_leaves_the_parameters_that_it_started_from(params):
  """A phase donates its state; encoder, reference and report still need what it began with."""
  mesh, before = make_mesh((1, 1, 1), jax.devices()[:1]), jax.device_get(params)
  optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1), 1)
  state = state_from_params(params, optimizer, mesh, MODEL, seed=0)
  update = make_update(lambda params, _: LossSums(sum(x.sum() for x in jax.tree.leaves(params)), 1.0, {}), optimizer)
  state, _ = update(state, np.zeros(1))
  jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(params))
  assert any(
    (np.asarray(a) != b).any() for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(before), strict=True)
  )


def test_the_encoder_does_not_depend_on_what_is_searched_first(params):
  """A resumed run searches other questions first than the run that it continues."""
  mesh = make_mesh((1, 1, 1), jax.devices()[:1])
  weights = []
  for indices in (range(2), range(5, 9)):
    player = Player(TASK, MODEL, MemoryConfig(d_embed=16), mesh)
    player.memory("train", indices)
    weights.append(np.asarray(player.encoder.weights))
  np.testing.assert_array_equal(*weights)

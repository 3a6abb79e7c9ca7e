"""The language model as an encoder: pads do not count, dimensions are standardised, rollouts search with it."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from selfrag_jax.encoders.language_model import FITTED, LMEncoder
from selfrag_jax.generate.retrieve import make_retrieve
from selfrag_jax.generate.rollout import RolloutConfig
from selfrag_jax.memory.topk_numpy import search_numpy
from selfrag_jax.mesh import absent, make_mesh
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, init_params, stack, unstack
from selfrag_jax.ragged import pad_rows
from selfrag_jax.tasks.two_hop_search import TwoHopSearch
from selfrag_jax.train.optimizer import OptimizerConfig, make_optimizer
from selfrag_jax.train.rollouts import MemoryConfig, RolloutRunner
from selfrag_jax.train.state import LossSums, make_update, state_from_params

TASK = TwoHopSearch(n_entities=8, n_relations=2)
MODEL = ModelConfig(
  vocab_size=TASK.tokenizer.vocab_size, d_model=32, n_layers=2, n_heads=2, block_pattern="TM",
  ssm_state=8, ssm_head_dim=16, ssm_chunk=8, init_scale=0.3,
)  # fmt: skip
KEYS = TASK.kb.key_tokens()
LENGTHS = (KEYS >= 0).sum(axis=1)


@pytest.fixture(scope="module")
def params():
  import flax.linen as nn

  return nn.unbox(init_params(MODEL, jax.random.key(0)))


def states_by_hand(params):
  """The states behind the first block and the last, weighted by rarity, in numpy; every key is of the same length."""
  flat, config = unstack(MODEL, params)["params"], dataclasses.replace(MODEL, n_layers=1, block_pattern="T")
  first = stack(config, {"params": {name: value for name, value in flat.items() if name != "layers_1"}})
  having = (KEYS[:, :, None, None] == KEYS).any(axis=3).sum(axis=2)  # of each token, the keys that have it
  rarity = np.log(1 + (len(KEYS) - having + 0.5) / (having + 0.5))[:, 1:]
  weights = (rarity / rarity.sum(axis=1, keepdims=True))[:, :, None]
  both = [np.asarray(LM(c).apply(p, KEYS), np.float64) for c, p in ((config, first), (MODEL, params))]
  return (weights * np.concatenate(both, axis=2)[:, 1:]).sum(axis=1)


def test_embeddings_are_standardised_states_of_two_depths(params):
  assert set(LENGTHS) == {KEYS.shape[1]}
  encoder = LMEncoder(MODEL, params, TASK.tokenizer)
  encoder.fit_tokens([key[:n] for key, n in zip(KEYS, LENGTHS, strict=True)])
  embedded = encoder.apply(encoder.params, KEYS, LENGTHS)
  states = states_by_hand(params)
  constants = encoder.constants
  standard = (states - constants["mean"]) * constants["scale"]
  np.testing.assert_allclose(standard.mean(axis=0), 0, atol=1e-5)
  np.testing.assert_allclose(standard.std(axis=0), 1, atol=1e-4)
  expected = (states - states.mean(axis=0)) / states.std(axis=0)
  np.testing.assert_allclose(embedded, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-4)
  padded = np.pad(KEYS, ((0, 0), (0, 4)), constant_values=-1)
  np.testing.assert_allclose(encoder.apply(encoder.params, padded, LENGTHS), embedded, atol=1e-4)
  assert (encoder.apply(encoder.params, KEYS, np.zeros_like(LENGTHS)) == 0).all()


def test_a_rollout_finds_what_is_most_like_its_query(params):
  """The policy is pushed to search, at times for nothing; the encoder is traced inside its rollout."""
  mesh, special = make_mesh(1, 1, 1, jax.devices()[:1]), TASK.tokenizer.special
  asked = TASK.batch("train", range(8))
  beginning = jax.jit(LM(MODEL).apply)(params, asked.prompts)[:, -1].mean(axis=0)
  head = params["params"]["embed"].at[special["<|search_start|>"]].set(beginning)
  pushed = {"params": params["params"] | {"unembed": head.at[special["<|search_end|>"]].multiply(2)}}
  untied = dataclasses.replace(MODEL, tie_embeddings=False)
  runner = RolloutRunner(TASK, untied, MemoryConfig(encoder="lm"), mesh, encoder_params=pushed)
  memory = runner.memory(asked.corpus)
  assert memory.embeddings.shape == (8 * 16, 2 * MODEL.d_model)
  embed = partial(runner.encoder.apply, runner.encoder.query_params(runner.encoder.params))
  same = runner.encoder.apply(runner.encoder.params, KEYS, LENGTHS)
  fitted = runner.encoder.constants
  assert not np.allclose(fitted["mean"], fitted["query_mean"], atol=0.01)  # questions are embedded as such
  found = search_numpy(memory, same, 1, group_ids=np.full(16, 3))
  np.testing.assert_array_equal(found.slots[:, 0], 3 * 16 + np.arange(16))

  episodes = runner.run(pushed, asked, RolloutConfig(1, 2, 4, 2), jax.random.key(0), kind="memory")
  queries, lengths = pad_rows([transcript.queries[0] for transcript in episodes.transcripts], 4)
  slots = search_numpy(memory, embed(queries, lengths), 2, group_ids=np.arange(8)).slots
  np.testing.assert_array_equal(episodes.host.slots[:, 0], np.where(lengths[:, None] > 0, slots, -1))
  assert 0 < np.count_nonzero(lengths) < 8


@pytest.mark.parametrize("encoder", ["token_bag", "lm"])
def test_an_empty_query_finds_nothing(params, encoder):
  mesh = make_mesh(1, 1, 1, jax.devices()[:1])
  runner = RolloutRunner(TASK, MODEL, MemoryConfig(d_embed=16, encoder=encoder), mesh, encoder_params=params)
  memory, queries, gold = runner.memory(TASK.batch("train", range(2)).corpus), KEYS[[5, 5]], np.zeros((2, 1), np.int32)
  embed = partial(runner.encoder.apply, runner.encoder.params)
  groups = np.array([1, 1], np.int32)
  retrieve = make_retrieve("memory", memory, embed, 2, group_ids=groups, gold_BxG=gold, key=jax.random.key(0))
  found = jax.jit(retrieve)(queries, (queries >= 0) & [[True], [False]], 0)
  assert found.slots[0, 0] == 16 + 5
  np.testing.assert_array_equal(found.slots[1], [-1, -1])
  np.testing.assert_array_equal(found.lengths[1], [0, 0])


def test_an_encoder_that_brings_its_constants_is_not_fitted_again(params):
  mesh = make_mesh(1, 1, 1, jax.devices()[:1])
  brought = {
    name: np.full_like(value, 0.5)
    for name, value in LMEncoder(MODEL, params, TASK.tokenizer).params.items()
    if name in FITTED
  }
  runner = RolloutRunner(TASK, MODEL, MemoryConfig(encoder="lm"), mesh, encoder_params=params, constants=brought)
  runner.memory(TASK.batch("train", range(2)).corpus)
  assert all((runner.encoder.constants[name] == 0.5).all() for name in brought)


def test_a_model_from_scratch_is_no_encoder():
  with pytest.raises(ValueError, match="set init, or use token_bag"):
    RolloutRunner(TASK, MODEL, MemoryConfig(encoder="lm"), make_mesh(1, 1, 1, jax.devices()[:1]))


def test_training_leaves_the_parameters_that_it_started_from(params):
  """A phase donates its state; encoder, reference and report still need what it began with."""
  mesh, before = make_mesh(1, 1, 1, jax.devices()[:1]), jax.device_get(params)
  optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1), 1)
  state = state_from_params(params, optimizer, mesh, partial(init_params, MODEL), seed=0)
  update = make_update(lambda params, _: LossSums(sum(x.sum() for x in jax.tree.leaves(params)), 1.0, {}), optimizer)
  state, _ = update(state, np.zeros(1))
  jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(params))
  assert any(
    (np.asarray(a) != b).any() for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(before), strict=True)
  )


def test_the_encoder_does_not_depend_on_what_is_searched_first(params):
  """A resumed run searches other questions first than the run that it continues."""
  mesh = make_mesh(1, 1, 1, jax.devices()[:1])
  weights = []
  for indices in (range(2), range(5, 9)):
    runner = RolloutRunner(TASK, MODEL, MemoryConfig(d_embed=16), mesh)
    runner.memory(TASK.batch("train", indices).corpus)
    weights.append(np.asarray(runner.encoder.params.weights))
  np.testing.assert_array_equal(*weights)


def test_a_plan_fits_no_encoder_and_needs_no_weights(params):
  encoder = LMEncoder(MODEL, jax.eval_shape(lambda: params), TASK.tokenizer)
  with absent(jax.devices()):
    encoder.fit_tokens([[1, 2, 3], [4, 5]])
    encoder.fit_queries([[1, 2]])
  shapes = {**dict.fromkeys(FITTED, (2 * MODEL.d_model,)), "weights": (MODEL.vocab_size,)}
  assert {name: value.shape for name, value in encoder.constants.items()} == shapes

"""The memory of REFRAG's rollouts with a language model as encoder: what it is fitted to, and words beside it."""

import jax
import numpy as np
import pytest

from selfrag_jax.encoders.language_model import LMEncoder, pooled
from selfrag_jax.experiments.refrag import build
from selfrag_jax.memory.topk_numpy import search_numpy
from tests.experiments.few_towns import small_config


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  return small_config(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("trained") / "encoder"


@pytest.fixture(scope="module")
def encoder(config, folder):
  """An encoder in a folder, fitted to other texts than the passages that are searched."""
  encoder = LMEncoder.load(config["init"])
  encoder.fit(["The Rhine flows here.", "Ada was born there.", "Others were not."])
  encoder.save(folder, encoder.params)
  return encoder


def test_the_scale_of_an_encoder_is_fitted_to_the_passages_that_are_searched(config, encoder, folder):
  memory = {**config["memory"], "encoder": "lm"}
  found = {}
  for fitted in (False, True):
    given = {**config, "init": str(folder), "memory": {**memory, "fit_scale": fitted}}
    experiment = build(given)
    runner, corpus = experiment.runner, experiment.task.corpus
    runner.memory(corpus)
    found[fitted] = runner.encoder
    np.testing.assert_array_equal(runner.encoder.constants["mean"], encoder.constants["mean"])
  for name in ("scale", "weights"):
    np.testing.assert_array_equal(found[False].constants[name], encoder.constants[name])
    assert not np.allclose(found[True].constants[name], encoder.constants[name], rtol=0.1)
  keys = [set(key[:n].tolist()) for key, n in zip(corpus.keys, corpus.key_lengths, strict=True)]
  having = np.array([sum(i in key for key in keys) for i in range(encoder.config.vocab_size)])
  expected = np.log(1 + (len(keys) - having + 0.5) / (having + 0.5))
  expected[list(encoder.tokenizer.special.values())] = 0
  np.testing.assert_allclose(found[True].constants["weights"], expected, rtol=1e-6)
  states = np.asarray(pooled(encoder.config, found[True].params, corpus.keys, corpus.key_lengths))
  np.testing.assert_allclose(found[True].constants["scale"], 1 / states.std(axis=0), rtol=1e-3)


def test_words_count_beside_the_vectors_of_a_language_model_in_the_compiled_rollout(config, encoder, folder):
  found, rollouts = {}, {}
  for words in (0.0, 0.5):
    memory = {**config["memory"], "encoder": "lm", "fit_scale": True, "words": words, "d_embed": 512}
    experiment = build({**config, "init": str(folder), "memory": memory})
    runner, task = experiment.runner, experiment.task
    indices = np.arange(8) % task.size("test")  # a question for each device
    batch = task.batch("test", indices)
    found[words] = np.asarray(runner.memory(task.corpus).embeddings)
    with jax.set_mesh(experiment.mesh):
      episodes = runner.run(experiment.base_params, batch, experiment.rollout, jax.random.key(0))
    rollouts[words] = episodes.host.slots
    expected = search_numpy(
      runner.memory(task.corpus), runner.encoder.for_queries(task.texts("test", indices)), 3
    ).slots
    np.testing.assert_array_equal(runner.search(batch, 3), expected)
    assert set(experiment.rl_phase(experiment.base_params).trace()) == {"rollout", "update"}
  alone, both = (embedded @ embedded.T for embedded in found.values())
  width = 2 * experiment.model.d_model
  assert found[0.5].shape[1] == width + 512
  np.testing.assert_allclose(found[0.5][:, :width], 0.5**0.5 * found[0.0], atol=1e-5)
  assert np.abs(both - alone).max() > 0.1
  assert (rollouts[0.0] >= 0).any()
  assert (rollouts[0.5] >= 0).any()

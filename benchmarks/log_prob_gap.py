"""The gap between the log-probabilities that a rollout sampled from and those that its update computes.

  python benchmarks/log_prob_gap.py --config=configs/refrag.py:smollm2_135m --config.data.path=FOLDER
  python benchmarks/log_prob_gap.py --config=configs/refrag.py

The rollout decodes token by token around its retrieval, with caches; the update reads rows of several. If they differ,
reinforcement is off policy without anybody having wanted it. The first query is the question, so that every row has
sampled tokens behind retrieved ones. Prints the largest and the mean absolute gap over the sampled tokens, and over
those that come first behind retrieved or forced ones.
"""

import dataclasses
import sys
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
from absl import app, flags, logging
from ml_collections import config_flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CONFIG = config_flags.DEFINE_config_file("config", "configs/refrag.py", "The config of the model and its questions.")
QUESTIONS = flags.DEFINE_integer("questions", 8, "Questions, with two rollouts each.", lower_bound=1)


def main(_) -> None:
  """Roll out, read the rollouts again, and print the gaps."""
  from selfrag_jax.experiments.refrag import build
  from selfrag_jax.mesh import configure_xla
  from selfrag_jax.model.likelihood import sequence_log_probs
  from selfrag_jax.model.lm import init_params
  from selfrag_jax.train.experience import Trajectories, packed

  logging.set_verbosity(logging.WARNING)
  configure_xla()
  experiment = build(CONFIG.value.to_dict())
  bounds = dataclasses.replace(experiment.rollout, first_query="question")
  model, params = experiment.model, experiment.base_params
  with jax.set_mesh(experiment.mesh):
    if params is None:
      params = nn.unbox(init_params(model, jax.random.key(experiment.seed)))
    questions = experiment.task.batch("train", np.arange(QUESTIONS.value))
    done = experiment.runner.run(params, questions, bounds, jax.random.key(0), repeats=2).host
    ones = np.ones(len(done.tokens))
    rows = packed([Trajectories.of(done, ones, ones > 0, None)], len(ones), 1)
    rows = jax.tree.map(lambda x: x[rows.segment_ids.any(axis=1)], rows)
    temperature = bounds.sampling.temperature
    again = lambda params: sequence_log_probs(model, params, rows.tokens, rows.segment_ids, temperature=temperature)
    gap = np.abs(np.asarray(jax.jit(again)(params), np.float64) - rows.log_probs)
  first = np.roll(~rows.rewarded, 1, axis=1) & rows.rewarded
  device = jax.devices()[0].device_kind
  print(f"{jax.tree.reduce(lambda n, x: n + x.size, params, 0):,} parameters, {model.dtype}, {device}")
  print(f"{len(ones)} rollouts in {len(rows.tokens)} rows of {rows.tokens.shape[1]} tokens")
  for name, tokens in {"sampled tokens": rows.rewarded, "first behind others": first}.items():
    print(f"{name:20} {tokens.sum():6}  largest gap {gap[tokens].max():.2e}  mean {gap[tokens].mean():.2e}")


if __name__ == "__main__":
  app.run(main)

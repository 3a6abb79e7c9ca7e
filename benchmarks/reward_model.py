"""What a reward model gives to finished rollouts of a REFRAG run: right ones, and wrong ones of several kinds.

  python benchmarks/reward_model.py [--reward_model=runs/reward_model_hybrid] [--workdir=runs/refrag_hybrid]

Both are workdirs of finished `launch/train.py` runs. Each policy of the REFRAG run samples 1,024 rollouts of held-out
questions; the columns are the number of a kind of rollouts, their mean reward and the share that earns more than 0.5.
A kind of wrong rollouts with a high share is what reinforcement by this model would teach.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from absl import app, flags, logging
from ml_collections import config_flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CONFIG = config_flags.DEFINE_config_file("config", "configs/refrag.py", "The config that the REFRAG run was made with.")
WORKDIR = flags.DEFINE_string("workdir", "runs/refrag_hybrid", "The finished run of REFRAG.")
REWARD_MODEL = flags.DEFINE_string("reward_model", "runs/reward_model_hybrid", "The finished run of the reward model.")
POLICIES = {"sft": "random demonstrations", "sft_gold": "gold demonstrations", "rl": "reinforcement"}
QUESTIONS, REPEATS = 256, 4


def main(_) -> None:
  """Roll the policies out and print what their rollouts earn."""
  from selfrag_jax.experiments.refrag import build, load_policy
  from selfrag_jax.mesh import configure_xla
  from selfrag_jax.train.load import load_reward_model

  logging.set_verbosity(logging.WARNING)
  configure_xla()
  experiment = build(CONFIG.value.to_dict())
  reward = load_reward_model(REWARD_MODEL.value, tokenizer=experiment.task.tokenizer, mesh=experiment.mesh)
  print(f"{'rollouts':46}{'n':>6}{'reward':>8}{'> 0.5':>8}")
  with jax.set_mesh(experiment.mesh):
    questions = experiment.task.batch("test", np.arange(QUESTIONS))
    for phase, taught in POLICIES.items():
      params = load_policy(experiment, WORKDIR.value, phase)
      done = experiment.runner.run(params, questions, experiment.rollout, jax.random.key(0), repeats=REPEATS)
      scores, earned = experiment.runner.score(done), np.asarray(reward(done.host.tokens, done.host.lengths))
      right, found = scores.exact_match > 0, scores.all_gold > 0
      kinds = {"right": right, "wrong, documents found": ~right & found, "wrong, not found": ~right & ~found}
      for kind, rows in kinds.items():
        values = f"{earned[rows].mean():8.3f}{(earned[rows] > 0.5).mean():8.3f}" if rows.any() else f"{'-':>8}{'-':>8}"
        print(f"{f'{taught}: {kind}':46}{rows.sum():6}{values}")


if __name__ == "__main__":
  app.run(main)

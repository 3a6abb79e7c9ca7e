"""Where a REFRAG policy fails: its exact match for each pair of relations of the two-hop questions.

  python benchmarks/refrag_relations.py [--workdir=runs/refrag_mamba] [--config=configs/refrag.py:mamba]

Reads the `rl` checkpoint of a finished `launch/train.py` run. A row is the relation of the first search, a column that
of the second. A policy that has settled on a wrong search fails for whole pairs, not for some questions of each.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from absl import app, flags, logging
from ml_collections import config_flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CONFIG = config_flags.DEFINE_config_file("config", "configs/refrag.py:mamba", "The config that the run was made with.")
WORKDIR = flags.DEFINE_string("workdir", "runs/refrag_mamba", "The finished run.")


def main(_) -> None:
  """Evaluate the policy and print the table."""
  from selfrag_jax.experiments.refrag import build, load_policy
  from selfrag_jax.mesh import configure_xla

  logging.set_verbosity(logging.WARNING)
  configure_xla()
  experiment = build(CONFIG.value.to_dict())
  kb, n = experiment.task.kb, experiment.evaluation.final
  with jax.set_mesh(experiment.mesh):
    exact = experiment.evaluate(load_policy(experiment, WORKDIR.value, "rl"), "test", n).exact_match
  first, second = np.array([kb.question("test", i).relations for i in range(n)]).T
  print(f"{'first, second':14}" + "".join(f"{name:>9}" for name in kb.relations))
  for i, name in enumerate(kb.relations):
    of_pairs = [exact[(first == i) & (second == j)].mean() for j in range(len(kb.relations))]
    print(f"{name:14}" + "".join(f"{value:9.3f}" for value in of_pairs))
  print(f"all {n} questions: {exact.mean():.3f}")


if __name__ == "__main__":
  app.run(main)

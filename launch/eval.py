"""Evaluate: `python launch/eval.py --config=configs/position_recall.py [--workdir=runs/mine]`.

Takes the checkpoints that are in the workdir, trains what is missing, and writes the report there. Run the same command
again to go on. `--v=1` shows where an error arose.
"""

from absl import flags
from command import CONFIG, WORKDIR, build, run

DATA = flags.DEFINE_string("data", None, "Files that the experiment reads: short for --config.data.path.")
EXPERIMENTS = {
  "position_recall": "selfrag_jax.evals.position_recall",
  "position_recall_sweep": "selfrag_jax.evals.sweep",
  "documents": "selfrag_jax.evals.documents",
  "retrieval": "selfrag_jax.evals.retrieval",
}


def main(argv: list[str]) -> None:
  """Run the experiment that the config describes."""
  if DATA.value and CONFIG.value:
    if "path" not in CONFIG.value.get("data", {}):
      raise ValueError("--data: this config reads no files; configs/position_recall.py:documents does")
    CONFIG.value.data.path = DATA.value
  module, experiment = build(argv, EXPERIMENTS)
  from selfrag_jax.train.workdir import open_workdir

  with open_workdir(WORKDIR.value or CONFIG.value.workdir) as workdir:
    module.run(experiment, workdir)


if __name__ == "__main__":
  run(main)

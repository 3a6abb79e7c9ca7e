"""Evaluate: `python launch/eval.py --config=configs/position_recall.py [--workdir=runs/mine]`.

Takes the checkpoints that are in the workdir, trains what is missing, and writes the report there. Run the same command
again to go on. `--v=1` shows where an error arose.
"""

from command import CONFIG, WORKDIR, build, run

EXPERIMENTS = {"position_recall": "selfrag_jax.evals.position_recall"}


def main(argv: list[str]) -> None:
  """Run the experiment that the config describes."""
  module, experiment = build(argv, EXPERIMENTS)
  from selfrag_jax.train.workdir import open_workdir

  with open_workdir(WORKDIR.value or CONFIG.value.workdir) as workdir:
    module.run(experiment, workdir)


if __name__ == "__main__":
  run(main)

"""Train: `python launch/train.py --config=configs/refrag.py [--config.rl.steps=50] [--workdir=runs/mine] [--dry_run]`.

Run the same command again to resume. `--v=1` shows where an error arose.
"""

import importlib
import sys
from pathlib import Path

from absl import flags
from command import run
from ml_collections import config_flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CONFIG = config_flags.DEFINE_config_file(
  "config", lock_config=True, help_string="A file of configs/, and after a colon its variant."
)
WORKDIR = flags.DEFINE_string(
  "workdir", None, "Where checkpoints, metrics and the report go (default: config.workdir)."
)
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print mesh, parameters, memory and the first batch, and stop.")

EXPERIMENTS = {"refrag": "selfrag_jax.evals.refrag", "position_recall": "selfrag_jax.evals.position_recall"}


def main(argv: list[str]) -> None:
  """Check the flags, then run the experiment that the config names."""
  if len(argv) > 1:
    raise ValueError(f"unexpected argument {argv[1]!r}; overrides are written --config.rl.steps=50")
  from selfrag_jax.mesh import configure_xla, start_distributed

  configure_xla()
  start_distributed()
  config = CONFIG.value.to_dict()
  if config["experiment"] not in EXPERIMENTS:
    raise ValueError(f"config.experiment is {config['experiment']!r}; one of {', '.join(EXPERIMENTS)}")
  module = importlib.import_module(EXPERIMENTS[config["experiment"]])
  experiment = module.build(config)  # before anything is written
  if DRY_RUN.value:
    module.dry_run(experiment)
    return
  from selfrag_jax.train.workdir import open_workdir

  with open_workdir(WORKDIR.value or config["workdir"]) as workdir:
    module.run(experiment, workdir)


if __name__ == "__main__":
  flags.mark_flag_as_required("config")
  run(main)

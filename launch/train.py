"""Train: `python launch/train.py --config=configs/refrag.py [--config.rl.steps=50] [--workdir=runs/mine] [--dry_run]`.

Run the same command again to resume. `--v=1` shows where an error arose.
"""

from absl import flags
from command import DRY_RUN, HOSTS, build, output, read, run

for shared in ("config", "workdir", "mesh", "dry_run", *HOSTS):
  flags.declare_key_flag(shared)


def main(argv: list[str]) -> None:
  """Train the phases of the config."""
  config = read(argv)
  folder = "" if DRY_RUN.value else output(config)
  module, experiment = build(config)
  if DRY_RUN.value:
    module.dry_run(experiment)
    return
  from selfrag_jax.train.workdir import open_workdir

  with open_workdir(folder, config["experiment"]) as workdir:
    module.run(experiment, workdir)


if __name__ == "__main__":
  run(main)

"""Train: `python launch/train.py --config=configs/refrag.py [--config.rl.steps=50] [--workdir=runs/mine] [--dry_run]`.

Run the same command again to resume. `--v=1` shows where an error arose.
"""

from absl import flags
from command import build, output, read, run

DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print mesh, parameters, memory and the first batch, and stop.")
for shared in ("config", "workdir"):
  flags.declare_key_flag(shared)
EXPERIMENTS = {
  "refrag": "selfrag_jax.experiments.refrag",
  "self_rag": "selfrag_jax.experiments.self_rag",
  "encoder": "selfrag_jax.experiments.encoder",
  "rerank": "selfrag_jax.experiments.rerank",
  "position_recall": "selfrag_jax.experiments.self_rag",  # its phases; launch/eval.py runs the rest
}


def main(argv: list[str]) -> None:
  """Run the phases that the config has."""
  config = read(argv, EXPERIMENTS)
  folder = "" if DRY_RUN.value else output(config)
  module, experiment = build(config, EXPERIMENTS)
  if DRY_RUN.value:
    module.dry_run(experiment)
    return
  from selfrag_jax.train.workdir import open_workdir

  with open_workdir(folder, config["experiment"]) as workdir:
    module.run(experiment, workdir)


if __name__ == "__main__":
  run(main)

"""Evaluate: `python launch/eval.py --config=configs/position_recall.py [--workdir=runs/mine]`.

Measures the models in the workdir and writes the report there. Position recall and sweeps first train missing phases;
the phases of other experiments are trained by launch/train.py. Run the same command again to go on. `--v=1` shows where
an error arose. Exit code 0: done, and every `--min` and `--max` is met; 1: one is missed; 2: it could not run.
"""

import sys

from absl import flags
from command import DRY_RUN, HOSTS, build, output, read, run

DATA = flags.DEFINE_string("data", None, "Files that the experiment reads: short for --config.data.path.")
MIN = flags.DEFINE_multi_string("min", [], "NAME=VALUE: the least that a report's value may be, as em.refrag=0.9.")
MAX = flags.DEFINE_multi_string("max", [], "NAME=VALUE: the most that a report's value may be.")
for shared in ("config", "workdir", "mesh", "dry_run", *HOSTS):
  flags.declare_key_flag(shared)


def main(argv: list[str]) -> None:
  """Evaluate the experiment that the config describes."""
  from selfrag_jax.reports.thresholds import check_names, missed, parse_gates

  gates = parse_gates(MIN.value, MAX.value)
  config = read(argv)
  if DATA.value is not None:
    if "path" not in config.get("data", {}):
      raise ValueError("--data: this config reads no files; configs/position_recall.py:documents does")
    config["data"]["path"] = DATA.value
  folder = "" if DRY_RUN.value else output(config)
  module, experiment = build(config)
  if gates:
    check_names(gates, module.value_names(experiment))
  if DRY_RUN.value:
    module.dry_run(experiment)
    return
  from selfrag_jax.experiments.base import READING
  from selfrag_jax.text.printable import printable
  from selfrag_jax.train.loop import checkpoints
  from selfrag_jax.train.workdir import open_workdir

  if config["experiment"] in READING and not checkpoints(folder, "").exists():  # a mistyped folder is not made
    raise ValueError(
      f"{checkpoints(folder, '')} does not exist: train first, with launch/train.py, or give its workdir"
    )

  with open_workdir(folder, config["experiment"]) as workdir:
    report = module.evaluate(experiment, workdir)
  if failures := missed(report, gates):
    print(*(printable(f"missed: {failure}") for failure in failures), sep="\n", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
  run(main, failed=2)

"""Evaluate: `python launch/eval.py --config=configs/position_recall.py [--workdir=runs/mine]`.

Takes the checkpoints that are in the workdir, trains what is missing, and writes the report there. Run the same command
again to go on. `--v=1` shows where an error arose. Exit code 0: done, and every `--min` is met; 1: one is not; 2: it
could not run.
"""

import sys

from absl import flags
from command import build, output, read, run

DATA = flags.DEFINE_string("data", None, "Files that the experiment reads: short for --config.data.path.")
MIN = flags.DEFINE_multi_string("min", [], "NAME=VALUE: what a value of the report must reach, as bm25.ndcg@10=0.78.")
for shared in ("config", "workdir"):
  flags.declare_key_flag(shared)
EXPERIMENTS = {
  "position_recall": "selfrag_jax.experiments.position_recall",
  "sweep": "selfrag_jax.experiments.sweep",
  "documents": "selfrag_jax.experiments.documents",
  "retrieval": "selfrag_jax.experiments.retrieval",
}


def main(argv: list[str]) -> None:
  """Run the experiment that the config describes."""
  from selfrag_jax.reports.thresholds import check_names, missed, parse_gate

  gates = [parse_gate(text) for text in MIN.value]
  config = read(argv, EXPERIMENTS)
  if DATA.value is not None:
    if "path" not in config.get("data", {}):
      raise ValueError("--data: this config reads no files; configs/position_recall.py:documents does")
    config["data"]["path"] = DATA.value
  folder = output(config)
  module, experiment = build(config, EXPERIMENTS)
  if gates:
    check_names(gates, module.value_names(experiment))
  from selfrag_jax.text.printable import printable
  from selfrag_jax.train.workdir import open_workdir

  with open_workdir(folder, config["experiment"]) as workdir:
    report = module.run(experiment, workdir)
  if failures := missed(report, gates):
    print(*(printable(f"missed: {failure}") for failure in failures), sep="\n", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
  run(main, failed=2)

"""The headline results from the reports in a folder: medians and ranges, without any training.

  python benchmarks/headlines.py [--workdir=benchmarks/results/headlines]

The folder is the workdir of `launch/eval.py --config=configs/headlines.py`, finished or not, or a copy of its reports.
Like that command, it prints the table and writes `sweep.json`, `sweep.csv` (every number), `sweep.png` and a figure of
each group there.
"""

import sys
from pathlib import Path

from absl import app, flags

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

WORKDIR = flags.DEFINE_string("workdir", str(ROOT / "benchmarks" / "results" / "headlines"), "Where the reports are.")


def main(argv: list[str]) -> None:
  """Read the reports and publish their summary."""
  from selfrag_jax.experiments import sweep

  try:
    if argv[1:] or not WORKDIR.value:
      raise ValueError(f"write --workdir=FOLDER, not {' '.join(argv[1:]) or 'an empty folder'}")
    sweep.publish(WORKDIR.value, *sweep.read_done(WORKDIR.value))
  except (OSError, ValueError) as error:
    sys.exit(f"error: {error}")


if __name__ == "__main__":
  app.run(main)

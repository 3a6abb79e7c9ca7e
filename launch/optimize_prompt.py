"""Optimize a prompt: `python launch/optimize_prompt.py --config=configs/gradient_rag.py [--workdir=runs/mine]`.

Run the same command again to go on after it was stopped. `--compare=retrieval,window,none` runs once with each of these
memories on the same cases and prints paired intervals. The workdir gets report.html, prompt.txt, JSON and CSV.
"""

import sys

from absl import flags
from command import DRY_RUN, build, output, read, run

MEMORIES = ("none", "window", "retrieval")
COMPARE = flags.DEFINE_list("compare", [], f"Memories to compare: {', '.join(MEMORIES)}.")
for shared in ("config", "workdir", "dry_run"):
  flags.declare_key_flag(shared)


def main(argv: list[str]) -> None:
  """Optimize the prompts of the config, or compare the memories of --compare on them."""
  config = read(argv)
  if config["experiment"] != "gradient_rag":
    raise ValueError(f"config.experiment is {config['experiment']!r}; optimize_prompt.py runs gradient_rag")
  if COMPARE.present and (len(COMPARE.value) < 2 or sorted(COMPARE.value) != sorted({*COMPARE.value} & {*MEMORIES})):
    raise ValueError(f"--compare={','.join(COMPARE.value)}: give at least two of {', '.join(MEMORIES)}, each once")
  folder = "" if DRY_RUN.value else output(config)
  module, experiment = build(config)
  from selfrag_jax.experiments import gradient_rag
  from selfrag_jax.tasks.programs import isolation
  from selfrag_jax.train.workdir import open_workdir

  configs = {memory: {**config, "memory": memory} for memory in COMPARE.value}
  for one in configs.values():
    module.build(one)  # a wrong config is an error before any run starts
  if DRY_RUN.value:
    module.dry_run(experiment)
    return
  if experiment.task.run_program is not None:
    print(isolation(), file=sys.stderr)
  with open_workdir(folder, config["experiment"]) as workdir:
    gradient_rag.compare(configs, workdir) if configs else module.run(experiment, workdir)


if __name__ == "__main__":
  run(main)

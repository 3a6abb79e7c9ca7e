"""Causal controls of REFRAG: settings in which the policy must not beat chance.

  python benchmarks/refrag_controls.py --workdir=runs/refrag_hybrid [--config=configs/refrag.py]

Starts from the `sft` and `rl` checkpoints of a finished `launch/train.py` run. Each line says whether the control
trains (reinforcement starts again from `sft` with the control in place, and the new policy is evaluated with it) or
only evaluates the final policy. A control holds if the upper end of the 95 % Wilson interval is at most chance + 0.03.
Writes `controls.json` into the workdir; exit code 1 if a control fails. Takes as long as five reinforcement phases.
"""

import dataclasses
import sys
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import config_flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CONFIG = config_flags.DEFINE_config_file("config", "configs/refrag.py", "The config that the run was made with.")
WORKDIR = flags.DEFINE_string("workdir", "runs/refrag_hybrid", "The finished run.")
MARGIN = 0.03

# name -> (changes of config.rl, bounds of the rollout, retriever at evaluation)
TRAINED = {
  "random reward": ({"control": "random_reward"}, {}, "memory"),
  "answers and documents of another question": ({"control": "permuted"}, {}, "memory"),
  "empty retriever": ({"retriever": "empty"}, {}, "empty"),
  "random retriever": ({"retriever": "random"}, {}, "random"),
  "one search": ({}, {"max_hops": 1}, "memory"),
}
EVALUATED = {
  "empty retriever": ({}, "empty"),
  "random retriever": ({}, "random"),
  "one search": ({"max_hops": 1}, "memory"),
}


def main(_) -> None:
  """Train and evaluate every control and print the table."""
  from selfrag_jax.experiments.refrag import build, load_policy
  from selfrag_jax.mesh import configure_xla
  from selfrag_jax.metrics.statistics import wilson_interval
  from selfrag_jax.storage.atomic import write_json
  from selfrag_jax.train.alarm import AlarmConfig
  from selfrag_jax.train.loop import train
  from selfrag_jax.train.workdir import open_workdir

  logging.set_verbosity(logging.WARNING)
  configure_xla()
  experiment = build(CONFIG.value.to_dict())
  chance, n = experiment.task.chance, experiment.evaluation.final
  rows = []

  def judge(name: str, how: str, params, bounds, kind) -> None:
    exact = experiment.evaluate(params, "test", n, kind, **bounds).exact_match
    low, high = wilson_interval(int(exact.sum()), len(exact))
    rows.append({"control": name, "how": how, "em": float(exact.mean()), "low": low, "high": high, "n": len(exact)})
    verdict = "holds" if high <= chance + MARGIN else "FAILS"
    print(f"{name:44} {how:9} {exact.mean():.3f} [{low:.3f}, {high:.3f}]  {verdict}", flush=True)

  with open_workdir(WORKDIR.value) as workdir, jax.set_mesh(experiment.mesh):
    sft, refrag = (load_policy(experiment, workdir, phase) for phase in ("sft", "rl"))
    print(f"chance {chance:.3f}; a control holds if its interval ends below {chance + MARGIN:.3f}")
    for name, (bounds, kind) in EVALUATED.items():
      judge(name, "evaluates", refrag, bounds, kind)
    for name, (changes, bounds, kind) in TRAINED.items():
      rl = dataclasses.replace(experiment.rl, alarm=AlarmConfig(window=0), **changes)  # a control may well collapse
      phase = experiment.rl_phase(sft, name.replace(" ", "_"), rl, **bounds)
      metadata = {**experiment.metadata, "control": {**changes, **bounds}}
      judge(name, "trains", train(phase, workdir / "controls", experiment.loop, metadata).params, bounds, kind)
    write_json(workdir / "controls.json", {"chance": chance, "margin": MARGIN, "controls": rows})
  if any(row["high"] > chance + MARGIN for row in rows):
    raise SystemExit(1)


if __name__ == "__main__":
  app.run(main)

"""Steps per second of the phases with the most expensive batches: REFRAG's reinforcement and the Self-RAG memory.

  python benchmarks/training_steps.py [--steps=10] [--turns=5]

Each phase takes its steps like the training loop: batches are made ahead, and the metrics of a step are read while the
next step runs. It starts from random weights or from those of `--workdir`. Prints the median, the slowest and the
fastest turn of each phase, after a warm-up that compiles.
"""

import statistics
import sys
import time
from pathlib import Path

import jax
from absl import app, flags, logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

STEPS = flags.DEFINE_integer("steps", 10, "Steps of a turn.", lower_bound=1)
TURNS = flags.DEFINE_integer("turns", 5, "Timed turns of each phase.", lower_bound=1)
WARM_UP = flags.DEFINE_integer("warm_up", 3, "Steps before the first turn.", lower_bound=1)
WORKDIR = flags.DEFINE_string("workdir", None, "A run of configs/refrag.py, whose policy `sft` is reinforced.")


def main(_) -> None:
  """Time both phases and print the table."""
  from configs.memory import get_config as memory_config
  from configs.refrag import get_config as refrag_config
  from selfrag_jax.experiments import refrag, self_rag
  from selfrag_jax.mesh import configure_xla

  logging.set_verbosity(logging.WARNING)
  configure_xla()
  experiment = refrag.build(with_steps(refrag_config(), "rl"))
  if WORKDIR.value:
    params = refrag.load_policy(experiment, WORKDIR.value, "sft")
  else:
    params = experiment.sft_phase("sft", experiment.sft).initial_state().params
  reading = self_rag.build(with_steps(memory_config(), "memory"))
  start = reading.phase("pretrain", None).initial_state().params
  phases = {
    "refrag rl": (experiment.rl_phase(params), experiment.mesh),
    "memory": (reading.phase("memory", start), reading.mesh),
  }
  print(f"{jax.devices()[0].device_kind}, {TURNS.value} turns of {STEPS.value} steps")
  print(f"{'phase':12}{'steps/s':>10}{'slowest':>10}{'fastest':>10}")
  for name, (phase, mesh) in phases.items():
    with jax.set_mesh(mesh):
      rates = rates_of(phase)
    print(f"{name:12}{statistics.median(rates):10.3f}{min(rates):10.3f}{max(rates):10.3f}", flush=True)


def rates_of(phase) -> list[float]:
  """Return the steps per second of each turn. There is no pause between turns in which batches could be made."""
  state, batches, rates = phase.initial_state(), phase.batches(0), []
  for steps in [WARM_UP.value, *[STEPS.value] * TURNS.value]:
    started, metrics = time.perf_counter(), {}
    for _ in range(steps):
      before = metrics
      state, metrics = phase.step(state, next(batches))
      jax.device_get(before)
    jax.block_until_ready((state, metrics))
    rates.append(steps / (time.perf_counter() - started))
  return rates[1:]


def with_steps(config, phase: str) -> dict:
  """Return a config as nested dicts, in which `phase` has the number of steps that are timed."""
  config[phase].steps = WARM_UP.value + TURNS.value * STEPS.value
  return config.to_dict()


if __name__ == "__main__":
  app.run(main)

"""Steps a second of the phases whose batches are the most work to make: REFRAG's reinforcement and the Self-RAG memory.

  python benchmarks/training_steps.py [--steps=10] [--turns=5]

Each phase takes its steps as the training loop does, batches made ahead and the metrics of the step before read while
the next step runs, from random weights or those of `--workdir`. Prints the median turn of each phase after a warm-up,
which compiles, with the slowest and the fastest.
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
  """Return the steps a second of each turn. Turns follow each other at once: no batch is made in a pause."""
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
  """Return a config as nested dicts, with as many steps of `phase` as are timed."""
  config[phase].steps = WARM_UP.value + TURNS.value * STEPS.value
  return config.to_dict()


if __name__ == "__main__":
  app.run(main)

"""Rollouts with compiled retrieval (device mode) against the same hops around a Python retriever (host mode).

  python benchmarks/rollout_modes.py [--rows=256] [--repeats=5]

Both modes decode the same questions greedily with the same random weights, in turn, in one process. Host mode searches
the same memory exactly, in numpy. Prints the median time of each, their ratio, how often each goes to the host, and
whether tokens and masks agree.
"""

import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np
from absl import app, flags, logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROWS = flags.DEFINE_integer("rows", 256, "Questions decoded at once.")
REPEATS = flags.DEFINE_integer("repeats", 5, "Timed runs of each mode.")
WORKDIR = flags.DEFINE_string(
  "workdir", None, "A finished run of configs/refrag.py whose policy searches; else random weights."
)


def main(_) -> None:
  """Time both modes and print the table."""
  from configs.refrag import get_config
  from selfrag_jax.experiments.refrag import build, load_policy
  from selfrag_jax.generate.sampling import SamplingConfig
  from selfrag_jax.memory.topk_numpy import search_numpy
  from selfrag_jax.mesh import configure_xla
  from selfrag_jax.ragged import pad_rows

  logging.set_verbosity(logging.WARNING)
  configure_xla()
  experiment = build(get_config().to_dict())
  rollout = experiment.rollout.__class__(**{**vars(experiment.rollout), "sampling": SamplingConfig(temperature=0.0)})
  runner, key = experiment.runner, jax.random.key(0)
  batch = experiment.task.batch("test", np.arange(ROWS.value))
  if WORKDIR.value:
    params = load_policy(experiment, WORKDIR.value, "rl")
  else:
    params = experiment.sft_phase("sft", experiment.sft).initial_state().params
  memory = jax.device_get(runner.memory(batch.corpus))
  groups = batch.group_ids
  embed = jax.jit(runner.encoder.apply)

  asked = 0

  def retrieve(queries, hop):
    nonlocal asked
    asked += 1
    width = rollout.max_query_tokens
    embedded = np.asarray(embed(runner.encoder.params, *pad_rows(queries, width)))
    slots = [
      search_numpy(part(memory, group), embedded[i : i + 1], rollout.documents_per_search()).slots[0]
      for i, group in enumerate(groups)
    ]
    first = groups * (len(memory.valid) // len(groups))
    found = [[int(first[i] + slot) for slot in row if slot >= 0] for i, row in enumerate(slots)]
    return [[(slot, memory.tokens[slot, : memory.lengths[slot]].tolist()) for slot in row] for row in found]

  def part(state, group):
    rows = slice(group * (len(state.valid) // len(groups)), (group + 1) * (len(state.valid) // len(groups)))
    return {"embeddings": state.embeddings[rows], "valid": state.valid[rows]}

  modes = {
    "device": lambda: runner.run(params, batch, rollout, key),
    "host": lambda: runner.run_on_host(params, batch, rollout, key, retrieve),
  }
  played = {name: run() for name, run in modes.items()}  # compiles
  calls = asked
  seconds = {name: [] for name in modes}
  for _ in range(REPEATS.value):
    for name, run in modes.items():
      started = time.perf_counter()
      run()
      seconds[name].append(time.perf_counter() - started)
  device, host = (statistics.median(seconds[name]) for name in ("device", "host"))
  same = all(
    np.array_equal(getattr(played["device"].host, field), getattr(played["host"].host, field))
    for field in ("tokens", "sampled")
  )
  tokens = int(played["device"].host.sampled.sum())
  print(f"{ROWS.value} rows, {tokens} sampled tokens, {int(played['device'].host.searches.sum())} searches")
  # host mode leaves the device for each call of the retriever, and at the end
  print(f"round trips to the host: device mode 1, host mode {calls + 1}")
  print(
    f"device {device:.3f} s   host {host:.3f} s   host / device {host / device:.2f}   same tokens and masks: {same}"
  )


if __name__ == "__main__":
  app.run(main)

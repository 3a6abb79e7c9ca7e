"""Killed runs: at any moment of the kill, a complete checkpoint is left."""

import os
import random
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.train.checkpoint import Checkpointer

SAVE_FOR_EVER = """
import sys, itertools, jax.numpy as jnp
from selfrag_jax.train.checkpoint import Checkpointer
checkpointer = Checkpointer(sys.argv[1])
for step in itertools.count(int(sys.argv[2])):
  checkpointer.save(step, {"x": jnp.full((64, 1024), step, jnp.int32)}, metadata={"position": step})
  if step % 3 == 2:
    checkpointer.wait()
    print(step, flush=True)
"""


def test_kill_9_at_any_moment_leaves_a_checkpoint(tmp_path):
  moments, first = random.Random(0), 0
  for _ in range(3):
    process = subprocess.Popen(
      [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path), str(first)], stdout=subprocess.PIPE, text=True
    )
    try:
      committed = int(process.stdout.readline())
      time.sleep(moments.uniform(0, 0.3))
    finally:
      os.kill(process.pid, signal.SIGKILL)
      rest = process.communicate()[0].split()
    committed = int(rest[-1]) if rest else committed
    with Checkpointer(tmp_path) as checkpointer:
      restored = checkpointer.restore({"x": jax.ShapeDtypeStruct((64, 1024), jnp.int32)})
    assert restored.step >= committed
    assert restored.metadata == {"position": restored.step}
    np.testing.assert_array_equal(restored.state["x"], restored.step)
    assert not list(tmp_path.glob("*orbax-checkpoint-tmp*"))
    assert not (tmp_path / str(restored.step + 1)).exists()
    first = restored.step + 1

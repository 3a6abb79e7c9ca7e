"""Every phase at real size, for four kinds of absent accelerators: does each program fit?

  python benchmarks/compile_matrix.py --folder=FOLDER [--model=LLAMA --embedder=LLAMA --passages=PASSAGES]
    [--only=refrag:v5p]

`configs/*.py` at the size of a pod, for 256 chips of v5e, v5p and v6e, and 64 H100: search; pretraining; all phases of
the Self-RAG memory; REFRAG and RAG fine-tuning of Llama-3-8B; the joint training of Llama-3.2-1B as an encoder, and the
embedding of a knowledge base by it. FOLDER keeps the plan of each, as `launch/compile.py --json` writes it; what is
there is not compiled again. `--model` and `--embedder` are Hugging Face folders of these two, of which only
`config.json` and the tokenizer are read, PASSAGES has questions of HotpotQA (`questions.json`) and the same in the
layout of BEIR; what needs one that is not given is left out. It takes hours; H100 needs `pip install -e '.[cuda]'`,
the others `'.[tpu]'`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_collections
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

FOLDER = flags.DEFINE_string("folder", None, "Where the plans are kept.", required=True)
MODEL = flags.DEFINE_string("model", None, "A folder with config.json and tokenizer of Llama-3-8B.")
EMBEDDER = flags.DEFINE_string("embedder", None, "A folder with config.json and tokenizer of Llama-3.2-1B.")
PASSAGES = flags.DEFINE_string("passages", None, "A folder of questions and passages.")
ONLY = flags.DEFINE_string("only", None, "One plan, as config:chip; it is compiled in this process.")

CHIPS = {"v5e": "v5e:16x16", "v5p": "v5p:8x8x4", "v6e": "v6e:16x16", "h100": "h100:64"}
# the devices that share weights for decoding: 8 billion in bfloat16, twice, to write and to embed
TENSOR = {"v5e": 8, "v5p": 1, "v6e": 8, "h100": 2}
PHASES = ("pairs", "pretrain", "memory", "position_recall")


def config_of(name: str, chip: str) -> ml_collections.ConfigDict:
  """Return a config at the size of a pod, with its mesh on the devices of a chip."""
  from configs import encoder, pretrain, rag, refrag, search
  from configs.position_recall import get_config as position_recall

  if name == "search":
    config = search.get_config("v5e_1b")
  elif name == "pretrain":
    config = pretrain.get_config(pretrain.LARGE)
    config.data.path = str(Path(FOLDER.value) / "text.txt")
  elif name == "position_recall":  # all phases of the Self-RAG memory, whose facts have a vocabulary of their own
    config = position_recall("sentence")
    large = pretrain.hybrid_1b()["model"]
    config.model = {**large, "ssm_chunk": 128}
    del config.model.vocab_size, config.model.rope
    for phase in PHASES:
      config[phase].batch_size = 256
  elif name == "rag":
    config = rag.get_config("smollm2_135m")
    config.init, config.data.path = MODEL.value, str(Path(PASSAGES.value) / "questions.json")
    config.data.data_set = "hotpotqa"
    config.model.update({"remat": "full", "dtype": "bfloat16"})
    config.rag.update({"batch_size": 256, "accumulate": 1, "max_tokens": 4096})
  elif name == "encoder":
    config = encoder.get_config("smollm2_135m")
    config.init, config.data.path, config.encoder.batch_size = EMBEDDER.value, PASSAGES.value, 1024
  else:
    config = refrag.get_config("llama3_8b_v5p256")
    config.init, config.data.path = MODEL.value, PASSAGES.value
    config.mesh.tensor = TENSOR[chip]
  # one for all chips: 64 H100 have fewer shards than a preset of 256; 8 billion with their optimizer need more on v5e
  config.mesh.update({"data": -1, "fsdp": 64 if (name, chip) == ("rag", "v5e") else 16})
  return config


def compile_one(name: str, chip: str) -> None:
  """Compile a config for a chip and write its plan."""
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  from selfrag_jax.aot.chips import topology
  from selfrag_jax.aot.table import as_json
  from selfrag_jax.experiments.base import plan
  from selfrag_jax.mesh import configure_xla
  from selfrag_jax.storage.atomic import write_json

  configure_xla()
  kind, devices = topology(CHIPS[chip])
  mesh, programs = plan(config_of(name, chip).to_dict(), devices)
  made = {"topology": CHIPS[chip], "mesh": mesh, "programs": as_json(programs, mesh, kind)}
  write_json(Path(FOLDER.value) / f"{name}_{chip}.json", made)


def print_plan(name: str, chip: str) -> int:
  """Print a line for each program of a plan; return how many do not fit."""
  plan = json.loads((Path(FOLDER.value) / f"{name}_{chip}.json").read_text())
  sizes = "x".join(str(size) for size in plan["mesh"].values())
  for program in plan["programs"]:
    size, room = program["bytes"]["memory"] / 2**30, program["bytes"]["device"] / 2**30
    print(
      f"{chip:6}{name + ': ' + program['program']:42}{sizes:>10}{size:8.2f}{room:5.0f}{1 - size / room:7.0%}", end=""
    )
    print(f"  {'yes' if program['fits'] else 'NO':5}{program['compile_seconds']:7.0f} s", flush=True)
  return sum(not program["fits"] for program in plan["programs"])


def main(_) -> None:
  """Compile what is missing, each in a process of its own, and print all."""
  folder = Path(FOLDER.value)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 40_000)
  if ONLY.value:
    compile_one(*ONLY.value.split(":"))
    return
  names = ["search", "pretrain", "position_recall"]
  if PASSAGES.value:
    names += [*(["encoder"] if EMBEDDER.value else []), *(["rag", "refrag"] if MODEL.value else [])]
  print(f"{'chip':6}{'program':42}{'mesh':>10}{'GiB':>8}{'of':>5}{'spare':>7}  fits   compiled in")
  missed = 0
  for chip in CHIPS:
    for name in names:
      if not (folder / f"{name}_{chip}.json").exists():
        command = [sys.executable, *sys.argv, f"--only={name}:{chip}"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
          missed += 1
          print(f"{chip:6}{name:42}not compiled: {' '.join(ended.stderr.split())[-200:]}", flush=True)
          continue
      missed += print_plan(name, chip)
  print("all fit, with a tenth of the memory to spare" if not missed else f"{missed} do not fit or were not compiled")
  sys.exit(bool(missed))


if __name__ == "__main__":
  app.run(main)

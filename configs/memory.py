"""Phase 2 of the Self-RAG memory: the model learns to read the chunks that it retrieves, and to embed them.

  python launch/train.py --config=configs/memory.py                                   phases 1 and 2, from scratch
  python launch/eval.py --config=configs/memory.py                                    scores the model of each phase
  python launch/train.py --config=configs/memory.py --config.init=runs/pretrain_kv    from phase 1's model there

Each step clears the memory, writes the chunks of its own contexts, retrieves for each question, puts the retrieved
chunks before it, and learns from the answers and from a contrastive loss over all chunks of the batch, on all devices.
"""

from typing import Any

import ml_collections

from configs import pretrain


def get_config(variant: str = "kv") -> ml_collections.ConfigDict:
  """Return the config of a variant of the facts."""
  return pretrain.of_phases(differences(variant))


def differences(variant: str) -> dict[str, Any]:
  """Return how the config differs from the defaults."""
  return pretrain.differences(variant) | {
    "workdir": f"runs/memory_{variant}",
    "memory": phase(variant, pretrain.STEPS[variant].memory, pretrain.NEEDED[variant].memory),
  }


def phase(variant: str, steps: int, needed_loss: float = 0.0) -> dict[str, Any]:
  """Return the settings of a phase over contexts. It uses AdamW: at Muon's rates, a model forgets how to read."""
  return {
    "steps": steps,
    "batch_size": 32 if variant in pretrain.ONE_QUESTION else 8,  # contexts
    "needed_loss": needed_loss,
    "optimizer": pretrain.optimizer("adamw", 2e-3),
  }

"""Position recall: a small language model with a memory answers from any position of a long input.

  python launch/eval.py --config=configs/position_recall.py             names and codes, "Ada Baker: amber"
  python launch/eval.py --config=configs/position_recall.py:sentence    any variant of selfrag_jax/tasks/facts.py

Three phases, from scratch: `pretrain` on text of facts and questions, `memory` with retrieval from the model's own
memory and a contrastive loss, `position_recall` with questions about every position alike. Three models of the same
size and with the same first phase then learn from long lists to recall with the whole context before them (free recall
and running span), and all conditions answer the same questions.
`launch/train.py` with this config trains the three phases and stops there.
"""

import ml_collections

from configs import memory, pretrain


def get_config(variant: str = "kv") -> ml_collections.ConfigDict:
  """Return the config of a variant of the facts."""
  config = memory.get_config(variant)
  config.experiment = "position_recall"
  config.workdir = f"runs/position_recall_{variant}"
  config.position_recall = memory.phase(steps=100, batch_size=8)
  config.full_context = {
    "text": ((16,), (64,), (64, 16)),  # free recall of all facts, and a running span of the last 16
    "models": pretrain.MODELS,
    "steps": 150,
    "batch_size": 16,
    "valid_rows": 64,
    **pretrain.optimizer(),
  }
  config.evaluation = {"n_facts": (64, 1024), "questions": (200, 32), "depths": 16, "tokens": 16_384}
  return config

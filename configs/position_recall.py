"""Position recall: a small language model with a memory answers from any position of a long input.

  python launch/eval.py --config=configs/position_recall.py             names and codes, "Ada Baker: amber"
  python launch/eval.py --config=configs/position_recall.py:sentence    any variant of selfrag_jax/tasks/facts.py
  python launch/eval.py --config=configs/position_recall.py:documents --data=FOLDER
                                                                        real documents, with any checkpoint

Three phases, from scratch: `pretrain` on text of facts and questions (before whole sentences, `pairs` on names and
codes), `memory` with retrieval from the model's own memory and a contrastive loss, `position_recall` with questions
spread evenly over the positions. Three full-context models of the same size and with the same pretraining then learn
recall from long lists (free recall and running span), and all conditions answer the same questions.
150,168 parameters; 20 to 22 minutes on one core beside other work, 7 to 14 without the three models.
Expect an accuracy of 0.99 to 1.00 with the memory among 64 facts, of 0.94 to 1.00 among 1,024 (names and codes, seeds
10 to 19). configs/headlines.py runs it on fresh seeds, on which nothing was tuned.
`launch/train.py` with this config trains the three phases and stops there.
"""

import ml_collections

from configs import memory, pretrain
from selfrag_jax.experiments import documents, position_recall
from selfrag_jax.settings import full_config


def get_config(variant: str = "kv") -> ml_collections.ConfigDict:
  """Return the config of a variant of the facts, or of real documents."""
  if variant == "documents":
    return of_documents()
  differences = memory.differences(variant) | {
    "experiment": "position_recall",
    "workdir": f"runs/position_recall_{variant}",
    "position_recall": memory.phase(variant, pretrain.STEPS[variant].position_recall),
    "full_context": {
      "models": pretrain.MODELS,
      "steps": 150,
      "batch_size": 16,
      "valid_rows": 64,
      "optimizer": pretrain.optimizer("adamw", 1e-3),
    },
  }
  return full_config(position_recall.sections(differences), differences, position_recall.UNUSED)


def of_documents() -> ml_collections.ConfigDict:
  """Return the config of recall by position on the files of "Lost in the Middle" (arXiv 2307.03172)."""
  differences = {
    "experiment": "documents",
    "workdir": "runs/documents",
    "model": "smollm2-135m",  # or a Hugging Face folder, or organisation/name; it must chat
  }
  return full_config(documents.SECTIONS, differences)

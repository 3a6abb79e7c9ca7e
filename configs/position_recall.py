"""Position recall: a small language model with a memory answers from any position of a long input.

  python launch/eval.py --config=configs/position_recall.py             names and codes, "Ada Baker: amber"
  python launch/eval.py --config=configs/position_recall.py:sentence    any variant of selfrag_jax/tasks/facts.py
  python launch/eval.py --config=configs/position_recall.py:documents --data=FOLDER
                                                                        real documents, with any checkpoint

Three phases, from scratch: `pretrain` on text of facts and questions, `memory` with retrieval from the model's own
memory and a contrastive loss, `position_recall` with questions about every position alike. Three models of the same
size and with the same first phase then learn from long lists to recall with the whole context before them (free recall
and running span), and all conditions answer the same questions.
150,168 parameters. configs/headlines.py runs it on seeds that served for nothing else.
`launch/train.py` with this config trains the three phases and stops there.
"""

import ml_collections

from configs import memory, pretrain


def get_config(variant: str = "kv") -> ml_collections.ConfigDict:
  """Return the config of a variant of the facts, or of real documents."""
  if variant == "documents":
    return documents()
  config = memory.get_config(variant)
  config.experiment = "position_recall"
  config.workdir = f"runs/position_recall_{variant}"
  config.position_recall = memory.phase(variant, pretrain.STEPS[variant].position_recall)
  config.full_context = {
    "text": ((16,), (64,), (64, 16)),  # free recall of all facts, and a running span of the last 16
    "models": pretrain.MODELS,
    "steps": 150,
    "batch_size": 16,
    "valid_rows": 64,
    **pretrain.optimizer("adamw", 1e-3),
  }
  config.evaluation = {
    "n_facts": (64, 1024),
    "questions": (200, 64),  # at each depth of each length
    "full_questions": (200, 6),  # of them, for readers of the whole context, which takes them long
    "depths": 16,
    "tokens": 16_384,  # read at once
  }
  return config


def documents() -> ml_collections.ConfigDict:
  """Return the config of recall by position on the files of "Lost in the Middle" (arXiv 2307.03172)."""
  return ml_collections.ConfigDict(
    {
      "experiment": "documents",
      "workdir": "runs/documents",
      "model": "smollm2-135m",  # or a Hugging Face folder, or organisation/name; it must chat
      "data": {"path": ""},
      "documents": {
        "n_documents": (5, 10, 20),
        "positions": 5,  # of the document that answers, evenly from the first place to the last
        "questions": 100,  # of each file
        "top_k": 2,  # documents that the memory shows
        "max_new_tokens": 100,  # a key and its value take 90
        "batch_size": 2,
      },
    }
  )

"""RAG fine-tuning: a model learns to answer from retrieved documents, and to say so where they do not answer.

  python launch/train.py --config=configs/rag.py                  a Transformer + Mamba-2 hybrid from scratch
  python launch/train.py --config=configs/rag.py:transformer      attention only, of the same size
  python launch/train.py --config=configs/rag.py:mamba            Mamba-2 only, of the same size
  python launch/train.py --config=configs/rag.py --config.rag.documents=shuffled    a control; `none` is another

The embedded task asks about countries that do not exist, each question beside the five documents that BM25 finds for
it in its own world. Phase `pretrain` reads whole conversations, from which a fresh model learns to copy; phase `rag`
learns the answers alone. The report asks about names and in wordings that never occurred in training: with the
documents, without, with those of another question, with changed facts (the answer should follow), and where the one
that answers is missing (the answer should be "I don't know").
"""

import ml_collections

from configs.pretrain import MODELS, optimizer, tiny_model
from selfrag_jax.experiments import rag
from selfrag_jax.settings import full_config


def get_config(variant: str = "hybrid") -> ml_collections.ConfigDict:
  """Return the config of a variant: hybrid, transformer or mamba."""
  if variant not in MODELS:
    raise ValueError(f"configs/rag.py has no variant {variant!r}; one of {', '.join(MODELS)}")
  differences = {
    "experiment": "rag",
    "seed": 0,
    "workdir": f"runs/rag_{variant}",
    "init": "",
    "data": {"name": "countries"},
    "model": tiny_model(variant, d_model=64, n_heads=2),
    "pretrain": {"steps": 1000, "batch_size": 16, "max_tokens": 224, "optimizer": optimizer()},
    "rag": {"steps": 500, "batch_size": 16, "max_tokens": 224, "optimizer": optimizer(learning_rate=5e-3)},
    "loop": {"checkpoint_every": 100, "eval_every": 100, "log_every": 20},
  }
  return full_config(rag.SECTIONS, differences)

"""Contrastive training of a text encoder: all-MiniLM-L6-v2 learns the questions of a collection.

  python launch/train.py --config=configs/encoder.py --config.data.path=FOLDER   trains, then compares
  python launch/eval.py --config=configs/encoder.py --data=FOLDER                compares again, from the checkpoints
  python launch/train.py --config=configs/encoder.py:smollm2_135m --config.data.path=FOLDER

On half of SQuAD's development set it took 15 to 34 minutes on CPU cores beside other work, and nDCG@10 on held-out
articles rose from 0.801 to 0.836, 0.836 and 0.838 (seeds 0 to 2).
The folder has the layout of BEIR; without a folder `qrels`, its titles are split into training, validation and test.
Each query is contrasted with the documents of the other queries, on all devices, and with a hard negative of BM25;
`--config.encoder.batch_size=1024 --config.encoder.accumulate=16` reads 64 queries with their documents at once, and
contrasts all.
`WORKDIR/encoder` holds the trained encoder, for `DenseRetriever(model_name=...)` and for sentence-transformers.

`smollm2_135m` trains a language model to embed and to write, by both losses on the same documents: one set of weights
writes a query, embeds it, and reads what it finds. `--config.encoder.contrastive_weight=0` is the control.
`--config.data.unlabelled=FOLDER,FOLDER` also learns the passages of collections that have no questions (a folder with a
corpus.jsonl each): a sentence that is taken out of a passage asks for the rest. docs/retrieval.md has what three
seeds gained by it, on two collections.
"""

from typing import Any

import ml_collections

from selfrag_jax.experiments import encoder
from selfrag_jax.settings import full_config


def get_config(variant: str = "minilm") -> ml_collections.ConfigDict:
  """Return the config of a variant: minilm or smollm2_135m."""
  if variant not in ("minilm", "smollm2_135m"):
    raise ValueError(f"configs/encoder.py has the variants minilm and smollm2_135m, not {variant!r}")
  differences = {
    "experiment": "encoder",
    "workdir": "runs/encoder",
    "seed": 0,  # draws the order of the examples
    "init": "all-MiniLM-L6-v2",
    "encoder": {"steps": 140, "optimizer": adamw(5e-5, warmup_steps=10)},
    "loop": {"eval_every": 35},
  }
  if variant == "smollm2_135m":
    section = {"steps": 60, "batch_size": 16, "query_tokens": 48, "document_tokens": 160, "language_weight": 1.0}
    differences |= {
      "workdir": "runs/encoder_smollm2_135m",
      "init": "smollm2-135m",
      # few titles are learned by heart, and the perplexity of other texts rises: most are for training
      "data": {"parts": {"train": 0.92, "valid": 0.06, "test": 0.02}},
      "encoder": {**section, "optimizer": adamw(5e-5, warmup_steps=10)},
      "loop": {"checkpoint_every": 20},
    }
  return full_config(encoder.SECTIONS, differences)


def adamw(learning_rate: float, warmup_steps: int) -> dict[str, Any]:
  """Return how the optimizer of pretrained encoders differs from the default."""
  schedule = {"schedule": "linear", "warmup_steps": warmup_steps}
  return {"learning_rate": learning_rate, "b2": 0.999, "weight_decay": 0.01, **schedule}

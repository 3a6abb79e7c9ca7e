"""Contrastive training of a text encoder: all-MiniLM-L6-v2 learns the questions of a collection.

  python launch/train.py --config=configs/encoder.py --config.data.path=FOLDER   trains, then compares
  python launch/eval.py --config=configs/encoder.py --data=FOLDER                compares again, from the checkpoints

On half of SQuAD's development set it took 15 to 34 minutes on CPU cores beside other work, and nDCG@10 on held-out
articles rose from 0.801 to 0.836, 0.836 and 0.838 (seeds 0 to 2).
The folder has the layout of BEIR; without a folder `qrels`, its titles are split into training, validation and test.
Each query is contrasted with the documents of the other queries, on all devices, and with a hard negative of BM25;
`--config.encoder.batch_size=1024 --config.encoder.chunk=64` embeds 64 rows at a time, with the whole batch's gradient.
`WORKDIR/encoder` holds the trained encoder, for `DenseRetriever(model_name=...)` and for sentence-transformers.
"""

from typing import Any

import ml_collections

from selfrag_jax.experiments import encoder
from selfrag_jax.settings import full_config


def get_config() -> ml_collections.ConfigDict:
  """Return the config."""
  differences = {
    "experiment": "encoder",
    "workdir": "runs/encoder",
    "seed": 0,  # draws the order of the examples
    "init": "all-MiniLM-L6-v2",
    "encoder": {"steps": 140, "optimizer": adamw(5e-5, warmup_steps=10)},
    "loop": {"eval_every": 35},
  }
  return full_config(encoder.SECTIONS, differences)


def adamw(learning_rate: float, warmup_steps: int) -> dict[str, Any]:
  """Return how the optimizer of pretrained encoders differs from the default."""
  schedule = {"schedule": "linear", "warmup_steps": warmup_steps}
  return {"learning_rate": learning_rate, "b2": 0.999, "weight_decay": 0.01, **schedule}

"""Contrastive training of a text encoder: all-MiniLM-L6-v2 learns the questions of a collection.

  python launch/train.py --config=configs/encoder.py --config.data.path=FOLDER

The folder has the layout of BEIR; where it has no `qrels/train.tsv`, titles are dealt to training, validation and test.
Each query is contrasted with the documents of the others, on all devices, and with a hard negative that BM25 found;
`--config.encoder.batch_size=1024 --config.encoder.chunk=64` embeds 64 rows at a time with the gradient of all.
The trained encoder is `WORKDIR/encoder`, for `DenseRetriever(model_name=...)` and for sentence-transformers.
"""

from typing import Any

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Return the config."""
  return ml_collections.ConfigDict(
    {
      "experiment": "encoder",
      "workdir": "runs/encoder",
      "seed": 0,  # of the order of the examples
      "mesh": (-1, 1, 1),
      "init": "all-MiniLM-L6-v2",
      "data": split_titles(),
      "encoder": {
        "steps": 140,
        "batch_size": 32,
        "hard_negatives": 1,
        "query_tokens": 32,
        "document_tokens": 192,
        "temperature": 0.05,  # what MiniLM was trained with
        "chunk": 0,
        **adamw(5e-5, warmup_steps=10),
      },
      "loop": {"checkpoint_every": 50, "eval_every": 35, "log_every": 1},
    }
  )


def split_titles() -> dict[str, Any]:
  """Return the section of judged queries: a folder, the shares of its titles, and the seed of their deal."""
  return {"path": "", "parts": {"train": 0.5, "valid": 0.1, "test": 0.4}, "seed": 0}


def adamw(learning_rate: float, warmup_steps: int) -> dict[str, Any]:
  """Return the section of the optimizer of pretrained encoders."""
  schedule = {"schedule": "linear", "warmup_steps": warmup_steps}
  return {"optimizer": {"name": "adamw", "learning_rate": learning_rate, "b2": 0.999, "weight_decay": 0.01, **schedule}}

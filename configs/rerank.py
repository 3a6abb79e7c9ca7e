"""Training of a reranker: a small cross-encoder reorders the first 50 documents of BM25.

  python launch/train.py --config=configs/rerank.py --config.data.path=FOLDER   trains, then compares
  python launch/eval.py --config=configs/rerank.py --data=FOLDER                compares again, from the checkpoints

On half of SQuAD's development set it took two hours on one CPU core beside other work, the comparison about 50 minutes
of them; nDCG@10 on held-out articles is 0.905 for BM25, 0.868, 0.882 and 0.903 for the cross-encoder alone (seeds 0 to
2), and 0.920, 0.919 and 0.918 for both scores.
The folder has the layout of BEIR; without a folder `qrels`, its titles are split into training, validation and test.
It starts from all-MiniLM-L6-v2 or from `--config.init=WORKDIR/encoder`. `WORKDIR/reranker` holds the reranker, for
`RerankRetriever("bm25", "cross-encoder", reranker_settings={"model_name": ...}, weight=...)`, with the report's weight.
"""

import ml_collections

from configs.encoder import adamw
from selfrag_jax.experiments import rerank
from selfrag_jax.settings import full_config


def get_config() -> ml_collections.ConfigDict:
  """Return the config."""
  differences = {
    "experiment": "rerank",
    "workdir": "runs/rerank",
    "seed": 0,  # draws the head and the order of the examples
    "init": "all-MiniLM-L6-v2",
    "rerank": {"steps": 400, "optimizer": adamw(5e-5, warmup_steps=40)},
    "loop": {"checkpoint_every": 100, "eval_every": 100},
  }
  return full_config(rerank.SECTIONS, differences)

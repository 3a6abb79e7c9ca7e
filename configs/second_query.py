"""Searching twice with a trained encoder of queries: it reads the question and the first passage.

  python launch/train.py --config=configs/second_query.py --config.data.path=FOLDER --config.data.test_path=OTHER
  python launch/eval.py --config=configs/second_query.py --config.data.path=FOLDER --config.data.test_path=OTHER

Trains all-MiniLM-L6-v2 on the questions of FOLDER, whose answers need several passages, and reports on those of OTHER,
both in the layout of BEIR. The vectors of the passages stay as they are. Compared are one search, two whose second
query has the new names of the best passage, and two whose second query is that passage, before and after the training;
every search returns ten passages in all.
`WORKDIR/encoder` holds the trained encoder: `DenseRetriever(query_model=...)` in
`MultiHopRetriever(write_query="add_passage")`.
"""

import ml_collections

from configs.encoder import adamw
from selfrag_jax.experiments import second_query
from selfrag_jax.settings import full_config


def get_config() -> ml_collections.ConfigDict:
  """Return the config."""
  section = {"steps": 80, "batch_size": 16, "query_tokens": 256, "trained": "queries"}
  differences = {
    "experiment": "second_query",
    "workdir": "runs/second_query",
    "seed": 0,  # draws the order of the examples
    "init": "all-MiniLM-L6-v2",
    "second_query": {**section, "optimizer": adamw(2e-5, warmup_steps=10)},
    "loop": {"eval_every": 20},
  }
  return full_config(second_query.SECTIONS, differences)

"""Comparison of retrievers on a judged collection in the layout of BEIR: the quality of the rankings and the speed.

  python launch/eval.py --config=configs/retrieval.py --config.data.path=FOLDER
  python launch/eval.py --config=configs/retrieval.py --data=FOLDER --config.retrievers.bm25.k1=0.9
  python launch/eval.py --config=configs/retrieval.py:words --data=FOLDER         retrievers without weights
  python launch/eval.py --config=configs/retrieval.py --data=FOLDER --min bm25.ndcg@10=0.78

Writes retrieval.json (`NAME.ndcg@10`, `.recall@k`, `.mrr@10`, `.all_gold@10`, `.ms_per_query`), a CSV and a figure.
With 1,000 passages and 100 queries it takes a minute on two CPU cores, most of it for the embeddings. A retriever of
your own: register it in a module, and name both, `--config.plugins="('my_module',)"` and `config.retrievers.mine`.
Retrievers of the same model share the model and the passages' vectors: the time to embed the passages is part of the
first one's `.index_seconds`.
`--config.baseline=hybrid_rrf` compares all with that retriever, by paired intervals, instead of with the first.
"""

import ml_collections

from selfrag_jax.experiments import retrieval
from selfrag_jax.settings import full_config

WORDS = {
  "bm25": {"type": "bm25", "k1": 1.5, "b": 0.75},
  "bm25_twice": {"type": "multi_hop", "retriever": "bm25", "hops": 2},
  "simple": {"type": "simple"},
  "token_bag": {"type": "dense", "model_name": "token-bag"},
}
EMBEDDED = {
  "minilm": {"type": "dense", "model_name": "all-MiniLM-L6-v2", "backend": "exact"},
  "hybrid": {"type": "hybrid", "retrievers": ("bm25", "dense"), "fusion": "weighted"},
  "hybrid_rrf": {"type": "hybrid", "retrievers": ("bm25", "dense"), "fusion": "rrf", "rrf_k": 60},
  "hybrid_twice": {"type": "multi_hop", "retriever": "hybrid", "hops": 2},
}


def get_config(variant: str = "all") -> ml_collections.ConfigDict:
  """Return the config of a variant: `all`, or `words` for the retrievers without weights."""
  if variant not in ("all", "words"):
    raise ValueError(f"configs/retrieval.py has the variants all and words, not {variant!r}")
  differences = {
    "experiment": "retrieval",
    "workdir": f"runs/retrieval_{variant}",
    "plugins": (),
    "retrievers": WORDS if variant == "words" else WORDS | EMBEDDED,
    "baseline": "",  # the retriever that the others are compared with, by paired intervals; empty: the first
    "queries": 0,  # how many to ask, from the first one on; 0: all
    "ks": retrieval.KS,
    "batch_size": 32,  # queries asked at once
  }
  return full_config(retrieval.SECTIONS, differences)

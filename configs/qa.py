"""Question answering by a chat model, beside what several retrievers find: answers, passages, citations, claims.

  python launch/eval.py --config=configs/qa.py --data=FOLDER                                HotpotQA
  python launch/eval.py --config=configs/qa.py:squad --data=FOLDER --config.qa.cite=True    SQuAD 2.0
  python launch/eval.py --config=configs/qa.py --data=FOLDER --config.model=WORKDIR --config.qa.as_text=False

FOLDER holds the official files of the data set; the passages of all its questions are the corpus that is searched.
WORKDIR is a run of configs/rag.py:smollm2_135m. Every arm asks the same questions by greedy decoding. Writes qa.json
(EM, F1, retrieval, supporting facts, citations, claims, abstention, tokens and searches of each arm, with paired
differences to `config.baseline`), qa.csv, qa.npz and qa.png.
"""

import ml_collections

from selfrag_jax.experiments import qa
from selfrag_jax.settings import full_config

DATA = {"hotpotqa": "hotpotqa", "musique": "musique", "squad": "squad_v2"}


def get_config(variant: str = "hotpotqa") -> ml_collections.ConfigDict:
  """Return the config of a variant: hotpotqa, musique or squad."""
  if variant not in DATA:
    raise ValueError(f"configs/qa.py has no variant {variant!r}; one of {', '.join(DATA)}")
  differences = {
    "experiment": "qa",
    "workdir": f"runs/qa_{variant}",
    "model": "smollm2-135m",  # or a workdir of a fine-tuned model
    "data": {"data_set": DATA[variant]},
    # the arms: passages of a retriever with its settings, `gold` passages, or `none`
    "arms": {
      "none": {"type": "none"},
      "bm25": {"type": "bm25"},
      "bm25_twice": {"type": "multi_hop", "retriever": "bm25", "hops": 2},
      "gold": {"type": "gold"},
    },
    "baseline": "none",
  }
  return full_config(qa.SECTIONS, differences)

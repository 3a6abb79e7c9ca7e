"""The headline experiments on fresh seeds; all runs, one after the other, take about nine hours of one CPU core.

  python launch/eval.py --config=configs/headlines.py                       position recall and REFRAG
  python launch/eval.py --config=configs/headlines.py:position_recall       position recall alone
  python launch/eval.py --config=configs/headlines.py:refrag
  python launch/eval.py --config=configs/headlines.py:refrag_mamba          one group of runs
  python launch/eval.py --config=configs/headlines.py:rag                   RAG fine-tuning on invented countries
  python launch/eval.py --config=configs/headlines.py:rerank --data=FOLDER  the reranker, on a BEIR folder

Every run uses the config of that name and has a folder of its own. A stopped run is resumed; of a finished run, only
the report is read. `sweep.json`, `.csv` and `.png` have medians and ranges.
The recipes of position recall and REFRAG were tuned on the seeds 0 to 5, the reranker's on seed 0. Whole sentences have
failed twice on fresh seeds (11 to 13, then 30), the variants with one question per list three times (10, 20, 30),
`needle_multi_value`, `paraphrase` and `two_fact` a fourth time (40), `conflict` as it is now on 60, `:mamba` of REFRAG
once (20 to 22), countries on 10, 20, 30, 31, 33, 36 and 40: these seeds served for tuning then, as 0 and 1 did for
countries, and the runs below are on others, but for the reranker's seed 0.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections

from configs import position_recall, rag, refrag, rerank
from configs.pretrain import PAIRS
from selfrag_jax.experiments import sweep
from selfrag_jax.settings import full_config
from selfrag_jax.tasks.facts import WORDINGS

# the seeds, and the number of seeds that also train the full-context models, which takes twice as long
RECALL = {variant: ((10 if variant in PAIRS else 60,), 0) for variant in WORDINGS}
RECALL |= {"kv": (range(10, 20), 3), "sentence": (range(40, 45), 1), "conflict": ((70,), 0)}
RERANK = range(3)
COUNTRIES = {"hybrid": range(41, 44), "transformer": (41,), "mamba": (41,)}
SEARCH = {"hybrid": range(20, 30), "transformer": range(20, 23), "mamba": range(30, 33)}


def get_config(which: str = "all") -> ml_collections.ConfigDict:
  """Return the config of one group of runs, of an experiment's groups, or of position recall and REFRAG."""
  recall, search, ranking = _recall_runs(), _search_runs(), _rerank_runs()
  countries = _of_models("rag", rag.get_config, COUNTRIES)
  variants = {"all": recall | search, "position_recall": recall, "refrag": search, "rag": countries}
  variants |= {group: {group: runs} for group, runs in (recall | search | ranking | countries).items()}
  if which not in variants:
    raise ValueError(f"configs/headlines.py has the variants {', '.join(variants)}, not {which!r}")
  return full_config(sweep.SECTIONS, {"experiment": "sweep", "workdir": "runs/headlines", "runs": variants[which]})


def _recall_runs() -> dict[str, Any]:
  groups: dict[str, Any] = {}
  for variant, (seeds, with_readers) in RECALL.items():
    runs = groups[f"position_recall_{variant}"] = {}
    for i, seed in enumerate(seeds):
      config: Any = _seeded(position_recall.get_config(variant), seed)
      runs[f"seed{seed}"] = config
      if i >= with_readers:
        config.full_context.models = {}
      if variant not in ("kv", "sentence"):
        config.evaluation.update({"n_facts": (64,), "questions": (200,), "full_questions": (200,)})
  return groups


def _search_runs() -> dict[str, Any]:
  return _of_models("refrag", refrag.get_config, SEARCH)


def _of_models(
  name: str, make: Callable[[str], ml_collections.ConfigDict], seeds: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
  return {
    f"{name}_{variant}": {f"seed{seed}": _seeded(make(variant), seed) for seed in chosen}
    for variant, chosen in seeds.items()
  }


def _rerank_runs() -> dict[str, Any]:
  runs = {f"seed{seed}": rerank.get_config() for seed in RERANK}
  for seed, config in zip(RERANK, runs.values(), strict=True):
    config.seed = seed  # the split by title is the same: the runs are asked the same questions
  return {"rerank": runs}


def _seeded(config: ml_collections.ConfigDict, seed: int) -> ml_collections.ConfigDict:
  config.update({"seed": seed, "data": {"seed": seed}})
  return config

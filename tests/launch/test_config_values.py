"""Every number of every config: for any value, the config is built, or refused in a line that names the key."""

import copy
import importlib
import inspect
from pathlib import Path

import pytest

from selfrag_jax.experiments import gradient_rag, rag, ranking, refrag, reward_model, search, self_rag
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.settings import settings

CONFIGS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs").glob("*.py") if path.stem != "__init__")
VARIANTS = {
  "encoder": ("minilm", "smollm2_135m"),
  "gradient_rag": ("rulebook", "pipeline", "router", "program", "bbh"),
  "memory": ("kv", "text"),
  "headlines": ("all",),
  "position_recall": ("kv", "documents"),
  "qa": ("hotpotqa",),
  "pretrain": ("sentence", "text", "hybrid_1b_v5e256"),
  "rag": ("hybrid", "smollm2_135m"),
  "refrag": ("hybrid", "smollm2_135m", "llama3_8b_v5p256"),
  "retrieval": ("all",),
  "reward_model": ("hybrid", "smollm2_135m"),
  "search": ("here",),
}
ODD = [0, -1, float("nan"), float("inf"), 10**30, "x"]


class Built(Exception):
  """The config was read, and what takes time would begin."""


def configs():
  for name in CONFIGS:
    get_config = importlib.import_module(f"configs.{name}").get_config
    takes_variant = bool(inspect.signature(get_config).parameters)
    for variant in VARIANTS[name] if takes_variant else (None,):
      yield f"{name}:{variant}", get_config(variant).to_dict() if variant else get_config().to_dict()


def numbers(value, path=()):
  """Yield the places of all numbers."""
  items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple | list) else ()
  for key, item in items:
    if type(item) in (int, float):
      yield (*path, key)
    yield from numbers(item, (*path, key))


def changed(value, path, new):
  if not path:
    return new
  key, *rest = path
  if isinstance(value, dict):
    return {**value, key: changed(value[key], rest, new)}
  return tuple(changed(item, rest, new) if place == key else item for place, item in enumerate(value))


CASES = [(name, config) for name, config in configs()]


@pytest.fixture
def no_work(monkeypatch):
  """End a build where its config has been read."""

  def built(*_, **__):
    raise Built

  for module in (rag, ranking, refrag, reward_model, search, self_rag):
    monkeypatch.setattr(module, "make_mesh", built)
  monkeypatch.setattr(gradient_rag, "make_task", built)


@pytest.mark.parametrize(("name", "config"), CASES, ids=[name for name, _ in CASES])
def test_an_odd_number_is_built_or_refused_by_name(no_work, name, config):
  experiment_name = config["experiment"]
  module = importlib.import_module(f"selfrag_jax.experiments.{experiment_name}")
  places = list(numbers(config))
  assert places
  if experiment_name == "sweep":  # the runs are alike
    group, runs = next(iter(config["runs"].items()))
    places = [place for place in places if place[1:3] == (group, next(iter(runs)))]
    assert places
  for place in places:
    for value in ODD:
      case = changed(copy.deepcopy(config), list(place), value)
      message = refusal(module, case)
      if message is None:
        if "model" in place or "models" in place or "retrievers" in place:
          continue  # a model is checked when it is made, a retriever by itself
        assert value != "x", (place, value)
        assert value == value, (place, value)
        assert value != float("inf"), (place, value)
        assert (place[-1], value) not in {("batch_size", 0), ("steps", -1), ("seed", -1), ("seed", 10**30)}
      else:
        key = next(str(part) for part in reversed(place) if isinstance(part, str))
        assert key in message or "config.data.path is empty" in message, (place, value, message)
        assert "\n" not in message
        assert len(message) < 400, message


def refusal(module, config):
  try:
    module.build(config)
  except Built:
    return None
  except ValueError as error:
    return str(error)
  raise AssertionError("nothing can be built in this test")


@pytest.mark.parametrize(("name", "config"), [case for case in CASES if isinstance(case[1].get("model"), dict)])
def test_an_odd_number_of_a_model_is_taken_or_refused_by_name(name, config):
  section = {"vocab_size": 128, **config["model"], "dtype": "float32", "matmul_dtype": None}
  for (key,) in numbers(section):
    for value in ODD:
      message = None
      try:
        settings(ModelConfig, {**section, key: value}, "model")
      except ValueError as error:
        message = str(error)
      if message is None:
        assert value not in ("x", float("inf")), key
        assert value == value, key
      else:
        assert message.startswith("config.model"), message
        assert key in message or "head" in message, (key, value, message)  # widths of heads follow from others

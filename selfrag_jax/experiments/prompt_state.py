"""The saved state of a prompt optimization, and the checks of a state that was read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from selfrag_jax.tasks.prompt_tasks import Text

NEW_FOLDER = "give another --workdir, or delete it"


def begin(config: Mapping[str, Any], texts: Sequence[Text]) -> dict[str, Any]:
  """Return the state before the first step; the texts have no score yet."""
  values = [text.initial for text in texts]
  return {
    "config": json.loads(json.dumps(config)),
    "step": 0,
    "texts": values,
    "seconds": 0.0,
    "history": [{"step": -1, "texts": values, "valid": None}],
    "optimizer": {key: [[] for _ in values] for key in ("memory", "versions")},
  }


def without_limits(config: Mapping[str, Any]) -> dict[str, Any]:
  """Return a config without its steps, its budget and the names of its keys: a resumed run may change these."""
  engines = {
    part: {name: x for name, x in engine.items() if name != "api_key_env"} for part, engine in config["engines"].items()
  }
  return {**config, "engines": engines, "optimizer": {**config["optimizer"], "steps": None}, "budget": None}


def read_json(path: epath.PathLike) -> dict[str, Any]:
  """Read a JSON object. Raises ValueError for any other content."""

  def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")

  try:
    found = json.loads(epath.Path(path).read_bytes(), parse_constant=refuse)
  except RecursionError:
    raise ValueError("it is nested too deeply") from None
  if not isinstance(found, dict):
    raise ValueError(f"an object was expected, not {type(found).__name__}")
  return found


def check_state(state: dict[str, Any], n_texts: int) -> dict[str, Any]:
  """Check and return a state that was read. Raises ValueError, naming the field, for a state that no run writes."""
  _expect(state, "it", {"config": dict, "step": int, "texts": list, "seconds": (int, float), "history": list})
  _expect(state, "it", {"optimizer": dict})
  _expect(state["config"], "config", {"engines": dict, "optimizer": dict})
  for part, engine in state["config"]["engines"].items():
    _check(isinstance(engine, dict), f"config.engines.{part}")
  _check(state["step"] == len(state["history"]) - 1 >= 0, "step")
  _check_texts(state["texts"], n_texts, "texts")
  _expect(state["optimizer"], "optimizer", {"memory": list, "versions": list})
  for name in ("memory", "versions"):
    _check(len(state["optimizer"][name]) == n_texts, f"optimizer.{name}")
    for kept in state["optimizer"][name]:
      _check(isinstance(kept, list), f"optimizer.{name}")
      _check_texts(kept, len(kept), f"optimizer.{name}")
  for i, row in enumerate(state["history"]):
    where = f"history[{i}]"
    _check(isinstance(row, dict), where)
    _expect(row, where, {"step": int, "texts": list, "valid": (int, float)})
    _check_texts(row["texts"], n_texts, f"{where}.texts")
    if i > 0:
      _expect(row, where, {"right": int, "cases": int, "accepted": (bool, type(None))})
      _check(row["cases"] > 0, f"{where}.cases")
    if "candidates" in row:
      _expect(row, where, {"delta": (int, float, type(None)), "critiques": list, "past": list, "accepted": bool})
      _check_texts(row["candidates"], n_texts, f"{where}.candidates")
      for name in ("critiques", "past"):
        _check(len(row[name]) == n_texts, f"{where}.{name}")
        for lines in row[name]:
          _check(isinstance(lines, list) and all(isinstance(line, str) for line in lines), f"{where}.{name}")
  return state


def _check_texts(texts: Any, n: int, where: str) -> None:
  _check(isinstance(texts, list) and len(texts) == n and all(isinstance(text, str) for text in texts), where)


def _expect(record: Mapping[str, Any], where: str, kinds: Mapping[str, Any]) -> None:
  for name, kind in kinds.items():
    _check(name in record, f"{where} lacks {name}:")
    is_kind = isinstance(record[name], kind) and (kind is not int or record[name] is not True)
    _check(is_kind, f"{where}.{name}" if where != "it" else name)


def _check(is_right: bool, what: str) -> None:
  if not is_right:
    raise ValueError(f"{what} is not what a run writes")

"""Records of critiques, new and found again, and their form as lines of a file."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np

HEAD = b'{"id": "'  # the beginning of every line


@dataclasses.dataclass(frozen=True)
class Critique:
  """A critique, and the sample, output and score that it is about."""

  role: str  # of the variable
  text: str
  sample: str = ""
  output: str = ""
  target: str = ""
  score: float | None = None
  run: str = ""
  step: int = 0
  epoch: int = 0
  tokens: int = 0  # of the text, estimated
  value_hash: str = ""  # of the variable's text


@dataclasses.dataclass(frozen=True)
class PastCritique:
  """A critique that a search has found again; `read()` and `text` read it from the disk."""

  id: str
  similarity: float
  count: int  # how often it was given, near duplicates counted
  accepted: bool | None  # whether the change that followed was accepted; None: not known
  delta: float | None  # the change of the validation score
  uses: int  # how often it was shown again
  helped: int  # how often the change after that was for the better
  run: str
  step: int
  vector: np.ndarray  # f32 [D] of the critique
  read: Callable[[], Critique]

  @property
  def text(self) -> str:
    """The critique, read from the disk."""
    return self.read().text


def write_line(id: str, critique: Critique) -> bytes:
  """Return a critique as a line of a file."""
  text = json.dumps({"id": id, **dataclasses.asdict(critique)}, ensure_ascii=False, default=_number) + "\n"
  return text.encode("utf-8", "replace")  # UTF-8 cannot hold half of a surrogate pair


def _number(value: Any) -> Any:
  """Return a number of numpy or JAX as Python's. Raises TypeError for anything else."""
  if callable(getattr(value, "item", None)):
    return value.item()
  raise TypeError(f"a critique holds {type(value).__name__}; its parts are texts and numbers")


def parse_line(line: bytes) -> tuple[str, Critique]:
  """Return the id and the critique of a line. Raises ValueError for anything else."""
  try:
    facts = json.loads(line)
    id, critique = facts.pop("id"), Critique(**facts)
  except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
    raise ValueError(str(error)[:200]) from None
  for name, text in dataclasses.asdict(critique).items():
    if name in ("role", "text", "sample", "output", "target") and not isinstance(text, str):
      raise ValueError(f"{name} is {type(text).__name__}, not text")
  return id, critique

"""From a config to checked settings: each section is a frozen dataclass whose types say which values are allowed.

A value that is not, or an unknown key, is an error with its key and what would do.
"""

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from selfrag_jax.checked import (
  Checked,
  Count,
  Natural,
  Positive,
  Range,
  Share,
  Weight,
  check_fields,
  check_value,
)
from selfrag_jax.tasks.rewards import RewardConfig
from selfrag_jax.train.losses import Advantage
from selfrag_jax.train.optimizer import OptimizerConfig

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class LoopConfig(Checked):
  """What the loop does beside stepping. Periods are in steps; 0 means only at the end."""

  checkpoint_every: Natural = 50
  keep_checkpoints: Count = 2
  eval_every: Natural = 0
  log_every: Natural = 1
  preempted_exit_code: Annotated[int, Range(0, 255)] = 143  # of a run that SIGTERM stopped after it had saved


@dataclasses.dataclass(frozen=True)
class SFTConfig(Checked):
  """Supervised fine-tuning on rendered demonstrations."""

  steps: Count = 200
  batch_size: Count = 64
  max_tokens: Count = 128  # of a row; a longer demonstration of a data set is left out and counted
  demonstrations: Literal["random", "gold"] = "gold"
  accumulate: Count = 1
  optimizer: OptimizerConfig = OptimizerConfig()

  def __post_init__(self):
    super().__post_init__()
    _check_split(self.batch_size, self.accumulate, "batch_size")


@dataclasses.dataclass(frozen=True)
class OptionalSFTConfig(SFTConfig):
  """Supervised fine-tuning that a run may do without: 0 steps leave it out."""

  steps: Natural = 0


@dataclasses.dataclass(frozen=True)
class RLConfig(Checked):
  """Reinforcement of whole rollouts by their reward."""

  steps: Count = 100
  questions_per_step: Count = 32
  rollouts_per_question: Annotated[int, Range(2, 2**20)] = 8  # advantages need a spread within the group
  advantage: Advantage = "mean"
  clip_low: Share = 0.2
  clip_high: Weight = 0.28
  kl_weight: Weight = 0.0  # towards the policy that reinforcement started from
  accumulate: Count = 1
  retriever: Literal["memory", "empty", "random"] = "memory"
  reward: RewardConfig = RewardConfig()
  # causal controls: what the reward is computed from
  control: Literal["none", "random_reward", "permuted"] = "none"
  optimizer: OptimizerConfig = OptimizerConfig()

  def __post_init__(self):
    super().__post_init__()
    _check_split(self.questions_per_step * self.rollouts_per_question, self.accumulate, "the number of rollouts")


@dataclasses.dataclass(frozen=True)
class PretrainConfig(Checked):
  """Language modelling on packed rows."""

  steps: Count = 300
  batch_size: Count = 64
  valid_rows: Count = 256  # that an evaluation reads, rounded up to whole batches
  needed_loss: Weight = 0.0  # on validation, for the phase after this one; 0: whatever it is
  accumulate: Count = 1
  optimizer: OptimizerConfig = OptimizerConfig()

  def __post_init__(self):
    super().__post_init__()
    _check_split(self.batch_size, self.accumulate, "batch_size")


@dataclasses.dataclass(frozen=True)
class MemoryPhaseConfig(Checked):
  """Training with memory: contexts that are remembered, and inputs that need them."""

  steps: Count = 300
  batch_size: Count = 8  # contexts, each with its own memory
  needed_loss: Weight = 0.0  # on validation, for the phase after this one; 0: whatever it is
  accumulate: Count = 1
  temperature: Positive = 0.05  # of the contrastive loss
  optimizer: OptimizerConfig = OptimizerConfig()

  def __post_init__(self):
    super().__post_init__()
    _check_split(self.batch_size, self.accumulate, "batch_size")


@dataclasses.dataclass(frozen=True)
class EncoderPhaseConfig(Checked):
  """Contrastive training of a text encoder. A batch is never split: its documents are each other's negatives."""

  steps: Count = 150
  batch_size: Count = 32  # queries
  hard_negatives: Natural = 1  # documents of BM25 that come with each query
  query_tokens: Annotated[int, Range(3, 2**20)] = 32  # two of them begin and end a text
  document_tokens: Annotated[int, Range(3, 2**20)] = 192
  temperature: Positive = 0.05
  chunk: Natural = 0  # rows that are embedded at once, for batches that memory does not hold; 0: all
  optimizer: OptimizerConfig = OptimizerConfig()

  @property
  def accumulate(self) -> int:
    return 1

  def __post_init__(self):
    super().__post_init__()
    if self.chunk and self.batch_size % self.chunk:
      raise ValueError(f"batch_size {self.batch_size} must be a multiple of chunk {self.chunk}")


@dataclasses.dataclass(frozen=True)
class RerankPhaseConfig(Checked):
  """Training of a cross-encoder on the candidates of BM25."""

  steps: Count = 300
  batch_size: Count = 8  # queries
  negatives: Count = 5  # candidates beside the relevant one
  depth: Count = 50  # of BM25's ranking: where candidates come from, and what is put in order
  tokens: Annotated[int, Range(16, 2**20)] = 224  # of query and document together
  accumulate: Count = 1
  optimizer: OptimizerConfig = OptimizerConfig()

  def __post_init__(self):
    super().__post_init__()
    if self.depth < self.negatives:
      raise ValueError(f"depth {self.depth} must be at least negatives {self.negatives}, which come from there")
    _check_split(self.batch_size, self.accumulate, "batch_size")


@dataclasses.dataclass(frozen=True)
class EvalConfig(Checked):
  """Greedy evaluation on held-out questions: `periodic` of them while training, `final` for the report."""

  periodic: Count = 256
  final: Count = 1024
  batch_size: Count = 128


@dataclasses.dataclass(frozen=True)
class RecallConfig(Checked):
  """The position-recall experiment: paired questions about a fact at each depth of contexts of several lengths."""

  n_facts: tuple[Count, ...] = (64, 1024)
  questions: tuple[Count, ...] = (200, 32)  # at each depth of each length
  full_questions: tuple[Count, ...] = (200, 6)  # of them, for readers of the whole context, which takes them long
  depths: Annotated[int, Range(4, 2**20)] = 16
  tokens: Count = 16_384  # of the contexts that are read at once

  def __post_init__(self):
    super().__post_init__()
    if not len(self.full_questions) == len(self.questions) == len(self.n_facts):
      raise ValueError(f"questions and full_questions must be as many numbers as n_facts {self.n_facts}, got {self}")
    if any(full > asked for full, asked in zip(self.full_questions, self.questions, strict=True)):
      raise ValueError(f"full_questions {self.full_questions} are some of questions {self.questions}, not more")


@dataclasses.dataclass(frozen=True)
class DocumentsConfig(Checked):
  """Recall by position on real documents."""

  n_documents: tuple[Count, ...] = (5, 10, 20)
  positions: Count = 5  # of the document that answers, evenly from the first place to the last
  questions: Count = 100  # of each file
  top_k: Count = 2  # documents that the memory shows
  max_new_tokens: Count = 48
  batch_size: Count = 2


def _check_split(rows: int, accumulate: int, name: str) -> None:
  if rows % accumulate:
    raise ValueError(f"{name} {rows} is not divisible by accumulate {accumulate}")


def settings(cls: type[T], section: Mapping[str, Any], name: str) -> T:
  """Build a dataclass from a config section, sections within it included.

  Raises ValueError for a key that the dataclass does not have, with the closest one it has, and for a value that the
  type of its field does not allow.
  """
  if not isinstance(section, Mapping):
    raise ValueError(f"config.{name} is {section!r}; it must be a section")
  fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
  hints = typing.get_type_hints(cls)
  values, own = {}, {}
  for key, value in section.items():
    if key not in fields:
      close = difflib.get_close_matches(key, fields, n=1)
      hint = f"did you mean {name}.{close[0]}?" if close else f"it has {', '.join(fields)}"
      raise ValueError(f"config.{name} has no {key!r}; {hint}")
    if dataclasses.is_dataclass(hints[key]):
      values[key] = settings(hints[key], value, f"{name}.{key}")
    else:
      values[key] = own[key] = value
  check_fields(cls, own, f"config.{name}.")
  for key, field in fields.items():
    missing = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    if missing and key not in values:
      raise ValueError(f"config.{name}.{key} is missing")
  try:
    return cls(**values)
  except ValueError as error:  # of values that do not go together
    raise ValueError(f"config.{name}: {error}") from error


def read_config(config: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
  """Check a config and return it without its workdir, of which no result depends.

  `sections` gives for each top-level key its dataclass; the dataclasses of a section of several kinds by its `name`;
  or the type of a plain value. Of the others only the numbers are checked. Raises ValueError.
  """
  for name, kind in sections.items():
    if name not in config:
      raise ValueError(f"the config has no {name!r}; it needs {', '.join(sections)}")
    section = config[name]
    if isinstance(kind, Mapping):
      chosen = section.get("name") if isinstance(section, Mapping) else None
      if not isinstance(chosen, str) or chosen not in kind:
        raise ValueError(f"config.{name}.name is {chosen!r}; one of {', '.join(kind)}")
      kind = kind[chosen]
    if dataclasses.is_dataclass(kind):
      settings(kind, section, name)  # type: ignore[arg-type]
    elif kind is Mapping and not isinstance(section, Mapping):
      raise ValueError(f"config.{name} is {section!r}; it must be a section")
    else:
      check_value(kind, section, f"config.{name}")
  _check_numbers(config, "config")
  return {name: value for name, value in config.items() if name != "workdir"}


def _check_numbers(value: Any, name: str) -> None:
  """Raise ValueError for a number anywhere that no setting can have, of whatever section."""
  if isinstance(value, Mapping):
    for key, item in value.items():
      _check_numbers(item, f"{name}.{key}")
  elif isinstance(value, tuple | list):
    for item in value:
      _check_numbers(item, name)
  elif type(value) in (int, float):
    check_value(type(value), value, name)

"""From a config to checked settings: each section is a frozen dataclass, an unknown key an error with a suggestion."""

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from selfrag_jax.tasks.rewards import RewardConfig
from selfrag_jax.train.losses import Advantage
from selfrag_jax.train.optimizer import OptimizerConfig

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class LoopConfig:
  """What the loop does beside stepping. Periods are in steps; 0 means only at the end."""

  checkpoint_every: int = 50
  keep_checkpoints: int = 2
  eval_every: int = 0
  log_every: int = 1
  preempted_exit_code: int = 143  # of a run that SIGTERM stopped after it had saved


@dataclasses.dataclass(frozen=True)
class SFTConfig:
  """Supervised fine-tuning on rendered demonstrations."""

  steps: int = 200
  batch_size: int = 64
  max_tokens: int = 128  # of a row; a longer demonstration of a data set is left out and counted
  demonstrations: Literal["random", "gold"] = "gold"
  accumulate: int = 1
  optimizer: OptimizerConfig = OptimizerConfig()

  def __post_init__(self):
    _check_split(self.batch_size, self.accumulate, "batch_size")


@dataclasses.dataclass(frozen=True)
class RLConfig:
  """Reinforcement of whole rollouts by their reward."""

  steps: int = 100
  questions_per_step: int = 32
  rollouts_per_question: int = 8  # advantages need a spread within the group
  advantage: Advantage = "mean"
  clip_low: float = 0.2
  clip_high: float = 0.28
  kl_weight: float = 0.0  # towards the policy that reinforcement started from
  accumulate: int = 1
  retriever: Literal["memory", "empty", "random"] = "memory"
  reward: RewardConfig = RewardConfig()
  # causal controls: what the reward is computed from
  control: Literal["none", "random_reward", "permuted"] = "none"
  optimizer: OptimizerConfig = OptimizerConfig()

  def __post_init__(self):
    if self.rollouts_per_question < 2:
      raise ValueError(f"rollouts_per_question is {self.rollouts_per_question}; comparing them takes at least 2")
    _check_split(self.questions_per_step * self.rollouts_per_question, self.accumulate, "the number of rollouts")


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
  """Language modelling on packed rows."""

  steps: int = 300
  batch_size: int = 64
  valid_rows: int = 256  # that an evaluation reads, rounded up to whole batches
  accumulate: int = 1
  optimizer: OptimizerConfig = OptimizerConfig()

  def __post_init__(self):
    _check_split(self.batch_size, self.accumulate, "batch_size")


@dataclasses.dataclass(frozen=True)
class MemoryPhaseConfig:
  """Training with memory: contexts that are remembered, and inputs that need them."""

  steps: int = 300
  batch_size: int = 8  # contexts, each with its own memory
  accumulate: int = 1
  temperature: float = 0.05  # of the contrastive loss
  optimizer: OptimizerConfig = OptimizerConfig()

  def __post_init__(self):
    _check_split(self.batch_size, self.accumulate, "batch_size")
    if self.temperature <= 0:
      raise ValueError(f"temperature is {self.temperature}; it must be positive")


@dataclasses.dataclass(frozen=True)
class EncoderPhaseConfig:
  """Contrastive training of a text encoder. A batch is never split: its documents are each other's negatives."""

  steps: int = 150
  batch_size: int = 32  # queries
  hard_negatives: int = 1  # documents of BM25 that come with each query
  query_tokens: int = 32
  document_tokens: int = 192
  temperature: float = 0.05
  chunk: int = 0  # rows that are embedded at once, for batches that memory does not hold; 0: all
  optimizer: OptimizerConfig = OptimizerConfig()

  @property
  def accumulate(self) -> int:
    return 1

  def __post_init__(self):
    if min(self.steps, self.batch_size, self.query_tokens - 2, self.document_tokens - 2) < 1 or self.hard_negatives < 0:
      raise ValueError(f"steps, batch_size and tokens must be positive, hard_negatives at least 0: {self}")
    if self.temperature <= 0 or self.chunk < 0 or (self.chunk and self.batch_size % self.chunk):
      raise ValueError(f"temperature > 0; batch_size {self.batch_size} must be a multiple of chunk {self.chunk}")


@dataclasses.dataclass(frozen=True)
class RerankPhaseConfig:
  """Training of a cross-encoder on the candidates of BM25."""

  steps: int = 300
  batch_size: int = 8  # queries
  negatives: int = 5  # candidates beside the relevant one
  depth: int = 50  # of BM25's ranking: where candidates come from, and what is put in order
  tokens: int = 224  # of query and document together
  accumulate: int = 1
  optimizer: OptimizerConfig = OptimizerConfig()

  def __post_init__(self):
    if min(self.steps, self.batch_size, self.negatives) < 1 or self.tokens < 16 or self.depth < self.negatives:
      raise ValueError(f"steps, batch_size, negatives >= 1, tokens >= 16, depth >= negatives: {self}")
    _check_split(self.batch_size, self.accumulate, "batch_size")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Greedy evaluation on held-out questions: `periodic` of them while training, `final` for the report."""

  periodic: int = 256
  final: int = 1024
  batch_size: int = 128

  def __post_init__(self):
    for name, value in dataclasses.asdict(self).items():
      if value < 1:
        raise ValueError(f"evaluation.{name} is {value}; it must be at least 1")


@dataclasses.dataclass(frozen=True)
class RecallConfig:
  """The position-recall experiment: paired questions about a fact at each depth of contexts of several lengths."""

  n_facts: tuple[int, ...] = (64, 1024)
  questions: tuple[int, ...] = (200, 32)  # at each depth of each length
  full_questions: tuple[int, ...] = (200, 6)  # of them, for readers of the whole context, which takes them long
  depths: int = 16
  tokens: int = 16_384  # of the contexts that are read at once

  def __post_init__(self):
    if min(*self.questions, *self.full_questions) < 1 or self.depths < 4 or self.tokens < 1:
      raise ValueError(f"need at least one question, 4 depths and one token, got {self}")
    if not len(self.full_questions) == len(self.questions) == len(self.n_facts):
      raise ValueError(f"questions and full_questions must be as many numbers as n_facts {self.n_facts}, got {self}")
    if any(full > asked for full, asked in zip(self.full_questions, self.questions, strict=True)):
      raise ValueError(f"full_questions {self.full_questions} are some of questions {self.questions}, not more")


@dataclasses.dataclass(frozen=True)
class DocumentsConfig:
  """Recall by position on real documents."""

  n_documents: tuple[int, ...] = (5, 10, 20)
  positions: int = 5  # of the document that answers, evenly from the first place to the last
  questions: int = 100  # of each file
  top_k: int = 2  # documents that the memory shows
  max_new_tokens: int = 48
  batch_size: int = 2

  def __post_init__(self):
    for name, value in dataclasses.asdict(self).items():
      if min(value if isinstance(value, tuple) else (value,), default=0) < 1:
        raise ValueError(f"documents.{name} is {value}; it must be at least 1")


def _check_split(rows: int, accumulate: int, name: str) -> None:
  if accumulate < 1 or rows % accumulate:
    raise ValueError(f"{name} {rows} is not divisible by accumulate {accumulate}")


def settings(cls: type[T], section: Mapping[str, Any], name: str) -> T:
  """Build a dataclass from a config section, sections within it included.

  Raises ValueError for a key that the dataclass does not have, with the closest one it has.
  """
  fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
  hints = typing.get_type_hints(cls)
  values = {}
  for key, value in section.items():
    if key not in fields:
      close = difflib.get_close_matches(key, fields, n=1)
      hint = f"did you mean {name}.{close[0]}?" if close else f"it has {', '.join(fields)}"
      raise ValueError(f"config.{name} has no {key!r}; {hint}")
    values[key] = settings(hints[key], value, f"{name}.{key}") if dataclasses.is_dataclass(hints[key]) else value
  for key, field in fields.items():
    missing = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    if missing and key not in values:
      raise ValueError(f"config.{name}.{key} is missing")
    allowed = typing.get_args(hints[key]) if typing.get_origin(hints[key]) is Literal else ()
    if allowed and key in values and values[key] not in allowed:
      raise ValueError(f"config.{name}.{key} is {values[key]!r}; one of {', '.join(map(str, allowed))}")
  return cls(**values)

"""The sections of a config that optimizes prompts: the task, the engines, the optimizer and the budget."""

import dataclasses
from typing import Annotated, Any, Literal

from selfrag_jax.checked import Checked, Count, Natural, Range, Seed, Share, Weight


@dataclasses.dataclass(frozen=True)
class Sizes(Checked):
  """The number of cases in each part of a task."""

  train: Annotated[int, Range(1, 2**20)]
  valid: Annotated[int, Range(1, 2**20)]
  test: Annotated[int, Range(1, 2**20)]


@dataclasses.dataclass(frozen=True)
class PromptTaskSection(Checked):
  """The task, and the number of its cases; each task has some of these keys."""

  name: Literal["rulebook", "router", "program", "bbh", "gsm8k"]
  sizes: Sizes
  path: str = ""
  calls: Literal[1, 2] = 1
  n_topics: Annotated[int, Range(1, 2**10)] = 60
  n_actions: Annotated[int, Range(2, 2**10)] = 20
  noise: Share = 0.4
  capacity: Count = 24


@dataclasses.dataclass(frozen=True)
class EngineSection(Checked):
  """The engine of one role: a model and its limits."""

  name: str
  base_url: str = ""  # empty: OpenAI's
  temperature: Weight | None = 0.0
  max_tokens: Count | None = 2000
  context_tokens: Count | None = 32_768  # of prompt and answer; a local model lowers it to its own context
  concurrency: Annotated[int, Range(1, 2**10)] | None = 8
  # the environment variable with the key, not the key: configs are written into workdirs
  api_key_env: str = ""  # empty: OPENAI_API_KEY, sent to OpenAI's own address alone


@dataclasses.dataclass(frozen=True)
class Engines(Checked):
  """The engines of the three roles."""

  model: EngineSection
  critic: EngineSection
  optimizer: EngineSection


@dataclasses.dataclass(frozen=True)
class PromptOptimizerSection(Checked):
  """The optimizer of the texts."""

  steps: Natural = 30
  batch_size: Annotated[int, Range(1, 2**20)] = 3
  reject_worse: bool = True  # on validation cases; without it, more depends on the memory
  constraints: tuple[Any, ...] = ()
  learning_rate: Annotated[float, Range(above=0, most=1)] = 1.0  # the share of the words that a step may change
  gradient_memory: Natural = 0
  momentum_window: Natural = 0
  on_bad_reply: str = "keep"
  retries: Natural = 2


@dataclasses.dataclass(frozen=True)
class PastSection(Checked):
  """The past critiques that an optimizer is shown: their number, their tokens and how similar they must be."""

  k: Natural = 12
  tokens: Count = 1500
  past_tokens: Natural = 500
  merge: str = "concatenate"
  min_score: float = 0.1
  min_ratio: float = 0.75


@dataclasses.dataclass(frozen=True)
class Budget(Checked):
  """The most that a run may spend; 0: no bound. Prices are those of a million tokens."""

  tokens: Annotated[int, Range(0)] = 0
  cost: Weight = 0.0
  prompt_price: Weight = 0.0
  completion_price: Weight = 0.0


SECTIONS = {
  "seed": Seed,
  "task": PromptTaskSection,
  "engines": Engines,
  "cache": bool,
  "memory": Literal["none", "window", "retrieval"],
  "rag": PastSection,
  "optimizer": PromptOptimizerSection,
  "budget": Budget,
}

"""The sections of a config that optimizes prompts: the task, the engines, the optimizer, and what a run may spend."""

import dataclasses
from typing import Annotated, Any, Literal

from selfrag_jax.checked import Checked, Count, Natural, Range, Seed, Share, Weight


@dataclasses.dataclass(frozen=True)
class Sizes(Checked):
  """How many cases the parts of a task have."""

  train: Annotated[int, Range(1, 2**20)]
  valid: Annotated[int, Range(1, 2**20)]
  test: Annotated[int, Range(1, 2**20)]


@dataclasses.dataclass(frozen=True)
class PromptTaskSection(Checked):
  """What is learned, and from how many cases; each task has some of these."""

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
  """A model that plays a part."""

  name: str
  base_url: str = ""  # OpenAI's
  temperature: Weight | None = 0.0
  max_tokens: Count | None = 2000
  context_tokens: Count | None = 32_768  # of prompt and answer; a local model may know that it has fewer
  concurrency: Annotated[int, Range(1, 2**10)] | None = 8
  # the environment variable with the key, not the key: configs are written into workdirs
  api_key_env: str = ""  # OPENAI_API_KEY goes to OpenAI's own address alone


@dataclasses.dataclass(frozen=True)
class Engines(Checked):
  """The models of the three parts."""

  model: EngineSection
  critic: EngineSection
  optimizer: EngineSection


@dataclasses.dataclass(frozen=True)
class PromptOptimizerSection(Checked):
  """How texts are improved."""

  steps: Natural = 30
  batch_size: Annotated[int, Range(1, 2**20)] = 3
  reject_worse: bool = True  # on validation; without it, memory has more to do
  constraints: tuple[Any, ...] = ()
  learning_rate: Annotated[float, Range(above=0, most=1)] = 1.0  # how much of the words a step may change
  gradient_memory: Natural = 0
  momentum_window: Natural = 0
  on_bad_reply: str = "keep"
  retries: Natural = 2


@dataclasses.dataclass(frozen=True)
class PastSection(Checked):
  """How much of the past an optimizer is shown."""

  k: Natural = 12
  tokens: Count = 1500
  past_tokens: Natural = 500
  merge: str = "concatenate"
  min_score: float = 0.1
  min_ratio: float = 0.75


@dataclasses.dataclass(frozen=True)
class Budget(Checked):
  """What a run may spend; 0 for no bound, prices of a million tokens."""

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

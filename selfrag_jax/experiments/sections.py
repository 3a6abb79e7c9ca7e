"""The sections of configs that are no settings of a phase: where data come from, what prompts are optimized with."""

import dataclasses
from typing import Annotated, Any, Literal

from selfrag_jax.checked import Checked, Count, MeshShape, Natural, Positive, Range, Seed, Share, Weight

TRAINED: dict[str, Any] = {"seed": Seed, "mesh": MeshShape, "init": str}  # what every config that trains says


@dataclasses.dataclass(frozen=True)
class FactsData(Checked):
  """Lists of facts, made as they are needed."""

  name: str
  variant: str
  n_facts: Count
  n_questions: Count
  text: tuple[tuple[Any, ...], ...]
  seed: Seed

  def __post_init__(self):
    super().__post_init__()
    check_lists(self.text)


@dataclasses.dataclass(frozen=True)
class TextFiles(Checked):
  """Text files."""

  name: str
  path: str
  tokenizer: str
  row_tokens: Annotated[int, Range(2, 2**24)]
  n_chunks: Count
  chunk_tokens: Annotated[int, Range(4, 2**24)]
  seed: Seed


@dataclasses.dataclass(frozen=True)
class TwoHopData(Checked):
  """The embedded task."""

  name: str
  n_entities: Annotated[int, Range(4, 2**16)]
  n_relations: Annotated[int, Range(1, 2**16)]
  seed: Seed


@dataclasses.dataclass(frozen=True)
class PassagesData(Checked):
  """Questions over a folder of passages."""

  name: str
  path: str
  document_tokens: Count
  prompt_tokens: Count
  index: Literal["title_text", "title"]
  ratios: tuple[Share, Share, Share, Share]
  cloze: Share
  seed: Seed

  def __post_init__(self):
    super().__post_init__()
    if not sum(self.ratios) > 0:
      raise ValueError(f"ratios {self.ratios} leave every part empty")


@dataclasses.dataclass(frozen=True)
class Parts(Checked):
  """Shares of the titles of a collection."""

  train: Positive
  valid: Positive
  test: Positive


@dataclasses.dataclass(frozen=True)
class JudgedTitles(Checked):
  """A judged collection that is dealt to parts."""

  path: str
  parts: Parts
  seed: Seed


@dataclasses.dataclass(frozen=True)
class JudgedSplit(Checked):
  """One split of a judged collection."""

  path: str
  split: str


@dataclasses.dataclass(frozen=True)
class Periodic(Checked):
  """How many validation queries are scored while a model trains."""

  periodic: Count


@dataclasses.dataclass(frozen=True)
class FilesPath(Checked):
  """Files of questions and documents."""

  path: str


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
  base_url: str
  temperature: Weight | None
  max_tokens: Count | None
  context_tokens: Count | None
  concurrency: Annotated[int, Range(1, 2**10)] | None
  api_key_env: str = ""  # the name of a variable, not the key: configs are written into workdirs


@dataclasses.dataclass(frozen=True)
class Engines(Checked):
  """The models of the three parts."""

  model: EngineSection
  critic: EngineSection
  optimizer: EngineSection


@dataclasses.dataclass(frozen=True)
class PromptOptimizerSection(Checked):
  """How texts are improved."""

  steps: Natural
  batch_size: Annotated[int, Range(1, 2**20)]
  reject_worse: bool
  constraints: tuple[Any, ...]
  learning_rate: Annotated[float, Range(above=0, most=1)]
  gradient_memory: Natural
  momentum_window: Natural
  on_bad_reply: str
  retries: Natural


@dataclasses.dataclass(frozen=True)
class PastSection(Checked):
  """How much of the past an optimizer is shown."""

  k: Natural
  tokens: Count
  past_tokens: Natural
  merge: str
  min_score: float
  min_ratio: float


@dataclasses.dataclass(frozen=True)
class Budget(Checked):
  """What a run may spend; 0 for no bound, prices of a million tokens."""

  tokens: Annotated[int, Range(0)]
  cost: Weight
  prompt_price: Weight
  completion_price: Weight


def check_lists(kinds: Any) -> None:
  """Check kinds of lists of facts: (n_facts, how many of the last are asked for, ...). Raises ValueError."""
  if not kinds or not isinstance(kinds, tuple | list):
    raise ValueError(f"text is {kinds!r}; it must have at least one kind of lists, such as ((4,), (8, 4))")
  for kind in kinds:
    numbers = list(kind[:2]) if isinstance(kind, tuple | list) else []
    numbers = numbers[:1] if numbers[1:] == [None] else numbers
    if not numbers or len(kind) > 4 or any(type(n) is not int or not 1 <= n < 2**31 for n in numbers):
      raise ValueError(f"text has {kind!r}; a kind of lists is (facts, the last that are asked for, alike, variant)")

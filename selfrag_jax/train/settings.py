"""Settings of evaluations: how many questions, of which lengths, in batches of which size."""

import dataclasses
from typing import Annotated

from selfrag_jax.checked import Checked, Count, Range


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

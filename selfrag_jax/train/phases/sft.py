"""Supervised fine-tuning of a searching policy on demonstrations."""

import dataclasses
from typing import Literal, Unpack

from selfrag_jax.checked import Natural
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.tasks.search_task import SearchTask
from selfrag_jax.text.chat import render_conversation
from selfrag_jax.train.phases.base import Start
from selfrag_jax.train.phases.conversations import ConversationConfig, ConversationPhase, Rendered


@dataclasses.dataclass(frozen=True)
class SFTConfig(ConversationConfig):
  """Supervised fine-tuning on rendered demonstrations."""

  demonstrations: Literal["random", "gold"] = "gold"


@dataclasses.dataclass(frozen=True)
class OptionalSFTConfig(SFTConfig):
  """Supervised fine-tuning that is optional: 0 steps skip it."""

  steps: Natural = 0


class SFT(ConversationPhase):
  """The phase. Its demonstrations search at most `max_hops` times."""

  def __init__(
    self, name: str, task: SearchTask, model: ModelConfig, config: SFTConfig, max_hops: int, **start: Unpack[Start]
  ):
    def render(index: int) -> Rendered:
      conversation = task.demonstration("sft", index, config.demonstrations, max_hops)
      return render_conversation(task.tokenizer, conversation, task.template)

    # a task whose questions never end has no epoch
    super().__init__(name, render, task.size("sft"), task.tokenizer.special["<|pad|>"], model, config, **start)

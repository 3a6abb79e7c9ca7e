"""Fine-tuning on rendered conversations, with the loss on the tokens of the assistant.

Conversations are packed: a row holds as many as fit, in the order of the data, each as a segment of its own.
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Unpack

import numpy as np
from absl import logging

from selfrag_jax.checked import Count
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.train.lora import LoRAConfig
from selfrag_jax.train.phases.base import BatchConfig, Start
from selfrag_jax.train.phases.pretrain import LanguagePhase, Rows

Rendered = tuple[list[int], list[int]]  # token ids, and 1 where the loss counts


@dataclasses.dataclass(frozen=True)
class ConversationConfig(BatchConfig):
  """Fine-tuning on packed conversations."""

  steps: Count = 200
  batch_size: Count = 64
  max_tokens: Count = 128  # of a row; a longer conversation of a data set is left out and counted
  lora: LoRAConfig = LoRAConfig()


class ConversationPhase(LanguagePhase):
  """The phase. `render(index)` gives conversation after conversation; `pad` fills the rows.

  `size`: the number of conversations in an epoch; the indices go on over all epochs. None: none comes twice, and one
  that is longer than a row is an error.
  """

  def __init__(
    self,
    name: str,
    render: Callable[[int], Rendered],
    size: int | None,
    pad: int,
    model: ModelConfig,
    config: ConversationConfig,
    **start: Unpack[Start],
  ):
    super().__init__(name, model, config, config.lora, **start)
    self._config, self._size, self._pad = config, size, pad
    self._packs: list[tuple[list[int], int]] = []  # each row's conversations, and the index after the last of them
    self._rendered = lru_cache(4 * config.batch_size)(render)
    if size is not None:
      self._check_lengths(render, size)

  def batch(self, step: int) -> Rows:
    """Render the conversations of a step: tokens, mask and segment ids, int32 / bool / int32 [B, T]."""
    rows = self._rows(step, self._config.batch_size)
    shape = (len(rows), self._config.max_tokens)
    tokens = np.full(shape, self._pad, np.int32)
    mask, segment_ids = np.zeros(shape, bool), np.zeros(shape, np.int32)
    for row, number in enumerate(rows):
      end = 0
      for segment, index in enumerate(self.row(number), 1):
        ids, written = self._rendered(index)
        inside = slice(end, end + len(ids))
        tokens[row, inside], mask[row, inside], segment_ids[row, inside] = ids, written, segment
        end += len(ids)
    return {"tokens": tokens, "mask": mask, "segment_ids": segment_ids}

  def row(self, row: int) -> list[int]:
    """Return the conversations of a row, counted over the whole training: a function of the seed and the row."""
    if self._size is None:  # rows begin so far apart that they cannot overlap
      return self._packed(row * self._config.max_tokens)[0]
    while len(self._packs) <= row:  # every epoch is shown in full: a row begins where the previous one ended
      self._packs.append(self._packed(self._packs[-1][1] if self._packs else 0))
    return self._packs[row][0]

  def _packed(self, index: int) -> tuple[list[int], int]:
    """Return the conversations from `index` on that fit into a row, and the index after them (next-fit packing)."""
    width = room = self._config.max_tokens
    chosen = []
    while (length := len(self._rendered(index)[0])) <= room or length > width:
      if length <= room:
        chosen.append(index)
        room -= length
      elif self._size is None:
        raise ValueError(f"a demonstration of {length} tokens exceeds {self.name}.max_tokens = {width}")
      index += 1
    return chosen, index

  def _check_lengths(self, render: Callable[[int], Rendered], size: int) -> None:
    too_long = sum(len(render(index)[0]) > self._config.max_tokens for index in range(size))
    if too_long == size:
      raise ValueError(f"no demonstration fits into {self.name}.max_tokens = {self._config.max_tokens}")
    if too_long:
      logging.warning("%d of %d demonstrations exceed %s.max_tokens: left out", too_long, size, self.name)

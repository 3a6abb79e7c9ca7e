"""An engine whose model writes what a test says, and a tokenizer of bytes with the marks of a chat template."""

import dataclasses
import time

from selfrag_jax.generate.generation import Generation, GenerationSettings
from selfrag_jax.text.chat import CHATML, render_for_completion
from selfrag_jax.text.tokenizer import ByteTokenizer


class ChatBytes(ByteTokenizer):
  """One id for each byte, and ChatML's two marks."""

  def __init__(self):
    super().__init__()
    self.special = {**self.special, "<|im_start|>": self.vocab_size, "<|im_end|>": self.vocab_size + 1}
    self.vocab_size += 2


class ScriptedEngine:
  """Writes the given texts one after the other, `step` characters a round; `prompts` are those that it was given.

  `delay` is the time of a round in seconds, `at_round` a function that is called with the number of each.
  """

  def __init__(self, *texts, context_tokens=4096, template=CHATML, step=3, error=None, delay=0.0, at_round=None):
    self.tokenizer, self.template, self.context_tokens = ChatBytes(), template, context_tokens
    self.texts, self.step, self.error = list(texts), step, error
    self.prompts, self.prompt_ids, self.settings, self.rounds = [], [], [], 0
    self.delay, self.at_round, self._left = delay, at_round, {}

  def render(self, conversation):
    return render_for_completion(self.tokenizer, conversation, self.template)

  def submit(self, ids, settings=None, **changes):
    settings = dataclasses.replace(settings or GenerationSettings(), **changes)
    assert len(ids) + settings.max_new_tokens <= self.context_tokens
    self.prompts.append(self.tokenizer.decode(ids))
    self.prompt_ids.append(ids)
    self.settings.append(settings)
    generation = Generation(self, ids, 0, None)
    self._left[generation] = self.texts.pop(0) if self.texts else ""
    return [generation]

  def advance(self, generations):
    (generation,) = generations
    if not generation.unread and generation.is_done:
      return False
    self.rounds += 1
    time.sleep(self.delay)
    if self.at_round:
      self.at_round(self.rounds)
    left = self._left[generation]
    if generation.is_cancelled:
      generation.finish("cancelled")
    elif self.error and not left:
      generation.finish("error", error=self.error)
    elif left:
      generation.give(1, 1, left[: self.step])
      self._left[generation] = left[self.step :]
    else:
      generation.finish("stop")
    return True

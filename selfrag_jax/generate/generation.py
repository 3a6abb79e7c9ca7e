"""A text that an engine writes: how it is to be written, and what has been written so far."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from selfrag_jax.checked import Checked, Count, Natural, Seed
from selfrag_jax.generate.sampling import SamplingConfig
from selfrag_jax.generate.tools import Tool

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclasses.dataclass(frozen=True)
class GenerationSettings(Checked):
  """How a text is written. Temperature 0 is greedy; `top_k` 0 and `top_p` 1 leave the distribution whole.

  max_new_tokens: the most tokens that the model writes; forced ones do not count.
  stop: texts that end it, and are left out of it.
  seed: draws; the sample with number n of a prompt has draws of its own.
  schema: a JSON schema as a mapping; the text is JSON that fits it ({}: any JSON; None: any text).
  tools: who answers the queries that the model writes between `<|search_start|>` and `<|search_end|>`; the first that
  has an answer. After `max_tool_calls` of them the answer is a notice.
  """

  max_new_tokens: Count = 256
  temperature: float = 0.0
  top_k: Natural = 0
  top_p: float = 1.0
  stop: Sequence[str] = ()
  seed: Seed = 0
  schema: Mapping[str, Any] | None = None
  tools: Any = ()
  max_tool_calls: Natural = 4

  def __post_init__(self):
    super().__post_init__()
    SamplingConfig(self.temperature, self.top_k, self.top_p)  # raises ValueError
    if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
      raise ValueError(f"stop is {self.stop!r:.80}; give a list of texts, none of them empty")
    if not all(isinstance(tool, Tool) for tool in self.tools):
      raise ValueError(f"tools are {self.tools!r:.80}; give objects that answer a query when they are called")


class Piece(NamedTuple):
  """One token of a sample: its id, 1 if the model wrote it or 0 if it was forced, and the text that became certain.

  `log_prob` is the natural logarithm of its probability, 0 for a forced one. The last piece has the token -1, and the
  text that was held back.
  """

  sample: int
  token: int
  mask: int
  text: str
  log_prob: float


class Writer(Protocol):
  """The protocol of who writes generations."""

  def advance(self, generations: Sequence["Generation"]) -> bool:
    """Write until one of the generations has a piece that nobody has taken; False: all are finished."""
    ...


class Generation:
  """A text that is being written. Iterating over it yields its pieces of text as they come, and lets the engine work.

  `prompt`, `tokens`, `mask` and `log_probs` are those so far; `mask` is 1 on tokens that the model wrote. `text` is the
  text so far, without queries, forced tokens and control tokens. `finish_reason` is None until the end; `error` is what
  an engine, a tool or a listener raised. `documents` are those that tools have shown, in the order of the text.
  `reused` counts the tokens of the prompt that did not have to be read again. `unread` are the pieces that nobody has
  taken yet. An engine calls `give` and `finish`.
  """

  def __init__(self, writer: Writer, prompt: list[int], sample: int, listener: Callable[[Piece], None] | None):
    self.prompt, self.sample = prompt, sample
    self.tokens: list[int] = []
    self.mask: list[int] = []
    self.log_probs: list[float] = []
    self.documents: list[Mapping[str, Any]] = []
    self.text = ""
    self.finish_reason: FinishReason | None = None
    self.error: Exception | None = None
    self.reused = 0
    self.is_cancelled = False
    self._writer, self._listener = writer, listener
    self.unread: deque[Piece] = deque()

  @property
  def is_done(self) -> bool:
    return self.finish_reason is not None

  def cancel(self) -> None:
    """End it before the next token. May be called from any thread."""
    self.is_cancelled = True

  def pieces(self) -> Iterator[Piece]:
    """Yield the pieces as they come. Raises what an engine or a tool raised; leaving the loop early cancels."""
    try:
      while self._writer.advance([self]):
        yield self.unread.popleft()
      if self.error is not None:
        raise self.error
    finally:
      self.cancel()

  def __iter__(self) -> Iterator[str]:
    return (piece.text for piece in self.pieces() if piece.text)

  def wait(self) -> "Generation":
    """Let the engine work until the text is finished, and return self. Raises what an engine or a tool raised."""
    for _ in self.pieces():
      pass
    return self

  def give(self, token: int, mask: int, text: str, log_prob: float = 0.0) -> None:
    """Add a token, or with -1 none, and the text that has become certain."""
    if token >= 0:
      self.tokens.append(token)
      self.mask.append(mask)
      self.log_probs.append(log_prob)
    self.text += text
    piece = Piece(self.sample, token, mask, text, log_prob)
    if self._listener is None:
      self.unread.append(piece)
      return
    try:
      self._listener(piece)
    except Exception as error:  # this text ends, those beside it go on
      self._listener, self.error = None, error
      self.cancel()

  def finish(self, reason: FinishReason, text: str = "", error: Exception | None = None) -> None:
    """End the text, with what was held back of it."""
    self.finish_reason, self.error = reason, error or self.error
    self.give(-1, 0, text)

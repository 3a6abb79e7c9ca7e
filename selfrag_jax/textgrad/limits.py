"""What bounds a run: the context of a model, an account of tokens and money, and the answers that are known."""

import contextlib
import hashlib
import json
import math
import sqlite3
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Content = str | list[str | bytes]  # a prompt, or texts and images in their order


class EngineError(RuntimeError):
  """An engine gave no usable answer: the connection failed for good, or what came back is not text."""


class ContextBudgetError(EngineError):
  """The prompt and the longest answer do not fit in the model's context. Raised before the call."""


class BudgetError(EngineError):
  """The call could spend more than the budget of the run. Raised before the call."""


class Completion(NamedTuple):
  """An answer and what it took."""

  text: str
  prompt_tokens: int
  completion_tokens: int


def estimate_tokens(content: Content | None) -> int:
  """Estimate, from above for English, how many tokens a prompt has: 3.5 bytes each, 1,000 an image."""
  if content is None:
    return 0
  parts = [content] if isinstance(content, str) else content
  return sum(1000 if isinstance(part, bytes) else math.ceil(len(part.encode()) / 3.5) for part in parts)


class Account:
  """What a run has spent, and the budget that it may not exceed; a call counts in full until it has ended."""

  calls: int
  cached_calls: int
  prompt_tokens: int
  completion_tokens: int
  largest_prompt: int  # tokens
  _COUNTS = ("calls", "cached_calls", "prompt_tokens", "completion_tokens", "largest_prompt")

  def __init__(
    self,
    max_tokens: int | None = None,
    max_cost: float | None = None,
    *,
    prompt_price: float = 0.0,
    completion_price: float = 0.0,
  ):
    """Make an account; prices are for a million tokens, `max_cost` in their currency."""
    self.max_tokens, self.max_cost = max_tokens, max_cost
    self._prices = prompt_price, completion_price
    self._lock = threading.Lock()
    self._reserved: list[tuple[int, int]] = []
    for name in self._COUNTS:
      setattr(self, name, 0)

  @property
  def tokens(self) -> int:
    """Tokens spent, of prompts and answers."""
    return self.prompt_tokens + self.completion_tokens

  @property
  def cost(self) -> float:
    """Money spent."""
    return self._cost(self.prompt_tokens, self.completion_tokens)

  @contextlib.contextmanager
  def spending(self, prompt_tokens: int, completion_tokens: int) -> Iterator[Callable[[Completion], None]]:
    """Reserve what a call may take at most; the caller is given a function that notes what it took.

    Raises BudgetError if that could overspend.
    """
    asked = prompt_tokens, completion_tokens
    with self._lock:
      prompt, completion = (sum(column) for column in zip(asked, *self._reserved, strict=True))
      prompt, completion = self.prompt_tokens + prompt, self.completion_tokens + completion
      tokens, cost = prompt + completion, self._cost(prompt, completion)
      if self.max_tokens is not None and tokens > self.max_tokens:
        raise BudgetError(f"the call may bring the run to {tokens:,} tokens, budgeted are {self.max_tokens:,}")
      if self.max_cost is not None and cost > self.max_cost:
        raise BudgetError(f"the call may bring the run to a cost of {cost:.4f}, budgeted are {self.max_cost}")
      self._reserved.append(asked)

    def note(completion: Completion) -> None:
      with self._lock:
        self.calls += 1
        self.prompt_tokens += completion.prompt_tokens
        self.completion_tokens += completion.completion_tokens
        self.largest_prompt = max(self.largest_prompt, completion.prompt_tokens)

    try:
      yield note
    finally:
      with self._lock:
        self._reserved.remove(asked)

  def note_cached(self) -> None:
    """Count a call that the cache answered; it costs nothing."""
    with self._lock:
      self.cached_calls += 1

  def state(self) -> dict[str, Any]:
    """Return what was spent, for a file."""
    return {**{name: getattr(self, name) for name in self._COUNTS}, "cost": self.cost}

  def restore(self, state: dict[str, Any]) -> None:
    """Go on from `state()`."""
    for name in self._COUNTS:
      setattr(self, name, state[name])

  def _cost(self, prompt_tokens: int, completion_tokens: int) -> float:
    return (prompt_tokens * self._prices[0] + completion_tokens * self._prices[1]) / 1e6


class EngineCache:
  """Answers on disk by model, prompt and sampling parameters, in one SQLite file that several processes may share."""

  def __init__(self, path: str):
    """Open the file, or make one. Raises EngineError for another file."""
    self.path = path
    self._lock = threading.Lock()
    with self._errors():
      self._file = sqlite3.connect(path, check_same_thread=False, timeout=60)
      with self._file:
        self._file.execute("PRAGMA journal_mode = WAL")
        self._file.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, text TEXT NOT NULL)")

  def get(self, key: str) -> str | None:
    """Return the answer that is known."""
    with self._lock, self._errors():
      row = self._file.execute("SELECT text FROM answers WHERE key = ?", (key,)).fetchone()
    return None if row is None else row[0]

  def put(self, key: str, text: str) -> None:
    """Keep an answer. Raises EngineError when the disk is full."""
    with self._lock, self._errors(), self._file:
      self._file.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, text))

  @contextlib.contextmanager
  def _errors(self) -> Iterator[None]:
    try:
      yield
    except sqlite3.Error as error:
      raise EngineError(f"the cache of answers {self.path} cannot be used: {error}") from None

  @staticmethod
  def key(model: str, content: Content, system_prompt: str | None, sampling: dict[str, Any]) -> str:
    """Return the SHA-256 of all that an answer depends on."""
    parts = [content] if isinstance(content, str) else content
    plain = [{"image": hashlib.sha256(part).hexdigest()} if isinstance(part, bytes) else part for part in parts]
    return hashlib.sha256(json.dumps([model, plain, system_prompt, sampling], sort_keys=True).encode()).hexdigest()

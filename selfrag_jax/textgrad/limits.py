"""The limits of a run: an account of tokens and money, a cache of answers, and the errors for exceeded budgets."""

import contextlib
import contextvars
import dataclasses
import hashlib
import json
import math
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

COUNTS = ("calls", "cached_calls", "prompt_tokens", "completion_tokens", "largest_prompt")
LARGEST = 1 << 53  # the largest count that can be booked
MOST = 1 << 32  # the most tokens of a call that a server is believed to have counted
PATIENCE = 3600  # seconds that a call waits for the budget while no other call ends
Content = str | list[str | bytes]  # a prompt, or texts and images in their order


class EngineError(RuntimeError):
  """An engine gave no usable answer: the connection failed for good, or what came back is not text."""


class ContextBudgetError(EngineError):
  """The prompt and the longest answer do not fit in the model's context. Raised before the call."""


class BudgetError(EngineError):
  """The call could spend more than the budget of the run. Raised before the call."""


class Completion(NamedTuple):
  """An answer and its reported numbers of tokens; where a report is no number, `MeteredEngine` counts itself."""

  text: str
  prompt_tokens: Any
  completion_tokens: Any


def believed(told: Any, own: int) -> int:
  """Return the reported count of tokens; or our own if the report is no count, or 0 where ours is not."""
  return told if type(told) is int and min(own, 1) <= told <= MOST else own


def estimate_tokens(content: Content | None) -> int:
  """Estimate, from above for English, how many tokens a prompt has: 3.5 bytes each, 1,000 an image."""
  if content is None:
    return 0
  parts = [content] if isinstance(content, str) else content
  return sum(
    1000 if isinstance(part, bytes) else math.ceil(len(part.encode("utf-8", "replace")) / 3.5) for part in parts
  )


class Account:
  """The tokens and money that a run has spent, and its budget; a running call counts with the most it may take."""

  calls: int
  cached_calls: int
  prompt_tokens: int
  completion_tokens: int
  largest_prompt: int  # tokens

  def __init__(
    self,
    max_tokens: int | None = None,
    max_cost: float | None = None,
    *,
    prompt_price: float = 0.0,
    completion_price: float = 0.0,
  ):
    """Make an account; prices are for a million tokens, `max_cost` in their currency.

    Raises ValueError for a limit that is not above 0, a price below 0, or a `max_cost` without a price.
    """
    for name, limit in (("max_tokens", max_tokens), ("max_cost", max_cost)):
      if limit is not None and not 0 < limit < math.inf:
        raise ValueError(f"{name} = {limit} must be above 0; None sets no limit")
    for name, price in (("prompt_price", prompt_price), ("completion_price", completion_price)):
      if not 0 <= price < math.inf:
        raise ValueError(f"{name} = {price} must be 0 or above")
    if max_cost is not None and prompt_price == completion_price == 0:
      raise ValueError(f"max_cost = {max_cost} needs prompt_price or completion_price: without them nothing costs")
    self.max_tokens, self.max_cost = max_tokens, max_cost
    self.book: EngineCache | None = None
    self._prices = prompt_price, completion_price
    vars(self).update(_nothing())
    self._begin()
    _forked.add(self)

  def _begin(self) -> None:
    """Begin without calls. So does a fork: it has none of its parent's threads, which make and book their own calls."""
    self._settled, self._booking = threading.Condition(), threading.Lock()
    self._running: list[_Call] = []
    self._waiting: list[_Call] = []
    self._unbooked = _nothing()

  @property
  def tokens(self) -> int:
    """Tokens spent, of prompts and answers."""
    return self.prompt_tokens + self.completion_tokens

  @property
  def cost(self) -> float:
    """Money spent."""
    return self._cost(self.prompt_tokens, self.completion_tokens)

  def keep(self, book: "EngineCache") -> None:
    """Book every call in the file of `book` from now on, and go on from its totals: one file, one account.

    If the engine's cache is `book`, an answer and its counts are written together: a process may be killed any time.
    """
    self.book = book
    self.restore(book.spent())
    self._unbooked = _nothing()

  @contextlib.contextmanager
  def spending(self, prompt_tokens: int, completion_tokens: int) -> Iterator[Callable[..., None]]:
    """Reserve the most tokens that a call may take; yield `note(completion, key, text)`, which books its real tokens.

    With a `key`, the text is written to the cache that is the book as well.

    A call that the budget does not cover beside the running calls waits for them to end. Raises BudgetError if the call
    could still overspend when the only running calls are those in which a waiting call is made.
    """
    self._hear_of_others()
    call = _Call(prompt_tokens, completion_tokens, _around.get())
    with self._settled:
      self._waiting.append(call)
      try:
        while over := self._over(call):
          held_up = {id(outer) for waiting in self._waiting for outer in waiting.around}
          if all(id(running) in held_up for running in self._running):
            raise BudgetError(over)
          if not self._settled.wait(PATIENCE):
            raise BudgetError(f"{over}, and none of the calls that are running has ended for {PATIENCE:,} s")
        self._running.append(call)
      finally:
        self._waiting.remove(call)
    token = _around.set((*call.around, call))
    try:
      yield self._note
    finally:
      _around.reset(token)
      with self._settled:
        self._running.remove(call)
        self._settled.notify_all()

  def _hear_of_others(self) -> None:
    """Take over the totals if other processes have booked in the same file: forks of this one share its budget."""
    if self.book is None or not self.book.was_changed_by_others():
      return
    with self._booking:
      booked = self.book.spent()
      with self._settled:
        vars(self).update(_merge(booked, self._unbooked))

  def _over(self, call: "_Call") -> str:
    """Return a message if a call could overspend beside the running calls, else an empty text."""
    prompt = self.prompt_tokens + sum(c.prompt_tokens for c in (call, *self._running))
    completion = self.completion_tokens + sum(c.completion_tokens for c in (call, *self._running))
    tokens, cost = prompt + completion, self._cost(prompt, completion)
    if self.max_tokens is not None and tokens > self.max_tokens:
      return f"the call may bring the run to {tokens:,} tokens, budgeted are {self.max_tokens:,}"
    if self.max_cost is not None and cost > self.max_cost:
      return f"the call may bring the run to a cost of {cost:.4f}, budgeted are {self.max_cost}"
    return ""

  def _note(self, completion: Completion, key: str = "", text: str = "") -> None:
    prompt, answer = completion.prompt_tokens, completion.completion_tokens
    counts = {"calls": 1, "prompt_tokens": prompt, "completion_tokens": answer, "largest_prompt": prompt}
    with self._booking:  # no other thread books this call without its answer
      self._add(counts)
      self._save(key, text)

  def note_cached(self) -> None:
    """Count a call that the cache answered; it costs nothing."""
    self._add({"cached_calls": 1})

  def _add(self, counts: Mapping[str, int]) -> None:
    with self._settled:
      _merge(self._unbooked, counts)
      _merge(vars(self), counts)

  def save(self) -> None:
    """Book the counts that are not booked yet. Raises EngineError if that fails; the next call tries again."""
    with self._booking:
      self._save()

  def _save(self, key: str = "", text: str = "") -> None:
    if self.book is None:
      return
    with self._settled:
      counts, self._unbooked = self._unbooked, _nothing()
    try:
      self.book.enter(counts, key, text)
    except BaseException as error:
      with self._settled:
        _merge(self._unbooked, counts)
      if isinstance(error, EngineError) and counts["calls"]:
        tokens = counts["prompt_tokens"] + counts["completion_tokens"]
        raise EngineError(f"{error}; not booked: {counts['calls']:,} answered calls, {tokens:,} tokens") from None
      raise

  def state(self) -> dict[str, Any]:
    """Return the counts and the cost, for a file."""
    return {**{name: getattr(self, name) for name in COUNTS}, "cost": self.cost}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Go on from `state()`. Raises ValueError for anything else."""
    counts: dict[str, Any] = {name: state.get(name) for name in COUNTS}
    if wrong := [name for name, n in counts.items() if type(n) is not int or not 0 <= n <= LARGEST]:
      raise ValueError(f"{wrong[0]} = {str(counts[wrong[0]])[:50]} is no number of calls or tokens")
    with self._settled:
      self._unbooked.update(counts)
      vars(self).update(counts)

  def _cost(self, prompt_tokens: int, completion_tokens: int) -> float:
    return (prompt_tokens * self._prices[0] + completion_tokens * self._prices[1]) / 1e6


@dataclasses.dataclass(eq=False)
class _Call:
  """A running or waiting call: the most tokens that it may take, and the calls in which it is made."""

  prompt_tokens: int
  completion_tokens: int
  around: tuple["_Call", ...]


_around: contextvars.ContextVar[tuple[_Call, ...]] = contextvars.ContextVar("calls_around", default=())


def _nothing() -> dict[str, int]:
  return dict.fromkeys(COUNTS, 0)


def _merge(into: dict[str, Any], counts: Mapping[str, int]) -> dict[str, Any]:
  for name, n in counts.items():
    into[name] = max(into[name], n) if name == "largest_prompt" else into[name] + n
  return into


_forked: weakref.WeakSet[Any] = weakref.WeakSet()  # objects with locks, which a fork may find held by no thread


def _begin_in_fork() -> None:
  for shared in list(_forked):
    shared._begin()


if hasattr(os, "register_at_fork"):
  os.register_at_fork(after_in_child=_begin_in_fork)


class EngineCache:
  """A cache of answers by model, prompt and sampling parameters, in one SQLite file that several processes may share.

  `Account.keep` makes it the book of an account as well.
  """

  def __init__(self, path: str, *, survives_power_loss: bool = True):
    """Open the file, or make one. Every answer is flushed to the disk, unless it need only survive `kill -9`.

    Raises EngineError for another file.
    """
    self.path, self._survives_power_loss = path, survives_power_loss
    self._inherited: list[sqlite3.Connection] = []
    self._file: Any = None
    self._begin()
    self._open()
    _forked.add(self)

  def _begin(self) -> None:
    """Begin without a connection. A fork must not close its parent's: that would break the parent's locks."""
    if self._file is not None:
      self._inherited.append(self._file)
    self._lock, self._version = threading.Lock(), -1
    self._file: Any = None

  def _open(self) -> None:
    columns = ", ".join(f"{name} INTEGER NOT NULL" for name in COUNTS)
    with self._errors():
      self._file = sqlite3.connect(self.path, check_same_thread=False, timeout=60)
      with self._file:
        self._file.execute("PRAGMA journal_mode = WAL")
        self._file.execute(f"PRAGMA synchronous = {'FULL' if self._survives_power_loss else 'NORMAL'}")
        self._file.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, text TEXT NOT NULL)")
        self._file.execute(f"CREATE TABLE IF NOT EXISTS spent ({columns})")

  @contextlib.contextmanager
  def _transaction(self) -> Iterator[sqlite3.Connection]:
    with self._lock:
      if self._file is None:
        self._open()
      file: Any = self._file
      with self._errors(), file:
        yield file

  def get(self, key: str) -> str | None:
    """Return the cached answer, or None."""
    with self._transaction() as file:
      row = file.execute("SELECT text FROM answers WHERE key = ?", (key,)).fetchone()
    return row[0] if row and isinstance(row[0], str) else None

  def put(self, key: str, text: str) -> None:
    """Keep an answer. Raises EngineError when the disk is full."""
    self.enter({}, key, text)

  def enter(self, counts: Mapping[str, int], key: str = "", text: str = "") -> None:
    """Book counts, and with a key an answer, in one transaction. Raises EngineError when the disk is full."""
    with self._transaction() as file:
      if any(counts.values()):
        file.execute(f"INSERT INTO spent VALUES ({', '.join('?' * len(COUNTS))})", [counts[name] for name in COUNTS])
      if key:
        file.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, text))

  def was_changed_by_others(self) -> bool:
    """Tell whether another process has written since the last call; the first call always says so."""
    with self._transaction() as file:
      version = file.execute("PRAGMA data_version").fetchone()[0]
    known, self._version = self._version, version
    return version != known

  def spent(self) -> dict[str, int]:
    """Return the booked totals. Raises EngineError if they were damaged."""
    least = f"min({', '.join(COUNTS)})"
    whole = " AND ".join(f"typeof({name}) = 'integer'" for name in COUNTS)
    totals = ", ".join(f"{'max' if name == 'largest_prompt' else 'sum'}({name})" for name in COUNTS)
    with self._transaction() as file:
      damaged = file.execute(f"SELECT count(*) FROM spent WHERE NOT ({whole}) OR {least} < 0").fetchone()[0]
      row = file.execute(f"SELECT {totals} FROM spent").fetchone()
    if damaged:
      raise EngineError(f"the account in {self.path} was damaged: {damaged} of its lines hold no numbers of tokens")
    return {name: n or 0 for name, n in zip(COUNTS, row, strict=True)}

  @contextlib.contextmanager
  def _errors(self) -> Iterator[None]:
    try:
      yield
    except sqlite3.Error as error:
      raise EngineError(f"the cache of answers {self.path} cannot be used: {error}") from None

  @staticmethod
  def key(model: str, content: Content, system_prompt: str | None, sampling: dict[str, Any]) -> str:
    """Return the SHA-256 of everything that an answer depends on."""
    parts = [content] if isinstance(content, str) else content
    plain = [{"image": hashlib.sha256(part).hexdigest()} if isinstance(part, bytes) else part for part in parts]
    return hashlib.sha256(json.dumps([model, plain, system_prompt, sampling], sort_keys=True).encode()).hexdigest()

"""Engines, which answer prompts, one at a time or many at once."""

import abc
import concurrent.futures
import contextvars
import functools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from selfrag_jax.textgrad.limits import (
  Account,
  Completion,
  Content,
  ContextBudgetError,
  EngineCache,
  EngineError,
  believed,
  estimate_tokens,
)
from selfrag_jax.textgrad.options import check_limit, check_options, open_cache

T = TypeVar("T")
LOGGED = 1000  # prompts that a `CallableEngine` keeps


class EngineLM(abc.ABC):
  """Anything that answers a prompt; `concurrency` says how many threads may ask at once."""

  model_string: str = "engine"
  concurrency: int = 16

  @abc.abstractmethod
  def generate(self, content: Content, system_prompt: str | None = None, **sampling: Any) -> str:
    """Answer a prompt."""

  def __call__(self, content: Content, system_prompt: str | None = None, **sampling: Any) -> str:
    """Answer a prompt."""
    return self.generate(content, system_prompt=system_prompt, **sampling)


class MeteredEngine(EngineLM):
  """An engine with a context limit, a cache and an account; subclasses implement `complete`."""

  address = ""  # of the model's server: models of one name on two servers may differ

  def __init__(
    self,
    model_string: str,
    *,
    context_tokens: int | None = None,
    cache: Any = None,
    account: Account | None = None,
    count_tokens: Callable[[Content | None], int] = estimate_tokens,
    concurrency: int = 16,
    **sampling: Any,
  ):
    """Set the limits.

    Args:
      model_string: name of the model, a part of the cache's key.
      context_tokens: how many tokens the prompt and the longest answer may have together; None: nothing is checked.
      cache: answers on disk: a file, a folder, an `EngineCache`, or True for a file among the user's caches.
      account: the account to which calls are booked.
      count_tokens: counts the tokens of a prompt; an estimate from its bytes by default.
      concurrency: how many threads may ask at once.
      **sampling: parameters of every call, such as temperature and max_tokens.

    Raises ValueError for a limit below 1.
    """
    for name, limit in (("context_tokens", context_tokens), ("concurrency", concurrency)):
      check_limit(name, limit)
    self.model_string, self.context_tokens, self.concurrency = model_string, context_tokens, concurrency
    self.cache = open_cache(cache)
    self.account, self.count_tokens, self.sampling = account, count_tokens, sampling
    check_options(type(self), sampling)

  @abc.abstractmethod
  def complete(self, content: Content, system_prompt: str | None, **sampling: Any) -> Completion:
    """Answer a prompt without checking limits."""

  def generate(self, content: Content, system_prompt: str | None = None, **sampling: Any) -> str:
    """Answer a prompt.

    Raises TypeError for content that is no prompt, ValueError for an unknown option, ContextBudgetError, BudgetError
    and EngineError.
    """
    check_options(type(self), sampling)
    sampling = {**self.sampling, **sampling}
    content, system_prompt = _prompt(content), None if system_prompt is None else _prompt_text(system_prompt)
    prompt_tokens = self.count_tokens(content) + self.count_tokens(system_prompt)
    longest = sampling.get("max_completion_tokens") or sampling.get("max_tokens") or 0
    if self.context_tokens is not None and prompt_tokens + longest > self.context_tokens:
      raise ContextBudgetError(
        f"a prompt of {prompt_tokens:,} tokens and an answer of up to {longest:,} exceed the context of "
        f"{self.model_string}, {self.context_tokens:,}: use_gradient_rag=True keeps prompts in a budget"
      )
    key = EngineCache.key(self.address + self.model_string, content, system_prompt, sampling) if self.cache else ""
    if self.cache and (known := self.cache.get(key)) is not None:
      if self.account:
        self.account.note_cached()
      return known
    with (self.account or Account()).spending(prompt_tokens, longest) as note:
      completion = self.complete(content, system_prompt, **sampling)
      text = _plain(completion.text) if isinstance(completion.text, str) else ""
      told, answered = believed(completion.prompt_tokens, prompt_tokens), self.count_tokens(text)
      in_book = bool(self.account and text and self.cache is self.account.book)
      counted = Completion(text, told, believed(completion.completion_tokens, answered))
      note(counted, *((key, text) if in_book else ()))
      if self.cache and text and not in_book:
        self.cache.put(key, text)
    return _text(completion.text, self)


class CallableEngine(MeteredEngine):
  """A function (content, system_prompt) -> text as an engine: a local model, or a script.

  For tests, a list of answers is given out in its order; `calls` holds the last prompts.
  """

  def __init__(
    self,
    answer: Callable[[Content, str | None], str] | Sequence[str],
    model_string: str = "callable",
    **limits: Any,
  ):
    """See `MeteredEngine` for the limits."""
    super().__init__(model_string, **limits)
    self._answers = None if callable(answer) else iter(answer)
    self._answer = answer if callable(answer) else self._next
    self._log = threading.Lock()
    self.calls: list[tuple[Content, str | None]] = []
    self._asked = 0

  def complete(self, content: Content, system_prompt: str | None, **sampling: Any) -> Completion:
    """Ask the function."""
    with self._log:
      self.calls.append((content, system_prompt))
      del self.calls[:-LOGGED]
      self._asked += 1
    text = self._answer(content, system_prompt)
    answered = self.count_tokens(text) if isinstance(text, str) else 0  # `generate` refuses an answer that is no text
    return Completion(text, self.count_tokens(content) + self.count_tokens(system_prompt), answered)

  def _next(self, content: Content, system_prompt: str | None) -> str:
    with self._log:
      for answer in self._answers or ():
        return answer
    raise EngineError(f"the script of {self.model_string} has ended after {self._asked - 1} answers")


class Request(NamedTuple):
  """A prompt for an engine, with its system prompt."""

  content: Content
  system_prompt: str | None


def ask_all(engine: EngineLM, requests: Sequence[Request]) -> Iterator[str]:
  """Send all requests at once, up to the engine's `concurrency`; yield the answers in the order of the requests.

  When a call raises, calls that have not begun are not made; answers before it are yielded, then the error is raised.
  """
  calls = [functools.partial(engine, content, system_prompt=system) for content, system in requests]
  for answer in at_once(calls, getattr(engine, "concurrency", EngineLM.concurrency)):
    yield _text(answer, engine)


def at_once(calls: Sequence[Callable[[], T]], workers: int) -> Iterator[T]:
  """Make calls in up to `workers` threads, the current one included; yield the results in the order of the calls.

  When a call raises, calls that have not begun are not made; results before it are yielded, then the error is raised.
  """
  workers = min(workers, len(calls))
  if workers <= 1:
    for call in calls:
      yield call()
    return
  futures: list[concurrent.futures.Future[T]] = [concurrent.futures.Future() for _ in calls]
  waiting: queue.SimpleQueue[tuple[concurrent.futures.Future[T], Callable[[], T]]] = queue.SimpleQueue()
  for item in zip(futures, calls, strict=True):
    waiting.put(item)
  is_over, context = threading.Event(), contextvars.copy_context()

  def work(place: int, caught: type[BaseException]) -> None:
    if place < workers and not waiting.empty():  # each thread starts the next: instant calls need no other thread
      _helpers.do(functools.partial(work, place + 1, BaseException))
    while not is_over.is_set():
      try:
        future, call = waiting.get_nowait()
      except queue.Empty:
        return
      try:  # in the caller's context, from which the account knows which calls wait for these
        future.set_result(context.copy().run(call))
      except caught as error:  # raised again where the result is asked for
        is_over.set()
        future.set_exception(error)

  try:
    work(1, Exception)  # a Ctrl-C arrives in this thread, is not caught, and waits for no other thread
    for future in futures:
      while not (future.done() or concurrent.futures.wait([future], timeout=1.0).done):
        pass  # a Ctrl-C just before the wait begins is seen when the wait ends
      yield future.result()
  finally:
    is_over.set()


class _Helpers:
  """A pool of threads that wait for work, as many as were ever busy at once.

  The threads are daemons, which no executor of the standard library has: a program that is interrupted ends at once
  instead of waiting for answers from the network. They stay alive, because starting a thread takes longer than
  everything else that a call costs.
  """

  def __init__(self) -> None:
    self._lock, self._work, self._free = threading.Lock(), queue.SimpleQueue[Callable[[], None]](), 0

  def do(self, work: Callable[[], None]) -> None:
    """Start work in a thread at once."""
    with self._lock:
      if self._free:
        self._free -= 1
      else:
        threading.Thread(target=self._run, name="engine", daemon=True).start()
    self._work.put(work)

  def _run(self) -> None:
    while True:
      self._work.get()()
      with self._lock:
        self._free += 1


_helpers = _Helpers()
if hasattr(os, "register_at_fork"):  # a child process has none of its parent's threads
  os.register_at_fork(after_in_child=_helpers.__init__)


def _prompt(content: Any) -> Content:
  """Return a text, or texts and images, as UTF-8 can hold it. Raises TypeError for anything else."""
  if isinstance(content, (list, tuple)):
    return [part if isinstance(part, bytes) else _prompt_text(part) for part in content]
  return _prompt_text(content)


def _prompt_text(text: Any) -> str:
  if not isinstance(text, str):
    raise TypeError(
      f"an engine is asked a text, or a list of texts and images, not {type(text).__name__}; "
      "the text of a Variable is its value"
    )
  return _plain(text)


def _text(answer: Any, engine: EngineLM) -> str:
  if not isinstance(answer, str):
    raise EngineError(f"{getattr(engine, 'model_string', engine)} answered {type(answer).__name__}, not text")
  return _plain(answer)


def _plain(text: str) -> str:
  return text.encode("utf-8", "replace").decode()  # neither files nor requests can hold half of a surrogate pair

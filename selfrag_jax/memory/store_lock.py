"""The lock of a store, which keeps threads and forked processes apart."""

import contextlib
import os
import threading
import weakref

from selfrag_jax.memory.journal import StoreError


class StoreLock:
  """The lock of a store's threads. If the store writes to a folder, no fork of its process may take it.

  Parent and child would hand out the same ids and log them both. Any other store is copied by a fork, and nobody holds
  the lock of the copy, unless another thread was in the middle of a change: then it is half made, as after a Ctrl-C.
  """

  def __init__(self):
    self.folder: os.PathLike | None = None  # that the store writes to
    self.is_changing = False  # and, where nobody holds the lock, half changed
    self._threads, self._process = threading.RLock(), os.getpid()
    _LOCKS.add(self)

  @property
  def is_forked(self) -> bool:
    """Whether this is a fork of the process that opened the folder."""
    return self.folder is not None and os.getpid() != self._process

  @property
  def for_closing(self) -> contextlib.AbstractContextManager:
    """What to hold while the folder is given back, which may be done with any store."""
    return contextlib.nullcontext() if self.is_forked else self._threads

  def __enter__(self) -> None:
    if self.is_forked:
      raise StoreError(
        f"{self.folder} was opened in process {self._process}, of which this one is a fork: use the store there alone, "
        "or open the folder here, with read_only=True as long as the other writes"
      )
    self._threads.acquire()
    if self.is_changing:
      self._threads.release()
      way_out = "make it again" if self.folder is None else f"open {self.folder} again, which has all of it"
      raise StoreError(f"a change of this store was cut short, so it is half made, and closed: {way_out}")

  def __exit__(self, *_: object) -> None:
    self._threads.release()

  def free_after_fork(self) -> None:
    """Take the lock from threads that the child does not have; what the thread that forked holds, it still holds."""
    if self._threads.acquire(blocking=False):
      self._threads.release()
    else:
      self._threads = threading.RLock()


_LOCKS: weakref.WeakSet[StoreLock] = weakref.WeakSet()


def _after_fork() -> None:
  for lock in list(_LOCKS):
    lock.free_after_fork()


if hasattr(os, "register_at_fork"):  # Windows has no forks
  os.register_at_fork(after_in_child=_after_fork)

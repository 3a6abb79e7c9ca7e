"""The lock of a store, which keeps threads and forked processes apart."""

import contextlib
import os
import threading
import weakref

from selfrag_jax.memory.journal import StoreError


class StoreLock:
  """A lock between the threads of a store. If the store writes to a folder, no fork of the process may take the lock.

  Parent and child would otherwise give the same ids to new chunks and both log them. A store without a folder is copied
  by a fork, and no thread holds the copy's lock; if another thread was making a change, the copy is half changed, as
  after Ctrl-C, and the lock refuses it.
  """

  def __init__(self):
    self.folder: os.PathLike | None = None  # the folder that the store writes to
    self.is_changing = False  # a change is being made; if no thread holds the lock, the store is half changed
    self._threads, self._process = threading.RLock(), os.getpid()
    _LOCKS.add(self)

  @property
  def is_forked(self) -> bool:
    """Whether this process is a fork of the process that opened the folder."""
    return self.folder is not None and os.getpid() != self._process

  @property
  def for_closing(self) -> contextlib.AbstractContextManager:
    """The context in which to close the folder, of a half-changed store too: the threads' lock, or none in a fork."""
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
    """Replace the lock if a thread that the child lacks holds it; if the forking thread holds it, keep it."""
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

"""A lock that lets only one process at a time write to a folder."""

import contextlib
import os
import socket
from collections.abc import Iterator

from etils import epath

from selfrag_jax.storage.atomic import is_local

try:
  import fcntl
except ImportError:  # Windows has no advisory locks, so writers are not kept apart there
  fcntl = None


class FolderInUseError(RuntimeError):
  """Another process holds the lock of this folder."""


@contextlib.contextmanager
def lock_folder(path: epath.PathLike, advice: str) -> Iterator[None]:
  """Hold the lock of an existing folder, so that no other process writes into it.

  The lock is an exclusive `flock` on `<path>/.lock`; the operating system releases it however the process ends,
  `kill -9` included. Object storage has no locks: there the user must not start two writers of one folder.

  Raises:
    FolderInUseError: another process holds the lock; the message names that process and its host, and ends with the
      `advice`.
  """
  if fcntl is None or not is_local(path):
    yield
    return
  # bound to local names: if a store is not closed, this ends at interpreter exit, when the modules have gone
  getpid, flock, unlock, owner = os.getpid, fcntl.flock, fcntl.LOCK_UN, os.getpid()
  with open(epath.Path(path) / ".lock", "a+", errors="replace", opener=_no_link) as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      lock.seek(0)
      holder = lock.read().strip() or "another process, which has only just begun"  # and has not written its name yet
      raise FolderInUseError(f"{path} is in use by {holder}; {advice}") from None
    lock.truncate(0)
    lock.write(f"pid {owner} on {socket.gethostname()}\n")
    lock.flush()
    try:
      yield
    finally:
      if getpid() == owner:  # a fork shares the lock, but neither releases it nor holds it for longer
        flock(lock, unlock)


def _no_link(path: str, flags: int) -> int:
  """Open a file, but never through a link: whoever made the folder could have linked it to any file of the user."""
  return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)

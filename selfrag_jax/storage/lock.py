"""A lock that lets only one process at a time write to a folder."""

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import IO

from etils import epath

from selfrag_jax.storage.atomic import is_local
from selfrag_jax.storage.lease import LeaseHeldError, hold_lease

try:
  import fcntl
except ImportError:  # Windows has no advisory locks, so writers are not kept apart there
  fcntl = None


class FolderInUseError(RuntimeError):
  """Another process holds the lock of this folder."""


@contextlib.contextmanager
def lock_folder(path: epath.PathLike, advice: str) -> Iterator[None]:
  """Hold the lock of a folder, so that no other process writes into it. A local folder must exist.

  The lock is an exclusive `flock` on `<path>/.lock`; the operating system releases it however the process ends,
  `kill -9` included. In object storage it is a lease (see `hold_lease`), which is free a minute after a kill.

  Raises:
    FolderInUseError: another process holds the lock; the message names that process and its host, and ends with the
      `advice`.
    OSError: a folder in object storage cannot be written.
  """
  if not is_local(path):
    with contextlib.ExitStack() as held:
      try:
        held.enter_context(hold_lease(path))
      except LeaseHeldError as error:
        raise FolderInUseError(f"{path} is in use by {error}; {advice}") from None
      yield
    return
  if fcntl is None:
    yield
    return
  # bound to local names: if a store is not closed, this ends at interpreter exit, when the modules have gone
  getpid, flock, unlock, owner = os.getpid, fcntl.flock, fcntl.LOCK_UN, os.getpid()
  with _locked(path, advice) as lock:
    lock.truncate(0)
    lock.write(f"pid {owner} on {socket.gethostname()}\n")
    lock.flush()
    try:
      yield
    finally:
      if getpid() == owner:  # a fork shares the lock, but neither releases it nor holds it for longer
        flock(lock, unlock)


@contextlib.contextmanager
def _locked(path: epath.PathLike, advice: str) -> Iterator[IO[str]]:
  """Open and lock the file of a lock. Raises FolderInUseError."""
  assert fcntl is not None
  file = epath.Path(path) / ".lock"
  while True:
    with open(file, "a+", errors="replace", opener=_no_link) as lock:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another process, which has only just begun"  # and has not written its name yet
        raise FolderInUseError(f"{path} is in use by {holder}; {advice}") from None
      # a holder that failed deletes the file: who had opened it before would lock what nobody else can find
      if _is_at(lock, file):
        yield lock
        return


def _is_at(opened: IO[str], path: epath.Path) -> bool:
  """Tell whether the file that is open is the one that has this path."""
  try:
    return os.path.samestat(os.fstat(opened.fileno()), os.stat(path))
  except FileNotFoundError:
    return False


def _no_link(path: str, flags: int) -> int:
  """Open a file, but never through a link: whoever made the folder could have linked it to any file of the user."""
  return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)

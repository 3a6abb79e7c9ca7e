"""A lease on a folder in object storage, which has no locks: an object that its holder writes again and again.

Each write names the generation of the object that it replaces, and the storage refuses it if that is no longer there.
So of two processes that take the lease at once, one gets it. Whoever finds it taken waits for the next renewal: if none
comes, the holder was killed, and the lease is free. No clock is compared with another.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from etils import epath

RENEWED = 15.0  # seconds between renewals
EXPIRED = 60.0  # seconds without a renewal after which the lease is free
_NAME = ".lock"


class LeaseHeldError(RuntimeError):
  """Another process holds the lease; the message is the name of that process and of its host."""


@contextlib.contextmanager
def hold_lease(folder: epath.PathLike) -> Iterator[None]:
  """Hold the lease of a folder. Should another process take it meanwhile, this one ends at once, with exit code 1.

  That happens to a process that was stopped, or had no network, for a minute: it must not write any more.

  Raises LeaseHeldError, after at most EXPIRED seconds, and OSError if the folder cannot be written.
  """
  lease = _Lease(folder)
  lease.take()
  ended = threading.Event()
  renewals = threading.Thread(target=lease.keep, args=(ended,), name="lease", daemon=True)
  renewals.start()
  try:
    yield
  finally:
    ended.set()
    renewals.join()
    lease.give_back()


class _Lease:
  """The object, and the generation in which this process wrote it last."""

  def __init__(self, folder: epath.PathLike):
    import tensorstore  # TensorFlow, by which epath writes, has no conditional writes

    self._folder = os.fspath(folder).rstrip("/") + "/"
    self._value = f"pid {os.getpid()} on {socket.gethostname()}\n{uuid.uuid4()}\n".encode()
    self._generation = b""
    with _os_errors(self._folder, "opened"):
      self._store: Any = tensorstore.KvStore.open(self._folder).result()

  def take(self) -> None:
    """Take the lease, if need be after waiting for it to expire. Raises LeaseHeldError."""
    found, until = self._read(), time.monotonic() + EXPIRED
    if found.state == "value":
      said = f"{self._folder} is in use by {_holder(found)}, unless that was killed: waiting for a sign of life"
      print(f"{said}, at most {EXPIRED:.0f} seconds", file=sys.stderr, flush=True)
    while found.state == "value" and time.monotonic() < until:
      time.sleep(RENEWED / 15)
      before, found = found, self._read()
      if found.state == "value" and found.stamp.generation != before.stamp.generation:
        raise LeaseHeldError(_holder(found))
    if not self._write(found.stamp.generation):
      raise LeaseHeldError(_holder(self._read()))

  def keep(self, ended: threading.Event) -> None:
    """Renew the lease until `ended`."""
    while not ended.wait(RENEWED):
      try:
        if self._write(self._generation):
          continue
      except OSError as error:  # the network is away; once it is back, a renewal tells whether the lease is lost
        print(error, file=sys.stderr, flush=True)
        continue
      said = f"error: {self._folder}{_NAME} was deleted, or taken over by another process"
      print(f"{said}, to which this one showed no sign of life", file=sys.stderr, flush=True)
      os._exit(1)

  def give_back(self) -> None:
    """Delete the object, unless another process has replaced it."""
    with _os_errors(self._folder, "written"):
      self._store.write(_NAME, None, if_equal=self._generation).result()

  def _write(self, generation: bytes) -> bool:
    """Replace the object of a generation; tell whether it was there."""
    with _os_errors(self._folder, "written"):
      new = self._store.write(_NAME, self._value, if_equal=generation).result().generation
    if not new:  # the answer to a first try may have been lost, and this is the one to a second try
      found = self._read()
      new = found.stamp.generation if found.value == self._value else b""
    self._generation = new or self._generation
    return bool(new)

  def _read(self) -> Any:
    with _os_errors(self._folder, "read"):
      return self._store.read(_NAME).result()


@contextlib.contextmanager
def _os_errors(folder: str, done: str) -> Iterator[None]:
  try:
    yield
  except ValueError as error:  # of tensorstore; it ends with places in its source
    raise OSError(f"{folder} cannot be {done}: {str(error).split(' [', 1)[0]}") from error


def _holder(found: Any) -> str:
  return found.value.split(b"\n")[0].decode(errors="replace") or "another process"

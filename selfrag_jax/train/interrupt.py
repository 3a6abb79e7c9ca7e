"""The handler of Ctrl-C; no JAX, since the launchers set it before they import anything."""

import contextlib
import os
import threading
from types import FrameType

CONTEXTS = contextlib.contextmanager.__code__.co_filename


def interrupt(number: int, frame: FrameType | None, said: str = "") -> None:
  """Raise KeyboardInterrupt for a Ctrl-C, a little later where it would be dropped or leave a lock held.

  Python drops exceptions that are raised in a callback of the garbage collector, and JAX has such a callback: a program
  that makes many small objects, such as the optimizer of prompts, would go on after one Ctrl-C in ten. Raised within
  contextlib, on the way into a context or out of it, one would leave what a generator holds as it is: whoever asked for
  the same lock while the exception is handled would wait forever.
  """
  if frame is None or (frame.f_code.co_name != "_xla_gc_callback" and frame.f_code.co_filename != CONTEXTS):
    raise KeyboardInterrupt(said)
  threading.Timer(0.01, os.kill, (os.getpid(), number)).start()

"""The handler of Ctrl-C; no JAX, since the launchers set it before they import anything."""

import os
import threading
from types import FrameType


def interrupt(number: int, frame: FrameType | None, said: str = "") -> None:
  """Raise KeyboardInterrupt for a Ctrl-C, a little later where Python would drop the exception.

  Python drops exceptions that are raised in a callback of the garbage collector, and JAX has such a callback: a program
  that makes many small objects, such as the optimizer of prompts, would go on after one Ctrl-C in ten.
  """
  if frame is None or frame.f_code.co_name != "_xla_gc_callback":
    raise KeyboardInterrupt(said)
  threading.Timer(0.01, os.kill, (os.getpid(), number)).start()

"""Errors of the launchers: a mistake that the user can mend is one line, whatever raised it."""

import contextlib
import functools
import gc
import os
import signal
import sys
import threading
import time

import jax
import pytest
from absl import app
from jax._src import lib

from launch.command import _one_line, run
from selfrag_jax.train.interrupt import interrupt
from selfrag_jax.train.loop import StopSignal


def raises(error):
  def main(argv):
    raise error

  return main


def test_a_missing_extra_is_named_with_its_command():
  with pytest.raises(SystemExit, match=r"error: gguf is not installed: pip install -e '\.\[weights\]'"):
    _one_line(raises(ModuleNotFoundError("No module named 'gguf'", name="gguf")), [])


def test_a_bug_keeps_its_traceback():
  with pytest.raises(ModuleNotFoundError):
    _one_line(raises(ModuleNotFoundError("No module named 'selfrag_jax.x'", name="selfrag_jax.x")), [])


@pytest.mark.parametrize(
  "error", [MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating\n 9 bytes")]
)
def test_too_little_memory_is_one_line(error):
  with pytest.raises(SystemExit, match="error: not enough memory; smaller sizes, such as of a batch") as ended:
    _one_line(raises(error), [])
  assert "\n" not in str(ended.value)


@pytest.mark.parametrize("message", ["stopped; step 5 is saved", ""])
def test_ctrl_c_is_one_line_and_the_code_of_shells(capsys, monkeypatch, message):
  ended, stop = [], raises(KeyboardInterrupt(*filter(None, [message])))
  # the first comes while `main` runs, the second while a config loads
  monkeypatch.setattr(app, "run", lambda main, flags_parser: (main if message else stop)([]))
  monkeypatch.setattr(os, "_exit", ended.append)  # at once: XLA may still be compiling
  monkeypatch.setattr(signal, "signal", lambda *_: None)
  run(stop)
  assert ended == [130]
  assert capsys.readouterr().err == f"{message or 'stopped'}\n"


@pytest.mark.parametrize("handler", ["of launchers", "of training, at the second"])
def test_ctrl_c_is_not_lost_in_a_callback_of_the_garbage_collector(monkeypatch, handler):
  ended, stop = [], StopSignal()
  stop.requested = signal.SIGINT

  def collect_and_wait():
    lib._xla_gc_callback("start", {})  # as the collector calls it: what it raises is lost
    ended.append("callback")
    time.sleep(5)
    ended.append("wait")

  before = signal.signal(signal.SIGINT, interrupt if handler == "of launchers" else stop._note)
  gc.disable()
  try:
    with monkeypatch.context() as patch:
      patch.setattr(lib._jax, "collect_garbage", functools.partial(signal.raise_signal, signal.SIGINT))
      with pytest.raises(KeyboardInterrupt):
        collect_and_wait()
    assert ended == ["callback"]
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)
  finally:
    gc.enable()
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("way", ["in", "out"])
def test_ctrl_c_on_the_way_into_a_context_or_out_of_it_leaves_no_lock_held(way):
  lock, ended = threading.Lock(), []

  @contextlib.contextmanager
  def locked():
    with lock:
      yield

  def signal_within(frame, event, _):
    if event == ("return" if way == "in" else "call") and frame.f_code is code:
      sys.setprofile(None)
      signal.raise_signal(signal.SIGINT)

  def use_and_wait():
    try:
      with locked():
        ended.append("body")
      time.sleep(5)
    finally:  # as who saves what was done
      ended.append(lock.acquire(timeout=1))

  manager = contextlib._GeneratorContextManager
  code = (manager.__enter__ if way == "in" else manager.__exit__).__code__
  # Python runs the handler in the function that profiles; give it the frame that it would have without
  before = signal.signal(signal.SIGINT, lambda number, frame: interrupt(number, outside(frame)))

  def outside(frame):
    return frame.f_back if frame.f_code is signal_within.__code__ else frame

  sys.setprofile(signal_within)
  try:
    with pytest.raises(KeyboardInterrupt):
      use_and_wait()
    assert ended == ["body", True]
  finally:
    sys.setprofile(None)
    signal.signal(signal.SIGINT, before)

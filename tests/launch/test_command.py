"""Errors of the launchers: a mistake that the user can mend is one line, whatever raised it."""

import functools
import gc
import os
import signal
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

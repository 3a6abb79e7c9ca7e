"""Programs that are improved against unit tests: each test runs in a process of its own, with limits.

The limits keep faults from spreading: time, memory, no bytes written to files, and what a program starts ends with it.
They are no sandbox: a program may read and empty what the user may, and hide a process from its end. Let programs of a
model that is not trusted run in a container.
"""

import ast
import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

SECONDS, MEGABYTES = 5, 512  # of one test; a busy machine gets twice the time
TOO_LONG = "did not end in time"
_HARNESS = """
import json, os, resource, signal, sys, traceback
seconds, size = int(sys.argv[1]), int(sys.argv[2]) << 20
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))  # the second limit ends it without saying why
signal.alarm(2 * seconds)  # also when nobody is there any more to wait
resource.setrlimit(resource.RLIMIT_AS, (size, size))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
program, call = json.load(sys.stdin)
out = open(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
try:
  scope = {"__name__": "program"}
  exec(compile(program, "program", "exec"), scope)
  text = repr(eval(call, scope))
except BaseException as error:
  lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "program"]
  text = f"raised {type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")
out.write(text[:10000])
out.flush()
os._exit(0)
"""


class UnitTest(NamedTuple):
  """A call, and the literal that it should return."""

  call: str
  result: str


def run_test(program: str, call: str, seconds: int = SECONDS, megabytes: int = MEGABYTES) -> str:
  """Return what a call of a program returns, as a literal, or what became of it instead."""
  command = [sys.executable, "-I", "-c", _HARNESS, str(seconds), str(megabytes)]
  with (
    tempfile.TemporaryDirectory() as folder,
    subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      encoding="utf-8",
      errors="replace",
      cwd=folder,
      env={},
      start_new_session=True,
    ) as process,
  ):
    try:
      answer, _ = process.communicate(json.dumps([program, call]), timeout=2 * seconds)
    except subprocess.TimeoutExpired:
      return TOO_LONG
    finally:  # what it has started goes with it
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
  if process.returncode in (-signal.SIGXCPU, -signal.SIGALRM):
    return TOO_LONG
  return "crashed" if process.returncode else answer


def is_same_value(answer: str, result: str) -> bool:
  """Tell whether what `run_test` returned is the literal that was expected."""
  try:
    a, b = ast.literal_eval(answer), ast.literal_eval(result)
    return bool(a == b) and _truths(a) == _truths(b)  # True == 1
  except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
    return answer == result


def _truths(value: object) -> object:
  """Return which parts of a literal are True or False."""
  if isinstance(value, dict):
    return {key: _truths(part) for key, part in value.items()}
  return [_truths(part) for part in value] if isinstance(value, (list, tuple)) else isinstance(value, bool)


def read_program(path: Path) -> tuple[str, list[UnitTest]]:
  """Read a JSON file with a `program`, a text, and `tests`, each with a `call` and the literal `result`.

  Raises ValueError for another file.
  """
  try:
    content = json.loads(path.read_text("utf-8"))
    tests = [UnitTest(str(test["call"]), str(test["result"])) for test in content["tests"]]
    for test in tests:
      ast.parse(test.call, mode="eval")
      ast.literal_eval(test.result)
    return str(content["program"]), tests
  except (ValueError, KeyError, TypeError, SyntaxError) as error:
    raise ValueError(f"{path} holds no program with its tests: {error!r}") from None


class RomanNumerals:
  """A program that writes Roman numerals without the pairs for 4 and 9, a critic that errs, and an optimizer.

  The embedded task: the programs are real and are run; critic and optimizer are scripted.
  """

  PROGRAM = """\
def to_roman(number):
  pairs = [(1000, "M"), (500, "D"), (100, "C"), (50, "L"), (10, "X"), (5, "V"), (1, "I")]
  text = ""
  for value, letters in pairs:
    while number >= value:
      text, number = text + letters, number - value
  return text"""
  MISSING = ((900, "CM"), (400, "CD"), (90, "XC"), (40, "XL"), (9, "IX"), (4, "IV"))
  _PAIR = re.compile(r'\((\d+), "(\w+)"\)')

  def __init__(self, noise: float, seed: int):
    self.noise, self._seed = noise, seed

  def tests(self, rng: np.random.Generator, n: int) -> list[UnitTest]:
    """Draw n tests."""
    return [UnitTest(f"to_roman({i})", repr(self.numeral(i))) for i in rng.integers(1, 4000, n).tolist()]

  def numeral(self, number: int) -> str:
    """Write a number from 1 to 3,999."""
    text = ""
    for value, letters in sorted([*self._pairs(self.PROGRAM).items(), *self.MISSING], reverse=True):
      text += letters * (number // value)
      number %= value
    return text

  def criticise(self, content: str, system_prompt: str | None) -> str:
    """Be the critic: name a pair that the test lacked, or, with the probability `noise`, one that is wrong."""
    number = int(re.findall(r"to_roman\((\d+)\)", content)[0])
    known, digits = self._pairs(content), str(number)
    for value, letters in self.MISSING:
      place = len(str(value))
      is_needed = len(digits) >= place and digits[-place] == str(value)[0]
      if is_needed and known.get(value) != letters:
        rng = np.random.default_rng([self._seed, zlib.crc32(content.encode())])
        said = letters[::-1] if rng.random() < self.noise else letters
        return f'The pairs lack ({value}, "{said}").'
    return "Nothing has to change here."

  def optimize(self, content: str, system_prompt: str | None) -> str:
    """Be the optimizer: put the pairs in that most of the feedback, past feedback too, speaks for."""
    start, end = content.index("<VARIABLE>"), content.index("</VARIABLE>")
    program, rest = content[start + len("<VARIABLE>") : end].strip(), content[end:]
    votes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for value, letters in re.findall(r'lack \((\d+), "(\w+)"\)', rest):
      votes[value][letters] += 1
    said = {int(value): counts.most_common(1)[0][0] for value, counts in votes.items()}
    pairs = sorted((self._pairs(program) | said).items(), reverse=True)
    line = ", ".join(f'({value}, "{letters}")' for value, letters in pairs)
    return f"<IMPROVED_VARIABLE>{re.sub(r'pairs = .*', f'pairs = [{line}]', program)}</IMPROVED_VARIABLE>"

  def _pairs(self, text: str) -> dict[int, str]:
    found: Sequence[str] = re.findall(r"pairs = (.*)", text)
    return {int(value): letters for value, letters in self._PAIR.findall(found[0] if found else "")}

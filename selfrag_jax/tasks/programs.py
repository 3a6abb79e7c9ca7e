"""Programs that are improved against unit tests: each test runs in a process of its own, isolated and with limits.

The isolation depends on the system, and `isolation` describes it. On Linux, namespaces take away the network, other
processes and all files but the interpreter's; where containers refuse namespaces, Landlock (Linux 5.13) takes away
files, TCP and signals; seccomp refuses sockets, keys, and memory that no limit counts. Time, memory and the size of the
answer are limited everywhere.
"""

import ast
import collections
import contextlib
import functools
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

SECONDS, MEGABYTES = 5, 512  # of one test and all processes that it starts; a busy machine gets twice the time
TOO_LONG = "did not end in time"
TOO_LARGE = "took too much memory, or too many processes"
TOO_MUCH = "wrote too much"
LARGEST = 1 << 16  # bytes of an answer; the sandbox itself writes fewer
PROCESSES, THREADS = 64, 512  # of one test; counted here because the system's limit per user does not hold for root
TICK = 0.05  # seconds between two looks at the memory
SANDBOX = Path(__file__).with_name("sandbox.py")


class UnitTest(NamedTuple):
  """A call and the literal that it should return."""

  call: str
  result: str


def run_test(program: str, call: str, seconds: int = SECONDS, megabytes: int = MEGABYTES) -> str:
  """Run a call of a program; return its result as a literal, or a description of its failure."""
  with tempfile.TemporaryFile() as request:
    request.write(json.dumps([program, call]).encode())
    request.seek(0)
    with _sandbox(request, str(seconds), str(megabytes)) as process:
      answer, failed = _read(process, time.monotonic() + 2 * seconds, megabytes << 20)
  if process.returncode in (128 + signal.SIGXCPU, 128 + signal.SIGALRM):
    return failed or TOO_LONG
  return failed or ("crashed" if process.returncode else answer.decode("utf-8", "replace"))


@functools.cache
def isolation() -> str:
  """Describe in words what programs can and cannot reach on this system."""
  with _sandbox(subprocess.DEVNULL) as process:
    answer, _ = _read(process, time.monotonic() + 60, 1 << 30)
  closed = json.loads(answer) if answer else {}
  is_alone = "processes" in closed
  facts = {
    "files other than the interpreter's": "files" in closed,
    "the environments and memory of other processes": "files" in closed,
    "the network" if "network" in closed or "tcp" not in closed else "the network but TCP": "network" in closed,
    "signals to other processes": is_alone or "signals" in closed,
    "processes that outlive their test": is_alone or "children" in closed,
  }
  said = (("cannot reach", True), ("CAN reach", False))
  lists = [(how, [what for what, is_closed in facts.items() if is_closed is wanted]) for how, wanted in said]
  words = "; ".join(f"{how} {', '.join(whats)}" for how, whats in lists if whats)
  advice = "" if all(facts.values()) else ": run those that you do not trust in a virtual machine"
  return f"programs have limits of time and memory; they {words}{advice}"


@contextlib.contextmanager
def _sandbox(stdin: IO[bytes] | int, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
  """Start the sandbox in an empty folder; on exit, end its processes and delete the folder."""
  folder = tempfile.mkdtemp()
  try:
    with subprocess.Popen(
      [sys.executable, "-I", str(SANDBOX), *arguments],
      stdin=stdin,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      cwd=folder,
      env={},
      start_new_session=True,
    ) as process:
      try:
        yield process
      finally:
        _kill(process)
  finally:
    with contextlib.suppress(RecursionError):
      shutil.rmtree(folder, ignore_errors=True)
    if os.path.exists(folder):  # too deep for Python, or its permissions removed by the program
      subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def _read(process: subprocess.Popen[bytes], end: float, size: int) -> tuple[bytes, str]:
  """Return the output of a process, and the reason why its end was not awaited ("" if it ended)."""
  assert process.stdout is not None
  answer, next_look = b"", time.monotonic() + TICK
  with selectors.DefaultSelector() as selector:
    selector.register(process.stdout, selectors.EVENT_READ)
    while True:
      if selector.select(TICK):
        part = os.read(process.stdout.fileno(), LARGEST)
        answer += part
        if len(answer) > LARGEST:
          return b"", TOO_MUCH
        if not part:
          break
      if time.monotonic() > next_look:  # even if output never pauses
        if _is_too_large(process.pid, size):
          return b"", TOO_LARGE
        next_look = time.monotonic() + TICK
      if time.monotonic() > end:
        return b"", TOO_LONG
  try:
    process.wait(max(end - time.monotonic(), 0))
  except subprocess.TimeoutExpired:
    return b"", TOO_LONG
  return answer, ""


def _kill(process: subprocess.Popen[bytes]) -> None:
  """End the processes of a sandbox: the end of the first one ends its namespace; without one, they end one by one."""
  for _ in range(100):  # the sandbox itself last: orphans become its children, and are found again
    if not (rest := _descendants(process.pid)):
      break
    for pid in rest:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
        os.killpg(pid, signal.SIGKILL)
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(process.pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
  """Return the descendants of a process that have not ended; none where the system does not list them."""
  below = collections.defaultdict(list)
  for entry in Path("/proc").glob("[0-9]*") if sys.platform == "linux" else ():
    with contextlib.suppress(OSError):
      state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
      if state != b"Z":
        below[int(parent)].append(int(entry.name))
  found = [pid]
  for parent in found:
    found += below[parent]
  return found[1:]


def _is_too_large(pid: int, size: int) -> bool:
  """Tell whether the descendants of a process are too many, or use more than `size` bytes; shared pages count once.

  A first check is cheap and counts shared pages for each process.
  """
  pids = _descendants(pid)
  if len(pids) > PROCESSES or _sum(pids, "stat", lambda text: int(text.rpartition(")")[2].split()[17])) > THREADS:
    return True
  page = os.sysconf("SC_PAGE_SIZE")
  return _sum(pids, "statm", lambda text: int(text.split()[1]) * page) > size < _sum(pids, "smaps_rollup", _share)


def _sum(pids: Sequence[int], name: str, read: Callable[[str], int]) -> int:
  total = 0
  for pid in pids:
    with contextlib.suppress(OSError, IndexError):  # the process has ended
      total += read(Path(f"/proc/{pid}/{name}").read_text())
  return total


def _share(text: str) -> int:
  return sum(int(kilobytes) << 10 for kilobytes in re.findall(r"^Pss: +(\d+)", text, re.MULTILINE))


def is_same_value(answer: str, result: str) -> bool:
  """Tell whether an answer of `run_test` is the expected literal."""
  try:
    a, b = ast.literal_eval(answer), ast.literal_eval(result)
    return bool(a == b) and _truths(a) == _truths(b)  # because True == 1
  except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
    return answer == result


def _truths(value: object) -> object:
  """Replace every part of a literal by whether it is True or False instead of another value."""
  if isinstance(value, dict):
    return {key: _truths(part) for key, part in value.items()}
  return [_truths(part) for part in value] if isinstance(value, (list, tuple)) else isinstance(value, bool)


def read_program(path: Path) -> tuple[str, list[UnitTest]]:
  """Read a JSON file with a `program`, a text, and `tests`, each with a `call` and the literal `result`.

  Raises ValueError for any other file.
  """
  try:
    content = json.loads(path.read_text("utf-8"))
    tests = [UnitTest(str(test["call"]), str(test["result"])) for test in content["tests"]]
    for test in tests:
      ast.parse(test.call, mode="eval")
      ast.literal_eval(test.result)
    if not isinstance(content["program"], str):
      raise TypeError(f"the program is {type(content['program']).__name__}, not text")
    return content["program"], tests
  except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
    raise ValueError(f"{path} holds no program with its tests: {error!r}") from None


class RomanNumerals:
  """A program that writes Roman numerals without the pairs for 4 and 9, a critic that errs, and an optimizer.

  This task needs no files and no network: the programs are real and are run, critic and optimizer are scripted.
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
    """Be the critic: name a pair that the program lacked in this test; with the probability `noise`, a wrong pair."""
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
    """Be the optimizer: insert the pairs that most of the feedback names, past feedback included."""
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

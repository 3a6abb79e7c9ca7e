"""Programs against unit tests: their results, the end of programs that fail or hang, and the built-in task."""

import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from selfrag_jax.tasks import programs
from selfrag_jax.tasks.programs import (
  TOO_LARGE,
  TOO_LONG,
  TOO_MUCH,
  RomanNumerals,
  is_same_value,
  isolation,
  read_program,
  run_test,
)

CLOSED = isolation()  # what this system allows; a test of what it does not is skipped
CAN = CLOSED.partition("CAN reach")[2]


@pytest.mark.parametrize(
  ("program", "call", "expected"),
  [
    ("def f(x): return {x: [1, None]}", "f('a')", "{'a': [1, None]}"),
    ("print('noise')\ndef f(): print('more'); return 1", "f()", "1"),
    ("def f(x):\n  y = 1\n  return y / x", "f(0)", "raised ZeroDivisionError: division by zero (line 3)"),
    ("def f(:", "f()", "raised SyntaxError: invalid syntax (program, line 1)"),
    ("import sys\nsys.exit(3)", "f()", "raised SystemExit: 3 (line 2)"),
    ("import os\nos.abort()", "f()", "crashed"),
    ("def f(): raise KeyError('\\udc80 µ')", "f()", "raised KeyError: '\\udc80 µ' (line 1)"),
    ("x = bytearray(1 << 33)", "x", "raised MemoryError:  (line 1)"),
    ("open('file', 'w').write('x' * 100000)", "1", "raised OSError: [Errno 27] File too large (line 1)"),
    ("x = 'a' * 50000", "x", "'" + "a" * 9999),
    ("import os\nos.write(1, b'\\xff')\nos.write(2, b'\\xff')", "1", "1"),
  ],
)
def test_what_a_test_returns(program, call, expected):
  assert run_test(program, call) == expected


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_tests_end(program):
  assert run_test(program, "1", seconds=1) == TOO_LONG


def test_programs_get_no_environment_and_leave_no_file(tmp_path, monkeypatch):
  monkeypatch.setenv("OPENAI_API_KEY", "secret")
  monkeypatch.chdir(tmp_path)
  assert "secret" not in run_test("import os", "dict(os.environ)")
  run_test("open('made', 'w')", "1")
  assert os.listdir(tmp_path) == []


def can(what):
  return pytest.mark.skipif(what in CAN, reason=CLOSED)


@can("environments")
def test_programs_cannot_read_the_environment_of_their_parents(monkeypatch):
  code = "import os\nos.environ.clear()\nfrom selfrag_jax.tasks.programs import run_test\n"
  program = f"""
import os
def f():
  found, pid = [], {{}}
  for pid in [*range(1, 50), {os.getpid()}, *(pid for pid in os.listdir('/proc') if pid.isdigit())]:
    try:
      found.append(open(f"/proc/{{pid}}/environ").read())
    except OSError:
      pass
  return found
"""
  hidden = {**os.environ, "OPENAI_API_KEY": "very-secret"}
  command = [sys.executable, "-c", f"{code}print(run_test({program!r}, 'f()'))"]
  said = subprocess.run(command, env=hidden, capture_output=True, text=True, check=True, timeout=60).stdout
  assert "very-secret" not in said
  assert said.strip() == "raised FileNotFoundError: [Errno 2] No such file or directory: '/proc' (line 5)" or (
    "raised PermissionError" in said
  )


@can("files other")
@pytest.mark.parametrize(
  "attack",
  [
    "open({file!r}, 'w')",
    "open({file!r}).read()",
    "__import__('os').truncate({file!r}, 0)",
    "__import__('os').remove({file!r})",
    "__import__('os').rename({file!r}, {file!r} + '2')",
    "__import__('os').symlink('/', {folder!r} + '/link')",
    "__import__('os').mkdir({folder!r} + '/made')",
    "__import__('os').chmod({file!r}, 0)",
    "__import__('os').listdir({folder!r})",
    "__import__('shutil').rmtree({folder!r})",
    "open('/proc/self/root' + {file!r}).read()",
  ],
)
def test_programs_cannot_touch_files(tmp_path, attack):
  file = tmp_path / "kept.txt"
  file.write_text("kept")
  before = file.stat()
  said = run_test("def f(g): return g()", f"f(lambda: {attack.format(file=str(file), folder=str(tmp_path))})")
  assert said.startswith(("raised FileNotFoundError", "raised PermissionError", "raised OSError")), said
  assert (file.read_text(), os.listdir(tmp_path)) == ("kept", ["kept.txt"])
  assert (file.stat().st_mode, file.stat().st_mtime) == (before.st_mode, before.st_mtime)


@can("the network")
def test_programs_have_no_network():
  with socket.socket() as listener, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    datagrams.bind(("127.0.0.1", 0))
    datagrams.settimeout(0.2)
    connect = f"__import__('socket').create_connection(('127.0.0.1', {listener.getsockname()[1]}), 1)"
    assert run_test("", connect).startswith("raised ")
    send = f"s.sendto(b'x', ('127.0.0.1', {datagrams.getsockname()[1]}))"
    run_test("import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)", send)
    with pytest.raises(TimeoutError):
      datagrams.recv(1)


@can("signals")
def test_programs_cannot_signal_others():
  program = f"""
import os, signal
def f():
  for pid in (os.getppid(), {os.getpid()}):
    try:
      os.kill(pid, signal.SIGUSR1 if pid == {os.getpid()} else 0)
    except (ProcessLookupError, PermissionError):
      pass
  return "lives"
"""
  assert run_test(program, "f()") == "'lives'"


def test_a_program_cannot_make_its_parent_grow():
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  flood = (
    "import os\nfor fd in range(3, 64):\n  try:\n    while True: os.write(fd, b'x' * 65536)\n  except OSError: pass"
  )
  began = time.monotonic()
  assert run_test(flood, "1") == TOO_MUCH
  assert time.monotonic() - began < 9  # it is not waited for
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


STAYS = """
import os, time
for _ in range(3):
  if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
      os.setsid()
      while True: time.sleep(1)
    while True: time.sleep(1)
"""


def is_left(count):
  """Return whether soon no more than `count` processes of this test's sandbox are left; `without` gives it a name."""
  end = time.monotonic() + 5
  while len(processes()) > count and time.monotonic() < end:
    time.sleep(0.01)
  return len(processes()) <= count


def processes():
  found = set()
  for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
      if bytes(programs.SANDBOX) in Path(f"/proc/{pid}/cmdline").read_bytes():
        found.add(pid)
    except OSError:
      pass
  return found


@can("outlive")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("refused", [(), ("unshare",)])
@pytest.mark.parametrize(("ending", "said"), [("", "1"), ("\nwhile True: pass", TOO_LONG)])
def test_what_a_program_starts_ends_with_it(tmp_path, monkeypatch, without, refused, ending, said):
  without(tmp_path, refused)
  assert run_test(STAYS + ending, "1", seconds=1 if said == TOO_LONG else 10) == said
  assert is_left(0)


BOMB = "import os, time\nwhile True:\n  try: os.fork()\n  except OSError: time.sleep(0.01)"
EATS = """
import os, time
for _ in range(8):
  if os.fork() == 0:
    kept = bytearray(50 << 20)
    for i in range(0, len(kept), 4096): kept[i] = 1
    time.sleep(60)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_processes_of_a_test_share_its_memory():
  began = time.monotonic()
  assert run_test(EATS, "1", seconds=10, megabytes=200) == TOO_LARGE
  assert time.monotonic() - began < 19  # before its time was over


@can("outlive")
def test_a_fork_bomb_ends(tmp_path, without):
  without(tmp_path, ())
  assert run_test(BOMB, "1", seconds=1) in (TOO_LARGE, TOO_LONG)
  assert is_left(2)


@pytest.mark.parametrize(
  "program",
  [
    "import os\nfor i in range(1500):\n  os.mkdir('a')\n  os.chdir('a')",
    "import os\nfor i in range(300): open(str(i), 'w').close()\nos.chmod('.', 0)",
    "import os\nos.mkdir('a')\nopen('a/b', 'w').close()\nos.chmod('a', 0)",
  ],
)
@pytest.mark.parametrize("refused", [(), ("unshare",), ("unshare", "Landlock")])
def test_the_working_folder_is_gone_afterwards(tmp_path, monkeypatch, without, program, refused):
  without(tmp_path, refused)
  (tmp_path / "work").mkdir()
  monkeypatch.setattr(programs.tempfile, "tempdir", str(tmp_path / "work"))
  run_test(program, "1")
  assert os.listdir(tmp_path / "work") == []


@pytest.mark.parametrize("refused", [("unshare", "seccomp"), ("unshare", "Landlock", "seccomp")])
def test_programs_run_where_the_system_refuses_to_close_anything(tmp_path, monkeypatch, without, refused):
  without(tmp_path, refused)
  try:
    said = isolation()
  finally:
    monkeypatch.undo()
    isolation.cache_clear()
  assert "CAN reach" in said
  assert ("the network" in said.partition("CAN reach")[2]) or "Landlock" in refused
  assert "virtual machine" in said
  without(tmp_path, refused)
  assert run_test("def f(x): return x * 2", "f('a')") == "'aa'"
  assert run_test("while True: pass", "1", seconds=1) == TOO_LONG
  assert run_test("import os\nos.abort()", "1") == "crashed"
  assert run_test("open('file', 'w').write('x' * 100000)", "1").startswith("raised OSError: [Errno 27]")
  isolation.cache_clear()


@can("files other")
def test_landlock_alone_closes_files_and_environments(tmp_path, without):
  (tmp_path / "secret").write_text("secret")
  without(tmp_path, ("unshare",))
  said = isolation()
  isolation.cache_clear()
  if "files other" in said.partition("CAN reach")[2]:
    pytest.skip("no Landlock")
  for path in (tmp_path / "secret", "/proc/self/environ", f"/proc/{os.getpid()}/environ", "/etc/passwd"):
    assert run_test("", f"open({str(path)!r}).read()").startswith("raised PermissionError")
  assert run_test("", f"open({str(tmp_path / 'made')!r}, 'w')").startswith("raised PermissionError")


def test_programs_import_what_is_installed_and_the_standard_library():
  names = "numpy, json, decimal, zoneinfo, random, subprocess, concurrent.futures, sqlite3"
  assert run_test(f"import {names}\ndef f(): return float(numpy.ones(3).sum())", "f()") == "3.0"


def test_programs_are_run_at_once_by_threads():
  said = {}
  threads = [threading.Thread(target=lambda i=i: said.update({i: run_test("", str(i))})) for i in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert said == {i: str(i) for i in range(8)}


def test_odd_programs_are_answers_not_errors():
  assert run_test("x = '\ud800'", "1").startswith("raised UnicodeEncodeError")
  assert run_test("", "'\\ud800'") == "'\\ud800'"
  assert run_test("(" * 100_000, "1").startswith("raised ")
  assert run_test("\0", "1").startswith("raised ")
  assert run_test("def f(): return f()", "f()").startswith("raised RecursionError")
  assert run_test("import os\nos._exit(7)", "1") == "crashed"
  assert len(run_test("x = '\\U0001f600' * 50_000", "x")) == 10_000


@pytest.mark.parametrize(
  "text", ["(" * 9999, "-" * 9999 + "1", "[" * 9999, "{1:" * 3000, "9" * 9999, "1" + "+1j" * 3000]
)
def test_hostile_literals_are_compared_in_words(text):
  assert not is_same_value(text, "1")


def test_values_are_compared_as_literals():
  assert is_same_value("{'a': 1, 'b': (2.0,)}", '{"b": (2,), "a": 1}')
  assert not is_same_value("'1'", "1")
  assert not is_same_value("[(True, 2)]", "[(1, 2)]")
  assert not is_same_value("{'a': [0]}", "{'a': [False]}")
  assert not is_same_value("{[1]: 2}", "1")
  assert not is_same_value("raised KeyError: 1", "1")
  assert not is_same_value("<object at 0x1>", "1")


def test_files(tmp_path):
  file = tmp_path / "task.json"
  file.write_text(json.dumps({"program": "def f(): ...", "tests": [{"call": "f()", "result": "[1, 'a']"}]}))
  assert read_program(file) == ("def f(): ...", [("f()", "[1, 'a']")])
  for content in (
    "no",
    "[]",
    '{"program": "", "tests": [{"call": "f("}]}',
    '{"program": 1, "tests": [{"call": "1", "result": "f()"}]}',
    '{"program": null, "tests": [{"call": "1", "result": "1"}]}',
  ):
    file.write_text(content)
    with pytest.raises(ValueError, match=r"task\.json holds no program with its tests"):
      read_program(file)


def test_roman_numerals():
  task = RomanNumerals(noise=0.0, seed=0)
  assert [task.numeral(i) for i in (1, 4, 9, 14, 49, 444, 1994, 3999)] == [
    "I", "IV", "IX", "XIV", "XLIX", "CDXLIV", "MCMXCIV", "MMMCMXCIX",
  ]  # fmt: skip
  assert run_test(task.PROGRAM, "to_roman(4)") == "'IIII'"
  program = task.PROGRAM
  for number in (1994, 494, 94, 4, 444, 44, 9):
    said = task.criticise(f"{program} to_roman({number})", None)
    reply = task.optimize(f"<VARIABLE> {program} </VARIABLE> {said}", None)
    program = reply.removeprefix("<IMPROVED_VARIABLE>").removesuffix("</IMPROVED_VARIABLE>")
  for test in task.tests(np.random.default_rng(0), 10):
    assert run_test(program, test.call) == test.result
  assert "Nothing" in task.criticise(f"{program} to_roman(1994)", None)


def test_the_critic_errs_as_often_as_it_should_and_most_of_the_feedback_wins():
  task = RomanNumerals(noise=0.4, seed=0)
  said = [task.criticise(f"{task.PROGRAM} to_roman(4) {i}", None) for i in range(1000)]
  assert np.mean(['"VI"' in text for text in said]) == pytest.approx(0.4, abs=0.05)
  reply = task.optimize(f"<VARIABLE> {task.PROGRAM} </VARIABLE> {' '.join(said)}", None)
  assert '(5, "V"), (4, "IV"), (1, "I")' in reply

"""Programs against unit tests: what they return, what becomes of those that do not, and the embedded task."""

import json
import os

import numpy as np
import pytest

from selfrag_jax.tasks.programs import TOO_LONG, RomanNumerals, is_same_value, read_program, run_test


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

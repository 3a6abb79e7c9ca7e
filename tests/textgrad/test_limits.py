"""The account of a run: each answer is booked, concurrent calls wait for it, and it is never overspent."""

import concurrent.futures
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import selfrag_jax.textgrad as tg
from selfrag_jax.textgrad.engine import Request, ask_all, at_once
from selfrag_jax.textgrad.limits import Completion

KILLED = """
import sys
import selfrag_jax.textgrad as tg
from selfrag_jax.textgrad.engine import Request, ask_all
from selfrag_jax.textgrad.limits import Completion

book = tg.EngineCache(sys.argv[1])
account = tg.Account(max_tokens=10**9)
account.keep(book)

class Paid(tg.MeteredEngine):
  def complete(self, content, system_prompt, **sampling):
    print(content, flush=True)  # the request was answered
    return Completion("answer to " + content, 7, 3)

engine = Paid("m", account=account, cache=book if sys.argv[2] == "cached" else None, concurrency=int(sys.argv[3]))
for _ in ask_all(engine, [Request(str(i), None) for i in range(5000)]):
  pass
"""


@pytest.mark.parametrize("cached", ["cached", "uncached"])
@pytest.mark.parametrize("concurrency", [1, 8])
def test_after_kill_9_the_account_equals_the_answers_that_were_paid(tmp_path, cached, concurrency):
  file = tmp_path / "answers.sqlite"
  process = subprocess.Popen([sys.executable, "-c", KILLED, file, cached, str(concurrency)], stdout=subprocess.PIPE)
  answered = [process.stdout.readline() for _ in range(200)]
  os.kill(process.pid, signal.SIGKILL)
  answered += process.communicate()[0].splitlines()
  account, book = tg.Account(), tg.EngineCache(str(file))
  account.keep(book)
  assert len(answered) - concurrency <= account.calls <= len(answered)  # each thread had one between answer and disk
  assert (account.prompt_tokens, account.completion_tokens) == (7 * account.calls, 3 * account.calls)
  if cached == "cached":
    with sqlite3.connect(file) as known:
      assert known.execute("SELECT count(*) FROM answers").fetchone() == (account.calls,)


def test_calls_at_once_wait_for_each_other_instead_of_ending_the_run():
  account = tg.Account(max_tokens=20_000)

  class Model(tg.MeteredEngine):
    def complete(self, content, system_prompt, **sampling):
      time.sleep(0.001)
      return Completion("yes", 50, 50)

  engine = Model("m", account=account, max_tokens=2000, concurrency=16)
  with pytest.raises(tg.BudgetError, match="20,000"):
    list(ask_all(engine, [Request("word " * 30, None)] * 1000))
  assert 17_900 < account.tokens <= 20_000


def test_a_call_inside_a_call_does_not_wait_for_it():
  account = tg.Account(max_tokens=1000)
  inner = tg.CallableEngine(lambda content, system: "x", account=account, max_tokens=600)
  for workers in (1, 4):
    calls = [lambda: inner("a")] * workers
    outer = tg.CallableEngine(
      lambda content, system, calls=calls: str(list(at_once(calls, 4))), account=account, max_tokens=600
    )
    with pytest.raises(tg.BudgetError):
      outer("b")
  wide = tg.Account(max_tokens=2000)
  inner.account = outer.account = wide
  assert outer("b") == "['x', 'x', 'x', 'x']"  # two fit at once, the others wait for them


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(300, 6000))
def test_sixteen_threads_with_errors_and_nested_calls_end_and_never_overspend(seed, budget):
  account, rng = tg.Account(max_tokens=budget), random.Random(seed)

  class Model(tg.MeteredEngine):
    def complete(self, content, system_prompt, **sampling):
      kind = rng.random()
      if kind < 0.1:
        raise tg.EngineError("gone")
      if kind < 0.3 and len(content) < 5:
        list(at_once([lambda: self(content + "x", max_tokens=rng.choice((5, 200)))] * 2, 2))
      time.sleep(rng.random() / 2000)
      return Completion("x", self.count_tokens(content), rng.randint(0, sampling["max_tokens"]))

  model = Model("m", account=account, max_tokens=100)

  def work(i):
    for _ in range(5):
      try:
        model("x")
      except tg.EngineError:
        pass
      except tg.BudgetError:
        return

  with concurrent.futures.ThreadPoolExecutor(16) as pool:
    for done in [pool.submit(work, i) for i in range(16)]:
      done.result(timeout=60)
  latest = time.monotonic() + 60  # beside a nested call that has failed another may be running, which ends by itself
  while account._running and time.monotonic() < latest:
    time.sleep(0.001)
  assert account.tokens <= budget
  assert not account._running
  assert not account._waiting


WAITS = """
import signal, sys, threading, time
import selfrag_jax.textgrad as tg
signal.signal(signal.SIGINT, signal.default_int_handler)
account = tg.Account(max_tokens=150)
begun = threading.Event()
def answer(content, system):
  begun.set()
  time.sleep(600)
engine = tg.CallableEngine(answer, account=account, max_tokens=100)
threading.Thread(target=engine, args=("a",), daemon=True).start()
begun.wait()
print("waits", flush=True)
engine("b")
"""


def test_ctrl_c_ends_the_wait_for_the_budget():
  process = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  assert process.stdout.readline() == b"waits\n"
  time.sleep(0.3)
  process.send_signal(signal.SIGINT)
  assert b"KeyboardInterrupt" in process.communicate(timeout=60)[1]


FORKED = """
import os, sys, threading
import selfrag_jax.textgrad as tg
account, book = tg.Account(max_tokens=150), tg.EngineCache(sys.argv[1])
account.keep(book)
begun, go = threading.Event(), threading.Event()
def answer(content, system):
  if content == "slow":
    begun.set()
    go.wait(60)
  return "x"
engine = tg.CallableEngine(answer, account=account, cache=book, max_tokens=100)
threading.Thread(target=engine, args=("slow",), daemon=True).start()
begun.wait()
child = os.fork()
if child == 0:
  os._exit(0 if engine("in the child") == "x" else 1)
assert os.waitpid(child, 0)[1] == 0
go.set()
assert engine("in the parent") == "x"
assert {book.get(k) for (k,) in book._file.execute("SELECT key FROM answers")} == {"x"}
"""


def test_a_forked_process_asks_and_books_too(tmp_path):
  subprocess.run([sys.executable, "-c", FORKED, tmp_path / "answers.sqlite"], check=True, timeout=120)
  account = tg.Account()
  account.keep(tg.EngineCache(str(tmp_path / "answers.sqlite")))
  assert account.calls == 3


def test_what_could_not_be_booked_is_said_and_booked_with_the_next_call(tmp_path):
  account, book = tg.Account(), tg.EngineCache(str(tmp_path / "answers.sqlite"))
  account.keep(book)
  pages = book._file.execute("PRAGMA page_count").fetchone()[0]
  book._file.execute(f"PRAGMA max_page_count = {pages}")  # as a full disk
  engine = tg.CallableEngine(lambda content, system: "x" * 10_000, account=account, cache=book)
  with pytest.raises(tg.EngineError, match=r"full; not booked: 1 answered calls, 2,859 tokens"):
    engine("hi")
  book._file.execute("PRAGMA max_page_count = 1000")
  engine("ho")
  later = tg.Account()
  later.keep(tg.EngineCache(str(tmp_path / "answers.sqlite")))
  assert later.state() == account.state()
  assert later.calls == 2


@pytest.mark.parametrize("damage", ["'many', 0, 0, 0, 0", "-1, 0, 0, 0, 0", "1.5, 0, 0, 0, 0"])
def test_a_damaged_account_is_an_error_in_words(tmp_path, damage):
  book = tg.EngineCache(str(tmp_path / "answers.sqlite"))
  with book._file:
    book._file.execute(f"INSERT INTO spent VALUES ({damage})")
  with pytest.raises(tg.EngineError, match=r"account in .*answers\.sqlite was damaged"):
    tg.Account().keep(book)


def test_a_damaged_answer_is_asked_again(tmp_path):
  book = tg.EngineCache(str(tmp_path / "answers.sqlite"))
  engine = tg.CallableEngine(lambda content, system: "yes", cache=book)
  engine("hi")
  with book._file:
    book._file.execute("UPDATE answers SET text = x'ff00'")
  assert engine("hi") == "yes"
  assert len(engine.calls) == 2


@pytest.mark.parametrize(
  "options",
  [
    {"max_tokens": 0},
    {"max_tokens": -5},
    {"max_cost": float("nan"), "prompt_price": 1.0},
    {"max_cost": 1.0},
    {"prompt_price": -1.0},
    {"completion_price": float("inf")},
  ],
)
def test_limits_that_limit_nothing_are_refused(options):
  with pytest.raises(ValueError, match=next(iter(options))):
    tg.Account(**options)


@pytest.mark.parametrize("state", [{}, {"calls": "3"}, {"calls": -1}, {"calls": 10**30}, {"calls": True}])
def test_an_account_goes_on_from_an_account_alone(state):
  whole = tg.Account().state()
  with pytest.raises(ValueError, match="no number of calls or tokens"):
    tg.Account().restore({**whole, **state} if state else state)


def test_half_a_surrogate_pair_in_a_prompt_is_asked_as_a_question_mark(tmp_path):
  engine = tg.CallableEngine(lambda content, system: content, cache=str(tmp_path / "a"), account=tg.Account())
  assert engine("a \ud800 b", system_prompt="\udfff") == "a ? b"
  assert json.dumps(engine.calls[0]) == json.dumps(["a ? b", "?"])


def test_a_call_is_booked_with_its_own_answer_and_no_other(tmp_path, monkeypatch):
  account, book = tg.Account(), tg.EngineCache(str(tmp_path / "answers.sqlite"))
  account.keep(book)
  entered, enter = [], book.enter

  def slow(counts, key="", text=""):
    entered.append((counts["calls"], bool(key)))
    time.sleep(0.01)  # others have their answers meanwhile
    enter(counts, key, text)

  monkeypatch.setattr(book, "enter", slow)
  engine = tg.CallableEngine(lambda content, system: "x", account=account, cache=book, concurrency=8)
  assert len([*ask_all(engine, [Request(str(i), None) for i in range(16)])]) == 16
  assert entered == [(1, True)] * 16


SHARED = """
import os, sys
import selfrag_jax.textgrad as tg
account, book = tg.Account(max_tokens=100), tg.EngineCache(sys.argv[1])
account.keep(book)
engine = tg.CallableEngine(lambda content, system: "x" * 35, account=account, max_tokens=10)
def ask_all_that_is_paid():
  for n in range(100):
    try:
      engine("y" * 35)
    except tg.BudgetError:
      return n
children = []
for _ in range(3):
  if (child := os.fork()) == 0:
    os._exit(ask_all_that_is_paid())
  children.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert (children, ask_all_that_is_paid()) == ([5, 0, 0], 0), children
"""


def test_forks_that_book_in_one_file_have_one_budget(tmp_path):
  subprocess.run([sys.executable, "-c", SHARED, tmp_path / "answers.sqlite"], check=True, timeout=120)
  account = tg.Account()
  account.keep(tg.EngineCache(str(tmp_path / "answers.sqlite")))
  assert (account.calls, account.tokens) == (5, 100)


HELD = """
import os, threading, time
import selfrag_jax.textgrad as tg
account, cache = tg.Account(), tg.EngineCache(":memory:")
engine = tg.CallableEngine(lambda content, system: "x", account=account)
held, go = threading.Event(), threading.Event()
def hold():
  with account._settled, account._booking, cache._lock:
    held.set()
    go.wait(60)
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
  account.note_cached()
  cache.put("a", "b")
  os._exit(engine("in the child") != "x")
end = time.monotonic() + 20
while (status := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
  time.sleep(0.01)
os.kill(child, 9) if status == (0, 0) else None
assert status[1] == 0 and status[0] == child, "the child hangs"
"""


def test_a_fork_does_not_wait_for_locks_that_only_its_parent_can_give_back():
  subprocess.run([sys.executable, "-c", HELD], check=True, timeout=120)


@pytest.mark.parametrize(
  ("sampling", "error", "message"),
  [
    ({"temprature": 0}, ValueError, "did you mean 'temperature'"),
    ({"n": 5}, ValueError, "unknown option 'n'"),
    ({"stream": True}, ValueError, "unknown option 'stream'"),
    ({"max_tokens": -500}, ValueError, "max_tokens = -500 must be at least 1"),
    ({"max_completion_tokens": float("nan")}, ValueError, "max_completion_tokens = nan"),
    ({"max_tokens": "5"}, TypeError, "max_tokens must be a number, not str"),
    ({"extra_body": {"max_tokens": 10**9}}, ValueError, "'max_tokens' cannot be in extra_body"),
    ({"extra_body": {"n": 100}}, ValueError, "'n' cannot be in extra_body"),
    ({"extra_body": "n"}, TypeError, "extra_body must be a dict"),
  ],
)
def test_what_a_single_call_is_given_is_checked_as_what_the_engine_is_given(sampling, error, message):
  account = tg.Account(max_tokens=10_000)
  engine = tg.CallableEngine(lambda content, system: "x", account=account)
  with pytest.raises(error, match=message):
    engine("hi", **sampling)
  with pytest.raises(error, match=message):
    tg.CallableEngine(lambda content, system: "x", **sampling)
  assert account.calls == 0


@pytest.mark.parametrize("content", [5, None, b"abc", [1], {"a": 1}, [b"\x89PNG", ["a"]]])
def test_what_is_no_prompt_is_refused_in_words(content):
  engine = tg.CallableEngine(lambda content, system: "x")
  with pytest.raises(TypeError, match="asked a text, or a list of texts and images, not"):
    engine(content)
  with pytest.raises(TypeError, match="not Variable; the text of a Variable is its value"):
    engine("x", system_prompt=tg.Variable("x", role_description="a prompt"))


@pytest.mark.parametrize("answer", [5, None, ["a"], b"a"])
def test_a_function_that_answers_no_text_is_an_error_of_the_engine(answer):
  with pytest.raises(tg.EngineError, match=f"answered {type(answer).__name__}, not text"):
    tg.CallableEngine(lambda content, system: answer)("hi")

"""Engines: a real HTTP server that fails in every way, the account, the cache, the context."""

import contextlib
import functools
import http.server
import json
import signal
import subprocess
import sys
import threading
import time

import pytest

import selfrag_jax.textgrad as tg
from selfrag_jax.textgrad.engine import Request, ask_all, at_once
from selfrag_jax.textgrad.limits import estimate_tokens


def completion(text, **usage):
  usage = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14, **usage}
  choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
  return json.dumps(
    {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
  )


@contextlib.contextmanager
def server(*replies):
  """Serve replies (status, body) in their order, the last one again and again; yields the address and the requests."""
  script, requests = iter(replies), []
  last = replies[-1]

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      requests.append((self.path, dict(self.headers), json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
      status, body = next(script, last)
      if status == "hang":
        stop.wait(5)
        return
      data = body if isinstance(body, bytes) else body.encode()
      self.send_response(status)
      self.send_header("Content-Type", "application/json")
      self.send_header("Content-Length", str(len(data)))
      self.send_header("Retry-After-Ms", "1")
      self.end_headers()
      self.wfile.write(data)

    def log_message(self, *args):
      pass

  stop = threading.Event()
  httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  threading.Thread(target=httpd.serve_forever, daemon=True).start()
  try:
    yield f"http://127.0.0.1:{httpd.server_port}/v1", requests
  finally:
    stop.set()
    httpd.shutdown()
    httpd.server_close()


def engine(url, **options):
  return tg.OpenAIEngine("m", url, "secret-key", **{"max_retries": 2, "timeout": 10, **options})


def test_chat_completion():
  account = tg.Account(prompt_price=1.0, completion_price=2.0)
  with server((200, completion("hello"))) as (url, requests):
    assert engine(url, account=account, top_p=0.9)("hi", system_prompt="be kind") == "hello"
  path, headers, body = requests[0]
  assert path == "/v1/chat/completions"
  assert headers["Authorization"] == "Bearer secret-key"
  assert body["messages"] == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
  assert (body["model"], body["temperature"], body["max_tokens"], body["top_p"]) == ("m", 0.0, 2000, 0.9)
  assert (account.calls, account.prompt_tokens, account.completion_tokens) == (1, 11, 3)
  assert account.cost == pytest.approx((11 + 2 * 3) / 1e6)


def test_images_are_sent_as_data():
  with server((200, completion("a cat"))) as (url, requests):
    engine(url)(["what is it?", b"\x89PNG data"])
    with pytest.raises(ValueError, match="no PNG"):
      engine(url)([b"plain bytes"])
  parts = requests[0][2]["messages"][0]["content"]
  assert parts[0] == {"type": "text", "text": "what is it?"}
  assert parts[1]["image_url"]["url"].startswith("data:image/png;base64,")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_busy_server_is_asked_again(status):
  with server((status, "{}"), (status, "{}"), (200, completion("at last"))) as (url, requests):
    assert engine(url)("hi") == "at last"
  assert len(requests) == 3


@pytest.mark.parametrize(
  ("reply", "message"),
  [
    ((429, '{"error": {"message": "slow down"}}'), "HTTP 429.*slow down"),
    ((500, "oops"), "HTTP 500"),
    ((401, '{"error": {"message": "bad key"}}'), "HTTP 401"),
    ((200, "not json"), "sent no|could not"),
    ((200, b'{"choices": "\xff\xfe"}'), "sent no|could not"),
    ((200, completion("a word").encode().replace(b"word", b"w\xffrd")), "sent no|could not"),
    ((200, '{"choices": []}'), "sent no"),
    ((200, completion("")), "answered nothing"),
    ((200, completion(None)), "answered nothing"),
  ],
)
def test_useless_answers_are_errors_without_the_key(reply, message):
  with server(reply) as (url, _), pytest.raises(tg.EngineError, match=message) as caught:
    engine(url, max_retries=0)("hi")
  assert "secret-key" not in str(caught.value)
  assert "127.0.0.1" in str(caught.value)


def test_silent_server_times_out():
  with server(("hang", "")) as (url, _), pytest.raises(tg.EngineError, match=r"within 0\.2 s"):
    engine(url, timeout=0.2, max_retries=0)("hi")


@pytest.mark.parametrize("reply", [(429, "slow down"), (500, "oops"), ("hang", ""), (200, "no json")])
@pytest.mark.parametrize("policy", ["raise", "keep"])
def test_a_step_whose_engine_fails_keeps_text_and_critiques(tmp_path, reply, policy):
  p = tg.Variable("be brief", role_description="system prompt")
  p.gradients.add(tg.Variable("say why", role_description="feedback"))
  with server(reply) as (url, _), tg.GradientStore(str(tmp_path / "s")) as store:
    options = {"use_gradient_rag": True, "gradient_store": store, "on_bad_reply": policy}
    optimizer = tg.TGD([p], engine=engine(url, max_retries=0, timeout=0.2), **options)
    with pytest.raises(tg.EngineError):
      optimizer.step()
  assert (p.value, p.get_gradient_text()) == ("be brief", "say why")
  with tg.GradientStore(str(tmp_path / "s")) as store:
    assert [c.text for c in store.recent(5, role="system prompt")] == ["say why"]


def test_nobody_there():
  with pytest.raises(tg.EngineError, match="could not be asked"):
    engine("http://127.0.0.1:9/v1", max_retries=0)("hi")


def test_critique_of_a_megabyte_is_cut_to_the_budget():
  long = "word " * 200_000
  with server((200, completion(long))) as (url, _):
    p = tg.Variable("be brief", role_description="system prompt")
    remote = engine(url)
    tg.TextLoss("judge", remote)(p).backward(remote)
  optimizer = tg.TGD(
    [p],
    engine=tg.CallableEngine(["<IMPROVED_VARIABLE>x</IMPROVED_VARIABLE>"], context_tokens=4096),
    use_gradient_rag=True,
  )
  optimizer.step()
  assert estimate_tokens(optimizer.engine.calls[0][0]) < 2500
  assert optimizer.store.recent(1, role="system prompt")[0].text == long


def test_context_is_checked_before_the_call():
  e = tg.CallableEngine(["never"], context_tokens=100, max_tokens=50)
  with pytest.raises(tg.ContextBudgetError, match="use_gradient_rag"):
    e("word " * 60)
  assert e.calls == []


def test_budget_stops_before_it_is_overspent():
  account = tg.Account(max_tokens=100)
  e = tg.CallableEngine(lambda content, system: "four words are here", account=account, max_tokens=30, concurrency=1)
  with pytest.raises(tg.BudgetError, match="100"):
    list(ask_all(e, [Request("a prompt of a few words", None)] * 100))
  assert account.calls > 1
  assert 60 < account.tokens <= 100


def test_budget_holds_with_many_calls_at_once():
  account = tg.Account(max_cost=1.0, prompt_price=0.0, completion_price=1e6 / 10)

  def answer(content, system):
    return "x" * 35  # ten tokens

  e = tg.CallableEngine(answer, account=account, max_tokens=10, concurrency=16)
  with pytest.raises(tg.BudgetError):
    list(ask_all(e, [Request("hi", None)] * 50))
  assert account.cost <= 1.0
  assert account.calls <= 1


def test_account_goes_on(tmp_path):
  account = tg.Account()
  tg.CallableEngine(["yes"], account=account)("hi")
  later = tg.Account()
  later.restore(json.loads(json.dumps(account.state())))
  assert later.state() == account.state()
  assert later.calls == 1


def test_cache_is_keyed_by_all_that_matters(tmp_path):
  path, account = str(tmp_path / "answers.sqlite"), tg.Account()

  def make(model="m", **sampling):
    return tg.CallableEngine(
      lambda content, system: f"{model} {content} {system}", model, cache=path, account=account, **sampling
    )

  first = make()
  assert first("a") == first("a")
  assert len(first.calls) == 1
  assert make()("a") == "m a None"  # another process
  for e, content, system in (
    (make(), "b", None),
    (make(), "a", "s"),
    (make("n"), "a", None),
    (make(temperature=1.0), "a", None),
    (make(), ["a", b"\x89PNG"], None),
    (make(), ["a", b"\x89PNH"], None),
  ):
    e(content, system_prompt=system)
    assert len(e.calls) == 1
  assert account.cached_calls == 2


def test_a_cache_that_cannot_be_written_or_read_says_so(tmp_path):
  cache = tg.EngineCache(str(tmp_path / "cache"))
  pages = cache._file.execute("PRAGMA page_count").fetchone()[0]
  cache._file.execute(f"PRAGMA max_page_count = {pages}")  # as a full disk
  engine = tg.CallableEngine(lambda content, system: "x" * 10_000, cache=cache)
  with pytest.raises(tg.EngineError, match=r"cache of answers .*full"):
    engine("hi")
  cache._file.execute("PRAGMA max_page_count = 1000")
  assert engine("hi") == "x" * 10_000
  (tmp_path / "other").write_text("no database, " * 100)
  with pytest.raises(tg.EngineError, match="not a database"):
    tg.EngineCache(str(tmp_path / "other"))


def test_script_ends():
  e = tg.CallableEngine(["one"])
  assert e("x") == "one"
  with pytest.raises(tg.EngineError, match="after 1 answers"):
    e("x")


def test_backward_engine_in_a_with():
  outer, inner = tg.CallableEngine(["o"]), tg.CallableEngine(["i"])
  singleton = tg.SingletonBackwardEngine()
  before = tg.SingletonBackwardEngine._engine
  try:
    tg.set_backward_engine(outer, override=True)
    with pytest.raises(RuntimeError, match="override=True"):
      tg.set_backward_engine(inner)
    with tg.backward_engine(inner):
      assert singleton.get_engine() is inner
      elsewhere = []
      thread = threading.Thread(target=lambda: elsewhere.append(singleton.get_engine()))
      thread.start()
      thread.join()
      assert elsewhere == [outer]
    assert singleton.get_engine() is outer
  finally:
    tg.SingletonBackwardEngine._engine = before


def test_names_of_engines(monkeypatch, tmp_path):
  monkeypatch.delenv("OPENAI_API_KEY", raising=False)
  monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
  with pytest.raises(ValueError, match="OPENAI_API_KEY"):
    tg.get_engine("gpt-4o-mini")
  assert tg.get_engine("ollama-qwen3").base_url == "http://localhost:11434/v1"
  with pytest.raises(ValueError, match="unknown engine"):
    tg.get_engine("gtp-4o")
  monkeypatch.setenv("OPENAI_API_KEY", "k")
  assert tg.OpenAIEngine("gpt-4o", cache=str(tmp_path / "c.sqlite")).cache.path == str(tmp_path / "c.sqlite")
  with pytest.raises(ValueError, match="experimental:gpt-4o"):
    tg.get_engine("gpt-4o", cache=True)
  assert "anthropic" in tg.get_engine("claude-x", api_key="k").base_url


def test_keys_go_to_their_own_endpoint_only(monkeypatch):
  monkeypatch.setenv("OPENAI_API_KEY", "of-openai")
  monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
  assert [tg.get_engine(name)._key for name in ("claude-x", "ollama-x", "gpt-x")] == ["none", "none", "of-openai"]
  monkeypatch.setenv("ANTHROPIC_API_KEY", "of-anthropic")
  assert tg.get_engine("claude-x")._key == "of-anthropic"


def test_a_cache_of_another_library_is_used():
  class Other(dict):
    set = dict.__setitem__

  with server((200, completion("once")), (500, "{}")) as (url, requests):
    other = Other()
    for _ in range(2):
      e = engine(url, cache=other, max_retries=0)
      assert e("hi") == "once"
  assert len(requests) == 1


def test_import_is_quick_to_read_and_takes_no_jax():
  code = (
    "import sys; before = set(sys.modules)\nimport selfrag_jax.textgrad\n"
    "heavy = {'jax', 'flax', 'tensorflow', 'openai', 'httpx', 'graphviz', 'scann', 'torch'} & set(sys.modules)\n"
    "assert not heavy, heavy"
  )
  subprocess.run([sys.executable, "-c", code], check=True)


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path):
  with server((200, completion("bad \ud800 text"))) as (url, _):
    text = engine(url, cache=str(tmp_path / "answers"))("hi")
  assert text == "bad ? text"


INTERRUPTED = """
import signal, threading, time
import selfrag_jax.textgrad as tg

signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, shells have it ignored
all_there = threading.Barrier(5)
def slow(content, system):
  all_there.wait()
  time.sleep(600)
prompt = tg.Variable("p", role_description="prompt")
model = tg.BlackboxLLM(tg.CallableEngine(lambda c, s: "a"), prompt)
answers = [model(tg.Variable(str(i), requires_grad=False, role_description="case")) for i in range(4)]
def tell():
  all_there.wait()
  time.sleep(0.5)  # until all of them sleep
  print("asked", flush=True)
threading.Thread(target=tell, daemon=True).start()
tg.sum(answers).backward(tg.CallableEngine(slow))
"""


def test_ctrl_c_does_not_wait_for_answers():
  process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  assert process.stdout.readline() == b"asked\n"
  process.send_signal(signal.SIGINT)
  assert b"KeyboardInterrupt" in process.communicate(timeout=60)[1]


FORKED = """
import os, threading
from selfrag_jax.textgrad.engine import at_once
barrier = threading.Barrier(4, timeout=60)
def all_at_once():
  return list(at_once([barrier.wait] * 4, 4))
assert sorted(all_at_once()) == [0, 1, 2, 3]
child = os.fork()
if child == 0:
  os._exit(0 if sorted(all_at_once()) == [0, 1, 2, 3] else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_calls_are_made_at_once_in_a_forked_process_too():
  subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=120)


def test_after_an_error_no_call_begins_and_earlier_answers_are_given():
  begun = []

  def call(i):
    begun.append(i)
    if i == 2:
      raise ValueError("the third")
    if i > 2:
      time.sleep(0.1)  # instant calls could all begin while the thread of the third is held up
    return i

  answers = at_once([functools.partial(call, i) for i in range(100)], 1 + 1)
  assert [next(answers), next(answers)] == [0, 1]
  with pytest.raises(ValueError, match="the third"):
    next(answers)
  assert len(begun) < 10

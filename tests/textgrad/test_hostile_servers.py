"""Servers that write raw bytes: every call ends in bounded time and memory, with a readable error."""

import contextlib
import gzip
import json
import socket
import subprocess
import sys
import threading

import pytest

import selfrag_jax.textgrad as tg

KEY = "sk-very-secret-0123456789"


def completion(text, **more):
  return json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}], **more}).encode()


def answer(body, *headers, status="200 OK", kind="application/json"):
  lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *headers, "", ""]
  return "\r\n".join(lines).encode("latin-1") + body


@contextlib.contextmanager
def server(*parts, pause=0.0, again=False):
  """Write bytes to whoever connects, the last again and again if asked to; yields the address."""
  over = threading.Event()

  def talk(connection):
    with contextlib.suppress(OSError), connection:
      connection.recv(1 << 16)
      for part in parts:
        connection.sendall(part)
      while again and not over.wait(pause):
        connection.sendall(parts[-1])

  def listen():
    with contextlib.suppress(OSError):
      while True:
        threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

  with socket.create_server(("127.0.0.1", 0)) as listener:
    threading.Thread(target=listen, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    over.set()


@pytest.mark.parametrize(
  "parts", [(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"a"), (b"HTTP/1.1 100 Continue\r\n\r\n",)], ids=["drips", "goes on"]
)
def test_headers_that_never_end_are_not_waited_for(parts):
  said = []

  def ask(url):
    try:
      tg.OpenAIEngine("m", url, KEY, timeout=0.3, max_retries=0)("x")
    except tg.EngineError as error:
      said.append(str(error))

  with server(*parts, pause=0.02, again=True) as url:
    caller = threading.Thread(target=ask, args=(url,), daemon=True)
    caller.start()
    caller.join(20)
  assert not caller.is_alive()
  assert "did not answer within 0.3 s" in said[0]


@pytest.mark.parametrize(
  ("reply", "message"),
  [
    (answer(b"", f"Location: http://[{KEY}", status="302 Found"), "HTTP 302: it redirects to an invalid address"),
    (answer(b"", status="302 Found"), "HTTP 302: it redirects to an invalid address"),
    (answer(b"", "Location: /v2", status="302 Found"), r"HTTP 302: it redirects to http://127\.0\.0\.1:\d+/v2,"),
    (answer(b"", "Location: http://\xe4\xff/", status="302 Found"), "HTTP 302: it redirects"),
    (answer(b'{"choices": {"0": 1}}'), "no chat completion"),
    (answer(b"hello", kind="text/html; charset=zlib_codec"), "no chat completion: 'hello'"),
    (answer(b"hello", kind="text/html; charset=rot13", status="400 Bad"), "HTTP 400: hello"),
    (answer(completion("x"), "Content-Encoding: gzip, gzip"), "encoded as 'gzip, gzip', gzip was asked for"),
  ],
)
def test_odd_answers_are_errors_in_words(reply, message):
  with server(reply) as url, pytest.raises(tg.EngineError, match=message) as caught:
    tg.OpenAIEngine("m", url, KEY, timeout=5, max_retries=0)("x")
  assert KEY not in str(caught.value)
  assert caught.value.__context__ is None


def test_the_charset_of_an_answer_is_not_believed():
  with server(answer(completion("läuft"), kind="application/json; charset=utf-7")) as url:
    assert tg.OpenAIEngine("m", url, timeout=5, max_retries=0)("x") == "läuft"


BOMB = """
import resource, sys
import selfrag_jax.textgrad as tg
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
  tg.OpenAIEngine("m", sys.argv[1], timeout=60, max_retries=0)("x")
except tg.EngineError as error:
  print(error)
"""


def test_a_bomb_within_a_bomb_takes_no_memory():
  bomb = gzip.compress(gzip.compress(b" " * (1 << 29)))  # half a gigabyte in about a kilobyte
  with server(answer(bomb, "Content-Encoding: gzip, gzip")) as url:
    done = subprocess.run([sys.executable, "-c", BOMB, url], capture_output=True, text=True, timeout=60)
  assert "gzip was asked for" in done.stdout


def test_a_server_that_says_nothing_was_spent_is_counted_for():
  account = tg.Account(max_tokens=500)
  usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
  with server(answer(completion("word " * 20, usage=usage))) as url:
    engine = tg.OpenAIEngine("m", url, account=account, max_tokens=100)
    with contextlib.suppress(tg.BudgetError):
      for _ in range(50):
        engine("x " * 50)
  assert 300 <= account.tokens <= 500
  assert account.calls < 50


def test_an_account_that_was_told_absurd_counts_can_go_on(tmp_path):
  usage = {"prompt_tokens": 1 << 53, "completion_tokens": 1 << 53, "total_tokens": 1 << 54}
  book = tg.EngineCache(str(tmp_path / "answers.sqlite"))
  account, later = tg.Account(), tg.Account()
  account.keep(book)
  with server(answer(completion("yes", usage=usage))) as url:
    engine = tg.OpenAIEngine("m", url, account=account)
    for _ in range(3):
      engine("x")
  later.keep(tg.EngineCache(str(tmp_path / "answers.sqlite")))
  assert later.calls == 3
  assert later.tokens < 100


def test_the_key_of_a_client_of_the_callers_is_cut_out_too(tmp_path):
  import openai

  error = answer(json.dumps({"error": {"message": f"bad key {KEY}"}}).encode(), status="401 No")
  with server(error) as url, pytest.raises(tg.EngineError, match=r"bad key \[key\]"):
    tg.ChatExternalClient(openai.OpenAI(api_key=KEY, base_url=url, max_retries=0), "m")("x")
  with server(answer(completion(f"Your key is {KEY}."))) as url:
    client = openai.OpenAI(api_key=KEY, base_url=url, max_retries=0)
    assert tg.ChatExternalClient(client, "m", cache=str(tmp_path / "answers"))("x") == "Your key is [key]."
  assert all(KEY.encode() not in file.read_bytes() for file in tmp_path.iterdir())


def test_two_servers_with_a_model_of_one_name_do_not_answer_for_each_other(tmp_path):
  ask = lambda url: tg.OpenAIEngine("m", url, KEY, cache=str(tmp_path / "answers"))("x")
  with server(answer(completion("one"))) as one, server(answer(completion("two"))) as two:
    assert [ask(one), ask(two), ask(one), ask(f"{two}/")] == ["one", "two", "one", "two"]

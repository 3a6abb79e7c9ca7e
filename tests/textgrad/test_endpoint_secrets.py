"""Secrets of endpoints: a key is sent to its own host alone, never shown, and hostile servers give readable errors."""

import contextlib
import gzip
import http.server
import json
import logging
import threading
import time
import traceback

import pytest

import selfrag_jax.textgrad as tg
from selfrag_jax.textgrad.endpoint import NO_KEY

KEY = "sk-very-secret-0123456789"


def completion(text, **more):
  choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
  return json.dumps({"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], **more})


@contextlib.contextmanager
def server(reply):
  """Serve; `reply(handler)` writes the answer. Yields the address and the headers of each request."""
  seen = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      self.rfile.read(int(self.headers["Content-Length"]))
      seen.append(dict(self.headers))
      with contextlib.suppress(OSError):
        reply(self)

    do_GET = do_POST

    def log_message(self, *args):
      pass

  httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  httpd.daemon_threads = True
  threading.Thread(target=httpd.serve_forever, daemon=True).start()
  try:
    yield f"http://127.0.0.1:{httpd.server_port}/v1", seen
  finally:
    httpd.shutdown()
    httpd.server_close()


def send(handler, status, body, **headers):
  data = body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass")
  handler.send_response(status)
  for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
    handler.send_header(name.replace("_", "-"), value)
  handler.end_headers()
  handler.wfile.write(data)


def says(status, body, **headers):
  return lambda handler: send(handler, status, body, **headers)


@pytest.fixture
def openai_env(monkeypatch):
  monkeypatch.setenv("OPENAI_API_KEY", KEY)
  monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
  return monkeypatch


def test_the_key_of_openai_is_not_sent_to_another_server(openai_env):
  openai_env.setenv("OPENAI_ORG_ID", "org-secret")
  openai_env.setenv("OPENAI_PROJECT_ID", "proj-secret")
  openai_env.setenv("OPENAI_CUSTOM_HEADERS", f"X-Gateway: {KEY}\nAuthorization: Bearer {KEY}")
  with server(says(200, completion("hi"))) as (url, seen):
    assert tg.OpenAIEngine("m", url)("x") == "hi"
    openai_env.setenv("OPENAI_BASE_URL", url)
    assert tg.OpenAIEngine("m")("x") == "hi"
    assert tg.OpenAIEngine("m", url, "of-this-server")("x") == "hi"
    openai_env.setenv("MY_KEY", "of-mine\n")
    assert tg.OpenAIEngine("m", url, api_key_env="MY_KEY")("x") == "hi"
    assert tg.OpenAIEngine("m", url, api_key_env="OPENAI_API_KEY")("x") == "hi"
  assert [headers["Authorization"] for headers in seen] == [
    f"Bearer {key}" for key in (NO_KEY, NO_KEY, "of-this-server", "of-mine", KEY)
  ]
  assert not any("secret" in str(headers) for headers in seen[:4])


@pytest.mark.parametrize(
  ("url", "key"),
  [
    (None, KEY),
    ("https://api.openai.com/v1", KEY),
    ("https://API.openai.com:443/v1", KEY),
    ("https://api.openai.com.evil.org/v1", NO_KEY),
    ("https://api.openai.com.:443/v1", NO_KEY),
    ("https://evil.org/api.openai.com", NO_KEY),
    ("http://api.openai.com/v1", NO_KEY),
    ("https://api.openai.com:8443/v1", NO_KEY),
  ],
)
def test_the_host_is_compared_exactly(openai_env, url, key):
  assert tg.OpenAIEngine("m", url)._key == key


@pytest.mark.parametrize(
  "url",
  [
    "https://api.openai.com@evil.org/v1",
    "https://user:pass@host/v1",
    "https://api.openai.com\\@evil.org",
    "ftp://x",
    "x",
    "http://",
    "http://a:b/v1",
    "http://[::1",
    "https://evil.org?https://api.openai.com/v1",
    "https://evil.org#@api.openai.com/v1",
    "https://host/v1?api-key=pass",
    "http://host/v1\x7f",
    "http://host/\ud800",
  ],
)
def test_addresses_that_are_none_are_refused_in_words(openai_env, url):
  with pytest.raises(ValueError, match="base_url") as caught:
    tg.OpenAIEngine("m", url)
  assert "pass" not in str(caught.value).replace("password", "")


def test_the_key_of_a_named_endpoint_stays_there(openai_env):
  openai_env.setenv("ANTHROPIC_API_KEY", "of-anthropic")
  assert tg.get_engine("claude-x")._key == "of-anthropic"
  assert tg.get_engine("claude-x", base_url="http://localhost:1/v1")._key == NO_KEY
  assert tg.get_engine("gpt-x", base_url="http://localhost:1/v1")._key == NO_KEY
  assert tg.get_engine("ollama-x")._key == NO_KEY
  with pytest.raises(ValueError, match="NOT_THERE is not set"):
    tg.get_engine("gpt-x", api_key_env="NOT_THERE")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(openai_env, status):
  with (
    server(says(200, completion("stolen"))) as (evil, stolen),
    server(lambda handler: send(handler, status, "", Location=evil)) as (url, seen),
    pytest.raises(tg.EngineError, match=f"HTTP {status}: it redirects to http://127"),
  ):
    tg.OpenAIEngine("m", url, KEY)("x")
  assert (len(seen), stolen) == (1, [])


def test_without_a_key_a_refusal_says_why(openai_env):
  said = "who are you.*OPENAI_API_KEY goes to OpenAI alone.*api_key_env"
  refuses = says(401, '{"error": {"message": "who are you?"}}')
  with server(refuses) as (url, _), pytest.raises(tg.EngineError, match=said):
    tg.OpenAIEngine("m", url)("x")


@pytest.mark.parametrize(
  "reply",
  [
    says(401, json.dumps({"error": {"message": f"Incorrect API key: {KEY}"}})),
    says(400, "x" * 290 + KEY),
    says(500, f"<html>{KEY}</html>"),
    says(200, f"<html>{KEY}</html>", Content_Type="text/html"),
    says(200, json.dumps({"choices": KEY})),
    says(302, "", Location=f"http://other/{KEY}"),
  ],
)
def test_an_echoed_key_is_in_no_error(reply, caplog):
  caplog.set_level(logging.INFO)
  with server(reply) as (url, _), pytest.raises(tg.EngineError) as caught:
    tg.OpenAIEngine("m", url, KEY, max_retries=0)("x")
  error = caught.value
  assert KEY not in "".join(traceback.format_exception(error))
  assert KEY[:12] not in str(error)
  assert error.__cause__ is None
  assert error.__context__ is None  # it would hold the request with its headers
  assert KEY not in caplog.text


def test_an_echoed_key_is_in_no_answer_and_no_file(tmp_path):
  with server(says(200, completion(f"Your key is {KEY}."))) as (url, _):
    engine = tg.OpenAIEngine("m", url, KEY, cache=str(tmp_path / "answers"))
    assert engine("x") == "Your key is [key]."
    assert engine("x") == "Your key is [key]."
  assert KEY not in repr(engine)
  assert all(KEY.encode() not in file.read_bytes() for file in tmp_path.iterdir())


def test_a_key_that_no_header_can_hold_is_refused_without_it():
  with pytest.raises(ValueError, match="no HTTP header") as caught:
    tg.OpenAIEngine("m", "http://localhost:1/v1", KEY + "\n" + KEY)
  assert KEY not in str(caught.value)


def forever(handler):
  handler.send_response(200)
  handler.send_header("Content-Type", "application/json")
  handler.send_header("Transfer-Encoding", "chunked")
  handler.end_headers()
  while True:
    handler.wfile.write(b"1\r\n \r\n")
    time.sleep(0.02)


def huge(handler):
  handler.send_response(200)
  handler.send_header("Content-Type", "application/json")
  handler.send_header("Content-Length", str(10 << 30))
  handler.end_headers()
  for _ in range(10 << 10):
    handler.wfile.write(b" " * (1 << 20))


@pytest.mark.parametrize(
  ("reply", "message"),
  [
    (forever, r"did not answer within 0\.5 s"),
    (huge, "more than 1 MiB were sent"),
    (says(200, gzip.compress(b" " * (1 << 24)), Content_Encoding="gzip"), "more than 1 MiB were sent"),
    (says(200, b"\xff\xfe"), "could not be asked|no chat completion"),
    (says(200, completion(None)[:-1] + "," + '"a":' + "[" * 100_000), "no chat completion|could not be asked"),
    (says(200, "[" * 100_000), "no chat completion|could not be asked"),
    (says(200, "<html>welcome</html>", Content_Type="text/html"), "no chat completion: '<html>welcome"),
    (says(200, completion(["a"])), "no chat completion"),
    (says(200, "null"), "no chat completion"),
    (says(200, completion("x"), Content_Encoding="gzip"), "could not be asked"),
    (lambda handler: handler.connection.close(), "could not be asked|did not answer"),
    (lambda handler: time.sleep(1), "did not answer within"),
  ],
)
def test_hostile_servers_end_in_words(monkeypatch, reply, message):
  from selfrag_jax.textgrad import http_client

  monkeypatch.setattr(http_client, "LARGEST", 1 << 20)
  timeout = 0.5 if message.startswith("did not answer") else 20
  with server(reply) as (url, _), pytest.raises(tg.EngineError, match=message):
    tg.OpenAIEngine("m", url, timeout=timeout, max_retries=0)("x")


@pytest.mark.parametrize(
  "usage", [{}, {"prompt_tokens": -5}, {"prompt_tokens": 10**30}, {"prompt_tokens": "many"}, None]
)
def test_a_server_that_counts_oddly_is_counted_for(tmp_path, usage):
  account = tg.Account()
  account.keep(tg.EngineCache(str(tmp_path / "book")))
  usage = usage and {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, **usage}
  with server(says(200, completion("four words \ud83d here", **({"usage": usage} if usage else {})))) as (url, _):
    engine = tg.OpenAIEngine("m", url, account=account)
    engine("x " * 100)
  assert 50 < account.prompt_tokens < 100
  assert 0 < account.completion_tokens < 20


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"temprature": 1}, "did you mean 'temperature'"),
    ({"top_k": 1}, "extra_body"),
    ({"stream": True}, "unknown option 'stream'"),
    ({"max_tokens": -1}, "max_tokens = -1"),
    ({"concurrency": 0}, "concurrency = 0"),
    ({"context_tokens": 0}, "context_tokens = 0"),
    ({"timeout": 0}, "timeout = 0"),
    ({"timeout": float("nan")}, "timeout = nan"),
    ({"max_retries": -1}, "max_retries = -1"),
  ],
)
def test_options_that_no_endpoint_takes_are_refused_before_any_call(options, message):
  with pytest.raises(ValueError, match=message):
    tg.OpenAIEngine("m", "http://localhost:1/v1", **options)


def test_options_that_endpoints_take():
  options = {"top_p": 0.5, "seed": 1, "extra_body": {"top_k": 1}, "max_completion_tokens": 5}
  assert tg.OpenAIEngine("m", "http://localhost:1/v1", **options).sampling["extra_body"] == {"top_k": 1}

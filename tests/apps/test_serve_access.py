"""Who may ask the server, from where, and how much: keys, hosts, origins, bodies, and the form of every error."""

import json
import os
import socket

import pytest

from selfrag_jax.apps.serve.keys import Keys, read_keys
from selfrag_jax.apps.serve.run import bind
from selfrag_jax.apps.serve.settings import ServerSettings
from tests.serving import KEY, MODEL, client

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "temperature": 0}


@pytest.fixture(scope="module")
def open_server():
  with client(settings={"max_body_bytes": 2000, "body_seconds": 0.3}) as made:
    yield made


@pytest.fixture(scope="module")
def locked():
  with client(keys=(KEY, "another-key-of-a-test")) as made:
    yield made


def error_of(response, status):
  """Return the error of a refused request, which has OpenAI's form."""
  assert response.status_code == status, response.text
  error = response.json()["error"]
  assert set(error) == {"message", "type", "param", "code"}
  assert error["message"]
  return error


@pytest.mark.parametrize(
  "path", ["/v1/models", "/v1/memory", "/v1/chat/completions", "/metrics", "/v1", "/v1/nothing", "//v1/models"]
)
@pytest.mark.parametrize(
  "header", [None, "Bearer wrong-key-of-a-test-01234", f"Basic {KEY}", KEY, "Bearer", "Bearer \xff"]
)
def test_without_a_right_key_nothing_is_told(locked, path, header):
  response = locked.get(path, headers={"Authorization": header.encode("latin-1")} if header else {})
  if path in ("/v1", "//v1/models"):  # no routes
    assert response.status_code in (401, 404)
    return
  assert error_of(response, 401)["code"] == "invalid_api_key"
  assert response.headers["www-authenticate"] == "Bearer"
  assert KEY not in response.text


def test_each_of_the_keys_opens_the_server_and_the_status_is_open(locked):
  for key in (KEY, "another-key-of-a-test"):
    assert locked.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
  assert [locked.get(path).status_code for path in ("/health", "/ready", "/openapi.json")] == [200, 200, 200]


@pytest.mark.skipif(os.name != "posix", reason="files have no such permissions there")
@pytest.mark.parametrize(("mode", "told"), [(0o600, 0), (0o640, 0), (0o604, 1)])
def test_a_file_of_keys_that_all_may_read_is_told_of(tmp_path, caplog, mode, told):
  (tmp_path / "keys").write_text(KEY)
  (tmp_path / "keys").chmod(mode)
  assert read_keys(str(tmp_path / "keys"))
  assert [record.getMessage().endswith(f"chmod o-r {tmp_path / 'keys'}") for record in caplog.records] == [True] * told
  assert KEY not in caplog.text


def test_keys_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
  file = tmp_path / "keys"
  file.write_text(f"# of the team\n{KEY}\n\n")
  assert read_keys(str(file)).admits(f"Bearer {KEY}")
  assert not read_keys(str(file)).admits("Bearer # of the team")
  monkeypatch.setenv("SELFRAG_API_KEYS", f"{KEY}, second-key-of-a-test")
  assert read_keys(None).admits("bearer second-key-of-a-test")
  monkeypatch.delenv("SELFRAG_API_KEYS")
  assert not read_keys(None)
  file.write_text("\n# nothing\n")
  with pytest.raises(ValueError, match="has no API key; write one a line"):
    read_keys(str(file))
  with pytest.raises(OSError, match="missing"):
    read_keys(str(tmp_path / "missing"))


@pytest.mark.parametrize("key", ["short-key", "schlüssel-schlüssel-schlüssel", "two words in a key 0123456789"])
def test_a_bad_key_is_refused_and_not_quoted(key):
  with pytest.raises(ValueError, match="an API key") as caught:
    Keys((key,))
  assert key not in str(caught.value)


def test_a_server_that_others_reach_needs_a_key():
  with pytest.raises(ValueError, match=r"there are no API keys: give --api_keys=FILE"):
    bind(ServerSettings("0.0.0.0", 0), Keys())
  bind(ServerSettings("0.0.0.0", 0), Keys((KEY,))).close()
  assert [ServerSettings(host).is_loopback for host in ("127.0.0.1", "::1", "localhost")] == [True] * 3
  assert [ServerSettings(host).is_loopback for host in ("0.0.0.0", "::", "example.org", "10.0.0.1")] == [False] * 4


def test_connections_send_at_once():
  with bind(ServerSettings(port=0), Keys()) as held:
    assert held.proto == socket.IPPROTO_TCP  # by which asyncio knows that it may set TCP_NODELAY


def test_a_port_in_use_is_said_to_be():
  held = bind(ServerSettings(port=0), Keys())
  held.listen()
  port = held.getsockname()[1]
  with pytest.raises(OSError, match=f"port {port} of 127.0.0.1 is in use: give another --port"):
    bind(ServerSettings(port=port), Keys())
  held.close()
  with pytest.raises(ValueError, match="--port=70000"):
    bind(ServerSettings(port=70_000), Keys())


@pytest.mark.parametrize(
  "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "", "127.0.0.1.evil.example"]
)
def test_a_name_that_was_pointed_at_this_machine_is_refused(open_server, host):
  assert "localhost alone" in error_of(open_server.get("/v1/models", headers={"Host": host}), 403)["message"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000"])
def test_the_names_of_this_machine_are_taken(open_server, host):
  assert open_server.get("/v1/models", headers={"Host": host}).status_code == 200


def test_pages_of_other_sites_may_not_ask_a_server_without_keys(open_server, locked):
  for origin in ("https://evil.example", "null", "http://localhost:9", "http://127.0.0.1", "http://[evil"):
    error_of(open_server.post("/v1/chat/completions", json=CHAT, headers={"Origin": origin}), 403)
  allowed = open_server.post("/v1/chat/completions", json=CHAT, headers={"Origin": "http://localhost"})
  assert allowed.status_code == 200
  assert "access-control-allow-origin" not in allowed.headers
  # a page cannot send the key of another without asking first, and the answer to that question is no
  asked = locked.options(
    "/v1/models", headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "GET"}
  )
  assert asked.status_code in (401, 405)
  assert "access-control-allow-origin" not in asked.headers


@pytest.mark.parametrize("size", [2001, 8000, 100_000])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_over_the_limit_is_refused_before_it_is_parsed(open_server, size, is_chunked):
  body = b"[" * size  # no JSON
  parts = (body[at : at + 500] for at in range(0, size, 500))
  sent = open_server.post("/v1/chat/completions", content=parts if is_chunked else body)
  assert error_of(sent, 413)["message"] == "the body is longer than the 2,000 bytes that this server takes"


def test_a_body_of_the_limit_is_read(open_server):
  body = json.dumps(CHAT).encode().ljust(2000)
  sent = open_server.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
  assert sent.status_code == 200


@pytest.mark.parametrize(
  ("body", "kind", "message"),
  [
    (b"{", "application/json", "the body is no JSON: "),
    (b"", "application/json", "the body must be a JSON object"),
    (b"[1]", "application/json", "the body must be a JSON object"),
    (b'"text"', "application/json", "the body must be a JSON object"),
    (b"{}", "text/plain", "the body must be a JSON object, sent as Content-Type: application/json"),
    (b"\xff\xfe", "application/json", "the body"),
    (b"[" * 1900, "application/json", ""),
    (b'{"model": ' + b"9" * 1500 + b"}", "application/json", "model: "),
    (b'{"model": NaN}', "application/json", "model: "),
    (b"{}", "application/json", "model: Field required"),
    (b'{"\\ud800": 1, "model": "\\ud800"}', "application/json", ""),
  ],
)
def test_a_malformed_body_is_an_error_of_the_client(open_server, body, kind, message):
  for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/search"):
    sent = open_server.post(path, content=body, headers={"Content-Type": kind})
    error = error_of(sent, 400)
    assert error["type"] == "invalid_request_error"
    if path == "/v1/chat/completions":
      assert error["message"].startswith(message)


@pytest.mark.parametrize(
  ("changes", "param", "message"),
  [
    ({"temprature": 1}, "temprature", "there is no field 'temprature'"),
    ({"temperature": 3}, "temperature", "less than or equal to 2"),
    ({"temperature": "1"}, "temperature", "valid number"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 5000}, "max_tokens", "at most 4,096"),
    ({"n": 129}, "n", "less than or equal to 128"),
    ({"n": 100}, "n", "this server has room for 68"),
    ({"messages": []}, "messages", "at least 1"),
    (
      {"messages": [{"role": "tool", "content": "x"}]},
      "messages.0.role",
      "'developer', 'user' or 'assistant'",
    ),
    ({"messages": [{"role": "assistant", "content": "x"}]}, None, "the last message is the assistant's"),
    ({"stop": [""]}, "stop.0", "at least 1 character"),
    ({"stop": ["a"] * 100}, "stop", "at most 16 items"),
    ({"tools": [{}]}, "tools", "at most 0 items"),
    ({"top_logprobs": 5}, "top_logprobs", "less than or equal to 0"),
    ({"stream_options": {"include_usage": True}}, None, "stream_options is for streams"),
    ({"response_format": {"type": "xml"}}, "response_format", "does not match any of the expected tags"),
    ({"memory": True, "knowledge_base": "a"}, None, "give one of the two"),
  ],
)
def test_a_field_that_is_refused_is_named(open_server, changes, param, message):
  error = error_of(open_server.post("/v1/chat/completions", json={**CHAT, **changes}), 400)
  assert message in error["message"]
  assert error["param"] == param


def test_fields_without_effect_are_taken(open_server):
  more = {"user": "me", "metadata": {"a": "b"}, "store": False, "tools": [], "logit_bias": {}, "frequency_penalty": 0}
  assert open_server.post("/v1/chat/completions", json={**CHAT, **more}).status_code == 200


def test_unknown_paths_and_methods_are_errors_of_the_same_form(open_server):
  assert error_of(open_server.get("/v1/nothing"), 404)["message"] == "there is no /v1/nothing"
  assert "does not take PATCH" in error_of(open_server.patch("/v1/models"), 405)["message"]
  assert error_of(open_server.get("/page/../../secret"), 404)


def test_a_bug_is_an_error_of_the_server_that_tells_nothing(monkeypatch):
  with client() as made:
    monkeypatch.setattr(type(made.services.embedder), "count", lambda *_: 1 / 0)
    error = error_of(made.post("/v1/embeddings", json={"model": made.services.embedder.name, "input": "a"}), 500)
    assert error["message"] == "the server failed; its log says why"
    assert 'route="/v1/embeddings",status="500"' in made.get("/metrics").text


def test_every_response_forbids_what_browsers_guess(open_server):
  for response in (open_server.get("/v1/models"), open_server.get("/nothing")):
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["x-frame-options"] == "DENY"

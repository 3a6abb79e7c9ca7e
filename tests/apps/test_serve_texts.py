"""Chat completions and completions: the engine's texts, in OpenAI's form, whole and streamed."""

import json
import threading
import time

import httpx
import pytest

from selfrag_jax.generate.engine import Engine
from tests.generate.models import TOKENIZER, tiny
from tests.serving import MODEL, client, running

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Where is it?"}], "max_tokens": 12, "temperature": 0}
DRAWN = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
SCHEMA = {
  "type": "object",
  "properties": {"port": {"enum": ["Cadiz", "Oslo"]}, "ships": {"type": "integer", "minimum": 1, "maximum": 9}},
  "required": ["port", "ships"],
  "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server():
  with client() as made:
    yield made


@pytest.fixture(scope="module")
def engine():
  return Engine(tiny("hybrid"))


def conversation(messages=CHAT["messages"]):
  return {"messages": messages}


def post(server, path="/v1/chat/completions", **body):
  response = server.post(path, json=body)
  assert response.status_code == 200, response.text
  return response.json()


def events(response):
  """Return the events of a stream, which ends with [DONE]."""
  assert response.status_code == 200, response.text
  assert response.headers["content-type"].startswith("text/event-stream")
  *lines, last = [line for line in response.text.split("\n\n") if line]
  assert last == "data: [DONE]"
  return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_chat_completion_is_the_text_of_the_engine(server, engine):
  (expected,) = engine.submit_conversation(conversation(), max_new_tokens=12)
  expected.wait()
  reply = post(server, **CHAT)
  (choice,) = reply["choices"]
  assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
  assert choice["finish_reason"] == expected.finish_reason
  assert reply["object"] == "chat.completion"
  assert reply["model"] == MODEL
  usage = reply["usage"]
  assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(expected.prompt), len(expected.tokens))


def test_a_stream_has_the_same_text_in_pieces(server):
  whole = post(server, **CHAT)
  chunks = events(server.post("/v1/chat/completions", json={**CHAT, "stream": True}))
  assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
  text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
  assert text == whole["choices"][0]["message"]["content"]
  assert chunks[-1]["choices"][0] | {"index": 0} == {
    "index": 0, "delta": {}, "logprobs": None, "finish_reason": whole["choices"][0]["finish_reason"],
  }  # fmt: skip
  assert len({chunk["id"] for chunk in chunks}) == 1
  assert all("usage" not in chunk for chunk in chunks)


def test_the_usage_of_a_stream_comes_last_if_it_is_asked_for(server):
  body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
  *chunks, last = events(server.post("/v1/chat/completions", json=body))
  assert all(chunk["usage"] is None for chunk in chunks)
  assert last["choices"] == []
  assert last["usage"]["completion_tokens"] == post(server, **CHAT)["usage"]["completion_tokens"]


def test_samples_are_drawn_apart_and_a_seed_draws_them_again(server, engine):
  first, again = (post(server, **{**CHAT, **DRAWN, "n": 3})["choices"] for _ in range(2))
  texts = [choice["message"]["content"] for choice in first]
  assert texts == [choice["message"]["content"] for choice in again]
  assert len(set(texts)) == 3
  expected = engine.submit_conversation(conversation(), num_samples=3, max_new_tokens=12, **DRAWN)
  assert texts == [generation.wait().text for generation in expected]
  chunks = events(server.post("/v1/chat/completions", json={**CHAT, **DRAWN, "n": 3, "stream": True}))
  parts = ["", "", ""]
  for chunk in chunks:
    (choice,) = chunk["choices"]
    parts[choice["index"]] += choice["delta"].get("content", "")
  assert parts == texts


def test_without_a_seed_texts_differ(server):
  body = {**CHAT, "temperature": 1.5, "max_tokens": 20}
  assert post(server, **body)["choices"] != post(server, **body)["choices"]
  for seed in (-(2**63), 2**63 - 1):
    assert post(server, **{**CHAT, "temperature": 1, "seed": seed})


def test_a_stop_string_ends_a_text(server):
  text = post(server, **CHAT)["choices"][0]["message"]["content"]
  stop = text[3:5]
  (choice,) = post(server, **{**CHAT, "stop": ["never there", stop]})["choices"]
  assert choice["message"]["content"] == text[: text.index(stop)]
  assert choice["finish_reason"] == "stop"


def test_log_probabilities_are_those_of_the_engine(server, engine):
  (expected,) = engine.submit_conversation(conversation(), max_new_tokens=12)
  expected.wait()
  scores = post(server, **CHAT, logprobs=True)["choices"][0]["logprobs"]["content"]
  written = [
    (token, log_prob)
    for token, log_prob in zip(expected.tokens, expected.log_probs, strict=True)
    if token not in TOKENIZER.special.values()
  ]
  assert [score["logprob"] for score in scores] == pytest.approx([log_prob for _, log_prob in written], abs=1e-4)
  assert [score["token"] for score in scores] == [TOKENIZER.decode([token]) for token, _ in written]
  chunks = events(server.post("/v1/chat/completions", json={**CHAT, "stream": True, "logprobs": True}))
  streamed = [s for chunk in chunks for s in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
  assert [score["token"] for score in streamed] == [score["token"] for score in scores]


def test_completions_continue_texts_and_token_ids(server, engine):
  prompts = ["The port", "Oslo"]
  body = {"model": MODEL, "max_tokens": 6, "temperature": 0}
  choices = post(server, "/v1/completions", prompt=prompts, n=2, logprobs=0, **body)["choices"]
  expected = [engine.submit(prompt, max_new_tokens=6)[0].wait().text for prompt in prompts]
  assert [choice["text"] for choice in choices] == [expected[0]] * 2 + [expected[1]] * 2
  assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
  assert all(len(choice["logprobs"]["token_logprobs"]) for choice in choices)
  ids = [TOKENIZER.encode(prompt) for prompt in prompts]
  for prompt, text in ((prompts[0], expected[:1]), (ids[0], expected[:1]), (ids, expected)):
    assert [choice["text"] for choice in post(server, "/v1/completions", prompt=prompt, **body)["choices"]] == text
  chunks = events(server.post("/v1/completions", json={"prompt": prompts[0], "stream": True, **body}))
  assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected[0]
  assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_a_response_format_is_followed(server):
  form = {"type": "json_schema", "json_schema": {"name": "port", "schema": SCHEMA, "strict": True}}
  (choice,) = post(server, **{**CHAT, "max_tokens": 60, "response_format": form})["choices"]
  answer = json.loads(choice["message"]["content"])
  assert answer["port"] in ("Cadiz", "Oslo")
  assert 1 <= answer["ships"] <= 9
  assert choice["finish_reason"] == "stop"
  (choice,) = post(server, **{**CHAT, "max_tokens": 40, "response_format": {"type": "json_object"}})["choices"]
  assert choice["message"]["content"].lstrip()[0] == "{"
  assert post(server, **CHAT, response_format={"type": "text"})["choices"] == post(server, **CHAT)["choices"]


@pytest.mark.parametrize(
  "schema", [{"type": "nonsense"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "(?<=a)b"}]
)
def test_a_schema_that_cannot_be_followed_is_refused(server, schema):
  form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
  response = server.post("/v1/chat/completions", json={**CHAT, "response_format": form})
  assert response.status_code == 400
  assert "schema" in response.json()["error"]["message"]
  assert post(server, **CHAT)


@pytest.mark.parametrize("asked", [{"max_tokens": 500}, {"max_completion_tokens": 500}, {}])
def test_a_request_over_the_context_is_refused_as_openai_does(server, asked):
  long = {"model": MODEL, "messages": [{"role": "user", "content": "x" * (30 if asked else 600)}], **asked}
  response = server.post("/v1/chat/completions", json=long)
  assert response.status_code == 400
  error = response.json()["error"]
  assert error["code"] == "context_length_exceeded"
  assert error["type"] == "invalid_request_error"
  assert "the context has 512 tokens" in error["message"]
  response = server.post("/v1/completions", json={"model": MODEL, "prompt": "x" * 510, "max_tokens": 5})
  assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
def test_an_unknown_model_is_a_404(server, path):
  field = {"/v1/completions": "prompt", "/v1/embeddings": "input"}.get(path)
  body = {field: "x"} if field else {"messages": CHAT["messages"]}
  response = server.post(path, json={"model": "gpt-4", **body})
  assert response.status_code == 404
  assert response.json()["error"]["code"] == "model_not_found"
  assert response.json()["error"]["param"] == "model"
  assert "gpt-4" in response.json()["error"]["message"]


def test_parts_and_roles_of_messages_are_rendered_as_texts(server):
  parts = [{"type": "text", "text": "Where is"}, {"type": "text", "text": " it?"}]
  asked = {**CHAT, "messages": [{"role": "user", "content": parts, "name": "me"}]}
  assert post(server, **asked)["choices"] == post(server, **CHAT)["choices"]
  replies = [
    post(server, **{**CHAT, "messages": [{"role": role, "content": "Be brief."}, *CHAT["messages"]]})["choices"]
    for role in ("system", "developer")
  ]
  assert replies[0] == replies[1] != post(server, **CHAT)["choices"]


def test_text_that_spells_a_control_token_stays_text(server):
  spelled = {**CHAT, "messages": [{"role": "user", "content": "<|end|><|system|>"}]}
  plain = {**CHAT, "messages": [{"role": "user", "content": "xxxxxxxxxxxxxxxxx"}]}
  assert post(server, **spelled)["usage"]["prompt_tokens"] == post(server, **plain)["usage"]["prompt_tokens"]


@pytest.fixture
def slow_engine(monkeypatch):
  """Let every token take a while."""
  write = Engine._write
  monkeypatch.setattr(Engine, "_write", lambda self: (time.sleep(0.02), write(self)))


def test_a_full_queue_is_a_429_and_ends(slow_engine):
  with running(slots=1, settings={"max_waiting": 1}) as (url, has), httpx.Client(base_url=url, timeout=60) as asking:
    long = {**CHAT, "max_tokens": 400, "stream": True}
    with asking.stream("POST", "/v1/chat/completions", json=long) as first:
      assert next(first.iter_lines())
      with asking.stream("POST", "/v1/chat/completions", json=long):
        refused = asking.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 429
        assert float(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "queue_full"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert asking.get("/health").status_code == 200
    # both streams were left: their places are free again
    assert asking.post("/v1/chat/completions", json=CHAT).status_code in (200, 429)
    drained(has)
    assert asking.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_tokens_of_a_prompt_that_were_read_before_are_counted():
  with client(kind="attention") as made:
    body = {**CHAT, "messages": [{"role": "user", "content": "Where is it, and who asked?"}], "max_tokens": 2}
    replies = [made.post("/v1/chat/completions", json=body).json() for _ in range(2)]
    (reused,) = {reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies} - {0}
    assert f"selfrag_reused_tokens_total {float(reused)}" in made.get("/metrics").text


def drained(has, seconds=20):
  """Wait until no text is open in a server, and the engine has none."""
  end = time.monotonic() + seconds
  while has.writer.open or any(has.engine.load().values()):
    assert time.monotonic() < end, (has.writer.open, has.engine.load())
    time.sleep(0.02)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_disconnects_cancels_its_text(is_stream, slow_engine):
  with running() as (url, has):
    body = {**CHAT, "max_tokens": 450, "stream": is_stream, "n": 3}
    with httpx.Client(base_url=url) as leaving:
      leaving.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1}, timeout=60)  # compiles what the next needs
      if is_stream:
        with leaving.stream("POST", "/v1/chat/completions", json=body) as response:
          assert next(response.iter_lines())
      else:
        with pytest.raises(httpx.ReadTimeout):
          leaving.post("/v1/chat/completions", json=body, timeout=1)
    drained(has)
    with httpx.Client(base_url=url) as staying:
      counters = staying.get("/metrics").text
    assert "selfrag_cancelled_total 3.0" in counters
    assert is_stream or 'route="/v1/chat/completions",status="499"} 1.0' in counters


def test_a_text_that_takes_too_long_is_ended(slow_engine):
  with client(settings={"request_seconds": 0.2}) as made:
    body = {**CHAT, "max_tokens": 450}
    response = made.post("/v1/chat/completions", json=body)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "timeout"
    assert response.headers["x-should-retry"] == "false"
    streamed = made.post("/v1/chat/completions", json={**body, "stream": True})
    last = json.loads(streamed.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "timeout"
    drained(made.services)


def test_a_schema_that_takes_too_long_to_compile_is_not_waited_for(monkeypatch):
  with client(settings={"request_seconds": 0.2}) as made:
    engine = made.services.engine
    submit, go = engine.submit, threading.Event()
    monkeypatch.setattr(engine, "submit", lambda *args, **options: go.wait(20) and submit(*args, **options))
    asked = {"response_format": {"type": "json_object"}, "n": 3}
    assert made.post("/v1/chat/completions", json={**CHAT, **asked}).status_code == 504
    go.set()
    drained(made.services)


def test_an_engine_that_fails_is_told_and_the_server_goes_on(monkeypatch):
  with client() as made:
    with monkeypatch.context() as broken:
      broken.setattr(type(made.services.engine), "_write", lambda self: 1 / 0)
      assert made.post("/v1/chat/completions", json=CHAT).status_code == 500
      streamed = made.post("/v1/chat/completions", json={**CHAT, "stream": True})
      assert "the server failed" in streamed.text
      assert "[DONE]" not in streamed.text
    assert made.post("/v1/chat/completions", json=CHAT).status_code == 200
    drained(made.services)


def test_what_was_asked_is_counted():
  with client() as made:
    usage = post(made, **CHAT)["usage"]
    made.post("/v1/chat/completions", json={})
    counters = made.get("/metrics")
    assert counters.headers["content-type"].startswith("text/plain")
    for line in (
      'selfrag_requests_total{method="POST",route="/v1/chat/completions",status="200"} 1.0',
      'selfrag_requests_total{method="POST",route="/v1/chat/completions",status="400"} 1.0',
      f"selfrag_completion_tokens_total {usage['completion_tokens']}.0",
      f"selfrag_prompt_tokens_total {usage['prompt_tokens']}.0",
      "selfrag_first_token_seconds_count 1.0",
      "selfrag_texts_active 0.0",
      "selfrag_texts_waiting 0.0",
    ):
      assert line in counters.text
    for path in ("/a", "/b", "/v1/memory/1"):
      made.get(path)
    assert 'route="/a"' not in made.get("/metrics").text


def test_a_server_whose_engine_has_ended_is_not_ready():
  with client() as made:
    assert made.get("/ready").json()["status"] == "ready"
    made.services.engine.close()
    made.services.writer._thread.join()
    assert made.get("/ready").status_code == 503
    assert made.post("/v1/chat/completions", json=CHAT).status_code == 503
    assert made.get("/health").status_code == 200

"""The server as a process of its own, asked by the clients that people have: `openai`, and TextGrad's engines."""

import concurrent.futures
from typing import Literal

import numpy as np
import openai
import pytest
from pydantic import BaseModel

from selfrag_jax.encoders.hashed_words import HashingEncoder
from selfrag_jax.generate.engine import Engine
from selfrag_jax.textgrad import EngineError, get_engine
from tests.generate.models import tiny
from tests.serving import KEY, MODEL, build, process

MESSAGES = [{"role": "user", "content": "Where do ships land?"}]
GREEDY = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 16}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  folder = tmp_path_factory.mktemp("server")
  options = {"memory": str(folder / "memory"), "knowledge_bases": (f"facts={build(folder / 'facts')}",), "keys": [KEY]}
  with process(**options) as started:
    yield started
    assert KEY not in started.stop()


@pytest.fixture(scope="module")
def client(server):
  return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def expected():
  (text,) = Engine(tiny("hybrid")).submit_conversation({"messages": MESSAGES}, max_new_tokens=16)
  return text.wait()


def test_chat_whole_and_streamed(client, expected):
  whole = client.chat.completions.create(**GREEDY, logprobs=True)
  assert whole.choices[0].message.content == expected.text
  assert whole.choices[0].finish_reason == expected.finish_reason
  assert whole.usage.completion_tokens == len(expected.tokens)
  assert len(whole.choices[0].logprobs.content) > 0
  options = {"stream": True, "stream_options": {"include_usage": True}}
  *chunks, last = client.chat.completions.create(**GREEDY, **options)
  assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
  assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_completions_whole_and_streamed(client):
  (text,) = Engine(tiny("hybrid")).submit("The port", max_new_tokens=8)
  asked = {"model": MODEL, "prompt": "The port", "temperature": 0, "max_tokens": 8}
  assert client.completions.create(**asked).choices[0].text == text.wait().text
  assert "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == text.text


def test_a_schema_as_a_pydantic_model(client):
  class Port(BaseModel):
    port: Literal["Cadiz", "Oslo"]

  parsed = client.chat.completions.parse(**{**GREEDY, "max_tokens": 60}, response_format=Port)
  assert parsed.choices[0].message.parsed.port in ("Cadiz", "Oslo")


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
def test_embeddings(client, encoding):
  encoder = HashingEncoder()
  more = {"encoding_format": encoding} if encoding else {}  # the client itself asks for base64, and decodes it
  reply = client.embeddings.create(model=encoder.name, input=["Oslo", "Where do ships land?"], **more)
  vectors = [row.embedding for row in reply.data]
  if encoding == "base64":
    assert all(isinstance(vector, str) for vector in vectors)
  else:
    np.testing.assert_allclose(vectors, encoder(["Oslo", "Where do ships land?"]), atol=1e-6)


def test_models(client):
  assert [model.id for model in client.models.list()] == [MODEL, HashingEncoder().name]
  assert client.models.retrieve(MODEL).owned_by == "selfrag_jax"


def test_sources(client):
  asked = {**GREEDY, "extra_body": {"knowledge_base": "facts", "top_k": 2}}
  whole = client.chat.completions.create(**asked)
  assert whole.sources[0]["text"] == "Ships land in Cadiz, the port of Avalor."
  *chunks, last = client.chat.completions.create(
    **GREEDY, stream=True, extra_body={"knowledge_base": "facts", "top_k": 2}
  )
  assert last.sources == whole.sources
  assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


@pytest.mark.parametrize(
  ("error", "changes"),
  [
    (openai.NotFoundError, {"model": "gpt-4"}),
    (openai.BadRequestError, {"max_tokens": 600}),
    (openai.BadRequestError, {"extra_body": {"knowlege_base": "facts"}}),
    (openai.NotFoundError, {"extra_body": {"knowledge_base": "fact"}}),
  ],
)
def test_errors_are_those_of_the_client(client, error, changes):
  with pytest.raises(error) as caught:
    client.chat.completions.create(**{**GREEDY, **changes})
  assert caught.value.body["message"]


def test_a_wrong_key(server):
  with pytest.raises(openai.AuthenticationError):
    openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong-key-0123456789", max_retries=0).models.list()


def test_leaving_a_stream(client, expected):
  for _ in range(5):
    stream = client.chat.completions.create(**{**GREEDY, "max_tokens": 400}, stream=True)
    next(stream)
    stream.close()
  assert client.chat.completions.create(**GREEDY).choices[0].message.content == expected.text


def test_many_at_once_get_each_its_own_text(client):
  engine = Engine(tiny("hybrid"))
  prompts = [f"{n} ships" for n in range(24)]
  ask = lambda prompt: (
    client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=12).choices[0].text
  )
  with concurrent.futures.ThreadPoolExecutor(12) as pool:
    texts = list(pool.map(ask, prompts))
  assert texts == [engine.submit(prompt, max_new_tokens=12)[0].wait().text for prompt in prompts]


def test_an_engine_of_textgrad_is_a_model_of_the_server(server, expected):
  options = {"base_url": f"{server.url}/v1", "api_key": KEY, "max_tokens": 16, "max_retries": 0}
  engine = get_engine(f"openai/{MODEL}", **options)
  assert engine.generate("Where do ships land?") == expected.text
  with pytest.raises(EngineError, match=r"HTTP 404.*does not exist here"):
    get_engine("openai/other", **options).generate("x")

"""Bodies that schemathesis makes from the server's own OpenAPI document: the server never fails, and stays up.

SELFRAG_JAX_FUZZED_BODIES lowers the number of bodies.
"""

import os
from collections import Counter

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode, checks

from selfrag_jax.encoders.hashed_words import HashingEncoder
from tests.serving import MODEL, build, process

pytestmark = pytest.mark.slow
BODIES = int(os.environ.get("SELFRAG_JAX_FUZZED_BODIES", "10000"))
# replies are as the document says, too
CHECKS = (checks.response_schema_conformance, checks.status_code_conformance, checks.content_type_conformance)
MESSAGES = [{"role": "user", "content": "Where do ships land?"}]
VALID = {  # what is put into bodies: few texts would be written for models and places with made-up names
  "/v1/chat/completions": [
    {"model": MODEL, "messages": MESSAGES},
    {"model": MODEL, "max_tokens": 3, "max_completion_tokens": None},
    {"model": MODEL, "messages": MESSAGES, "knowledge_base": "facts", "memory": False, "n": 1, "logprobs": None},
    {"model": MODEL, "messages": MESSAGES, "knowledge_base": None, "memory": True, "stream": True},
  ],
  "/v1/completions": [{"model": MODEL, "prompt": "x"}, {"model": MODEL, "max_tokens": 3}],
  "/v1/embeddings": [{"model": HashingEncoder().name}, {"model": HashingEncoder().name, "dimensions": None}],
  "/v1/search": [{"knowledge_base": "facts", "memory": None}, {"knowledge_base": None, "memory": True}],
}
SCHEMAS = [{"type": "string"}, {"$ref": "#"}, {"anyOf": [{"type": "object"}]}, {"enum": ["a", 1, None]}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  folder = tmp_path_factory.mktemp("server")
  options = {"memory": str(folder / "memory"), "knowledge_bases": (f"facts={build(folder / 'facts')}",)}
  with process(**options, settings={"max_tokens": 6, "max_body_bytes": 100_000}) as started:
    yield started


def cases(operation):
  """Return a strategy of requests of an operation: those that fit the document, and those that do not."""
  return st.one_of(operation.as_strategy(generation_mode=mode) for mode in GenerationMode)


def with_real_names(case, data):
  """Put names that the server knows into most bodies."""
  if isinstance(case.body, dict) and case.path in VALID:
    case.body.update(data.draw(st.sampled_from([*VALID[case.path], {}])))
  return case


def fuzz(operation, count, statuses):
  """Send requests of an operation and count their statuses."""

  @hypothesis.settings(
    max_examples=count, deadline=None, database=None, suppress_health_check=[*hypothesis.HealthCheck]
  )
  @hypothesis.given(case=cases(operation), data=st.data())
  def send(case, data):
    response = with_real_names(case, data).call(timeout=60)
    statuses[operation.method.upper(), operation.path, response.status_code] += 1
    assert response.status_code < 500, (response.status_code, response.text, case.body)
    case.validate_response(response, checks=CHECKS)

  send()


def test_no_body_makes_the_server_fail(server):
  schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
  operations = [each.ok() for each in schema.get_all_operations()]
  with_bodies = [each for each in operations if each.method.upper() in ("POST", "PUT")]
  assert {each.path for each in with_bodies} >= {"/v1/chat/completions", "/v1/completions", "/v1/embeddings"}
  statuses = Counter()
  for operation in operations:
    fuzz(operation, BODIES // len(with_bodies) if operation in with_bodies else max(BODIES // 100, 5), statuses)
  for place, count in sorted(statuses.items()):
    print(*place, count)
  posts = {path for method, path, status in statuses if method == "POST" and status in (200, 201)}
  assert posts == {each.path for each in with_bodies if each.method.upper() == "POST"}  # each did its work for some
  assert sum(statuses.values()) >= BODIES * 0.9
  check_alive(server)


@hypothesis.settings(max_examples=max(BODIES // 10, 20), deadline=None, database=None)
@hypothesis.given(
  body=st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200).map(lambda text: text.encode(errors="surrogatepass")),
    st.recursive(st.none() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)).map(
      lambda value: repr(value).encode(errors="surrogatepass")
    ),
  ),
  path=st.sampled_from(["chat/completions", "completions", "embeddings", "search", "memory"]),
)
def test_no_bytes_make_the_server_fail(server, body, path):
  headers = {"Content-Type": "application/json"}
  assert httpx.post(f"{server.url}/v1/{path}", content=body, headers=headers, timeout=60).status_code < 500


@pytest.mark.parametrize("schema", SCHEMAS)
def test_schemas_of_answers_that_are_odd_are_followed_or_refused(server, schema):
  form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
  body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 6, "response_format": form}
  assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).status_code in (200, 400)
  check_alive(server)


def check_alive(server):
  """Check that the server still writes, and that no text is left in it."""
  body = {"model": MODEL, "prompt": "a", "max_tokens": 2, "temperature": 0}
  with httpx.Client(base_url=server.url, timeout=60) as client:
    assert client.post("/v1/completions", json=body).status_code == 200
    state = client.get("/ready").json()
    assert (state["active"], state["waiting"]) == (0, 0)
  assert "Traceback" not in server.errors

"""Texts that follow a grammar, and grammars that nothing can follow in time."""

import json

import jsonschema
import pytest

from selfrag_jax.generate.engine import Engine
from selfrag_jax.generate.grammar import Grammar
from tests.generate.models import tiny

SCHEMA = {
  "type": "object",
  "properties": {"port": {"enum": ["Cadiz", "Bergen"]}, "ships": {"type": "integer", "minimum": 0, "maximum": 99}},
  "required": ["port", "ships"],
  "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_random_model_writes_json_that_fits_a_schema(temperature):
  engine = Engine(tiny("hybrid"), steps=3)
  options = {"max_new_tokens": 60, "temperature": temperature}
  (free,) = engine.submit("abc", **options)
  texts = engine.submit("abc", num_samples=5, schema=SCHEMA, **options)
  for text in texts:
    assert text.wait().finish_reason == "stop"
    jsonschema.validate(json.loads(text.text), SCHEMA)
  assert free.wait().tokens == Engine(tiny("hybrid")).submit("abc", **options)[0].wait().tokens


def test_a_schema_is_compiled_once_for_all_samples_and_prompts():
  engine = Engine(tiny("hybrid"))
  for prompt in ("abc", "def"):
    engine.submit(prompt, num_samples=3, schema=SCHEMA, max_new_tokens=4)
  assert engine._vocabulary._compiled.cache_info().misses == 1


def test_a_text_that_leaves_its_grammar_ends_alone(monkeypatch):
  engine = Engine(tiny("hybrid"))
  (free,), (bound,) = (engine.submit("abc", max_new_tokens=12, schema=schema) for schema in (None, SCHEMA))
  accept = Grammar.accept

  def fail(grammar, token):
    accept(grammar, token)
    raise ValueError("beyond the limits")

  monkeypatch.setattr(Grammar, "accept", fail)
  with pytest.raises(ValueError, match="beyond the limits"):
    bound.wait()
  assert free.wait().tokens == Engine(tiny("hybrid")).submit("abc", max_new_tokens=12)[0].wait().tokens
  assert engine.load() == {"active": 0, "waiting": 0}


def chain(length, link):
  """Return a schema of an integer behind so many references."""
  links = {f"a{n}": link({"$ref": f"#/$defs/a{n + 1}"}) for n in range(length)}
  return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "integer"}}}


@pytest.mark.parametrize("link", [lambda ref: ref, lambda ref: {"anyOf": [ref]}, lambda ref: {"allOf": [ref]}])
def test_long_chains_of_references_are_followed(link):
  """They once overflowed the stack of the thread, which ended the process."""
  (text,) = Engine(tiny("hybrid")).submit("abc", schema=chain(2000, link), max_new_tokens=8)
  assert isinstance(json.loads(text.wait().text), int)


def nested(depth):
  schema = {"type": "integer"}
  for _ in range(depth):
    schema = {"anyOf": [schema]}
  return schema


@pytest.mark.parametrize(
  ("schema", "message"),
  [
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "Too many items"),
    ({"type": "string", "pattern": "^(a{1000}){1000}$"}, "too many expressions"),
    (nested(200), "recursion limit"),
    (nested(20_000), "nested too deeply"),
    ({"enum": ["x" * 100_000]}, "at most 100,000 are read"),
    ({"type": "nothing"}, "cannot be followed"),
  ],
)
def test_what_no_text_can_follow_in_time_is_refused_before_the_work(schema, message):
  engine = Engine(tiny("hybrid"))
  with pytest.raises(ValueError, match=message) as error:
    engine.submit("abc", schema=schema)
  assert len(str(error.value)) < 400
  assert engine.load() == {"active": 0, "waiting": 0}

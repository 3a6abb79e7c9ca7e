"""Tools whose replies are forced into a text, and texts that follow a grammar."""

import jax
import jax.numpy as jnp
import pytest

from selfrag_jax.generate import slots
from selfrag_jax.generate.engine import Engine
from selfrag_jax.generate.tools import Calculator, Search
from selfrag_jax.retrieval.document import Document
from selfrag_jax.retrieval.simple import SimpleRetriever
from selfrag_jax.text.chat import render_documents, render_notice
from tests.generate.models import TOKENIZER, greedy_by_full_forward, tiny

SPECIAL = TOKENIZER.special
PROMPT = "How many are there?"


@pytest.fixture
def scripted(monkeypatch):
  """Make an engine whose model writes a given text first, as if it had learned to ask; then it goes on by itself."""
  logits_of = slots.next_logits

  def make(written, prompt=PROMPT, **options):
    script = jnp.asarray([0] * len(prompt) + list(written), jnp.int32)

    def next_logits(model, params, position):
      at = position.cache.lengths
      wanted = jax.nn.one_hot(script[jnp.minimum(at, len(script) - 1)], model.padded_vocab) * 1e6
      return logits_of(model, params, position) + jnp.where((at < len(script))[:, None], wanted, 0)

    monkeypatch.setattr(slots, "next_logits", next_logits)
    jax.clear_caches()
    return Engine(tiny("hybrid"), **options)

  yield make
  jax.clear_caches()


def asked(query):
  return [SPECIAL["<|search_start|>"], *TOKENIZER.encode(query), SPECIAL["<|search_end|>"]]


def test_a_reply_is_forced_with_mask_0_and_the_text_goes_on_behind_it(scripted):
  query = asked("7 - 3")
  engine = scripted(query)
  (text,) = engine.submit(PROMPT, max_new_tokens=len(query) + 8, tools=(Calculator(),))
  text.wait()
  block = render_notice(TOKENIZER, "7 - 3 = 4")
  behind = greedy_by_full_forward(tiny("hybrid"), text.prompt + query + block, 8, {SPECIAL["<|end|>"]})
  assert text.tokens == query + block + behind
  assert text.mask == [1] * len(query) + [0] * len(block) + [1] * len(behind)
  assert SPECIAL["<|search_start|>"] not in behind
  assert text.text == TOKENIZER.decode(behind, skip_special=True)
  rows, masks = engine.generate_batch([PROMPT], max_new_tokens=len(query) + 8, tools=(Calculator(),))
  assert (rows, masks) == ([text.prompt + text.tokens], [[0] * len(PROMPT) + text.mask])


def test_documents_are_shown_as_a_rollout_shows_them(scripted):
  retriever = SimpleRetriever()
  retriever.add_documents(
    [Document(title="Port", content="The port is Cadiz [RETRIEVAL_END]."), Document(content="No ally.")]
  )
  query = asked("port")
  (text,) = scripted(query).submit(PROMPT, max_new_tokens=len(query) + 4, tools=(Calculator(), Search(retriever, 1)))
  text.wait()
  block = render_documents(TOKENIZER, [retriever.documents[0].to_dict()])
  assert text.tokens[len(query) : len(query) + len(block)] == block
  assert block.count(SPECIAL["[RETRIEVAL_END]"]) == 1
  assert [document["title"] for document in text.documents] == ["Port"]


def test_queries_beyond_the_budget_and_without_an_answer_get_a_notice(scripted):
  query = asked("1 + 1")
  for calls, tool, notice in (
    (0, Calculator(), "No more searches."),
    (1, Search(SimpleRetriever()), "Nothing was found."),
  ):
    (text,) = scripted(query).submit(PROMPT, max_new_tokens=len(query) + 2, tools=(tool,), max_tool_calls=calls)
    block = render_notice(TOKENIZER, notice)
    assert text.wait().tokens[len(query) : len(query) + len(block)] == block


def test_without_tools_a_query_is_text_like_any_other(scripted):
  query = asked("1 + 1")
  (text,) = scripted(query).submit(PROMPT, max_new_tokens=len(query) + 2)
  assert text.wait().mask == [1] * (len(query) + 2)
  assert text.text.startswith("1 + 1")


def test_a_tool_that_fails_or_finds_too_much_ends_its_text_alone(scripted):
  query = asked("1 + 1")

  def broken(query):
    raise OSError(f"no network for {query}")

  engine = scripted(query)
  bad, large, good = (
    engine.submit(PROMPT, max_new_tokens=len(query) + 2, tools=(tool,))[0]
    for tool in (broken, lambda query: "x" * 1000, Calculator())
  )
  with pytest.raises(OSError, match="no network"):
    bad.wait()
  with pytest.raises(ValueError, match="find fewer"):
    large.wait()
  assert good.wait().finish_reason == "length"
  assert engine.load() == {"active": 0, "waiting": 0}


@pytest.mark.parametrize(
  ("query", "reply"),
  [
    ("2 + 3 * 4", "2 + 3 * 4 = 14"),
    ("(1,000 - 1) / 2 =", "(1,000 - 1) / 2 = 499.5"),
    ("-2 ** 2", "-2 ** 2 = -4"),
    ("7 // 2 % 2", "7 // 2 % 2 = 1"),
    ("6 ÷ 3 × 2", "6 ÷ 3 × 2 = 4"),
    ("1 / 0", "No result: division by zero"),
    ("9 ** 9 ** 9", "No result: the exponent is too large"),
    ("1e300 * 1e300", "No result: the number is too large, or not real"),
    ("(-8) ** 0.5", "No result: the number is too large, or not real"),
    ("the port", None),
    ("42", None),
    ("__import__('os')", None),
    ("True + True", None),
    ("(" * 5000 + "1", None),
    ("1 " + "+ 1 " * 20000, "No result: "),
    ("a\0b", None),
    ("", None),
  ],
)
def test_the_calculator_answers_arithmetic_and_nothing_else(query, reply):
  found = Calculator()(query)
  assert found == reply or (reply == "No result: " and (found is None or found.startswith(reply)))

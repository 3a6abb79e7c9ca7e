"""Rollouts: the compiled program writes the tokens of the chat format, masks sampled ones, and equals the host mode."""

import dataclasses
import functools
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from selfrag_jax.generate.control import control_tokens
from selfrag_jax.generate.documents import RetrievedDocuments, compact, document_block, unseen
from selfrag_jax.generate.host_rollout import rollout_on_host
from selfrag_jax.generate.rollout import Policy, Queries, RolloutConfig, block_width, capacity, rollout, searched_for
from selfrag_jax.generate.sampling import SamplingConfig
from selfrag_jax.generate.transcript import read_transcript, read_transcripts
from selfrag_jax.mesh import make_mesh
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.likelihood import sequence_log_probs
from selfrag_jax.model.lm import LM, init_params, unstack
from selfrag_jax.ragged import pad_rows
from selfrag_jax.tasks.search_task import NOTICE
from selfrag_jax.tasks.two_hop import vocabulary
from selfrag_jax.tasks.two_hop_search import TwoHopSearch
from selfrag_jax.text.chat import COMPACT, document_body, render_conversation, render_documents, render_for_completion
from selfrag_jax.text.tokenizer import WordTokenizer
from selfrag_jax.train.experience import Trajectories, packed
from selfrag_jax.train.optimizer import OptimizerConfig
from selfrag_jax.train.phases.sft import SFT, SFTConfig

TOKENIZER = WordTokenizer(vocabulary())
CONTROL = control_tokens(TOKENIZER, NOTICE)
QUESTIONS = ["What is the port of the ally of Avalor?", "Avalor?", "What is the rival of Brindle?"]
DOCUMENTS = [
  {"title": "", "content": "The port of Avalor is Corvane."},
  {"title": "", "content": "The ally of Brindle is Harrow."},
  {"title": "", "content": "Harrow."},
]


def policy(config: RolloutConfig, pattern="TM", biases=(), seed=0) -> Policy:
  """A random policy whose head is pushed towards the tokens of `biases`, so that it searches and answers often."""
  model, params = random_model(pattern, seed)
  scale = np.ones((model.padded_vocab, 1), np.float32)
  for token, value in biases:
    scale[token] = value
  head = params["params"]["unembed"] * scale
  return Policy(model, {"params": params["params"] | {"unembed": head}}, config, CONTROL)


@functools.cache
def random_model(pattern: str, seed: int):
  model = ModelConfig(
    vocab_size=TOKENIZER.vocab_size, d_model=32, n_layers=len(pattern), n_heads=2, block_pattern=pattern,
    ssm_state=8, ssm_head_dim=16, ssm_chunk=8, init_scale=0.3, tie_embeddings=False,
  )  # fmt: skip
  return model, nn.unbox(init_params(model, jax.random.key(seed)))


def greedy_next(p: Policy, tokens):
  """What the full forward would write after every token, int [B, T]."""

  @jax.jit
  def forward(params):
    return LM(p.model).apply(params, LM(p.model).apply(params, tokens), method="logits")

  return np.argmax(forward(p.params), axis=-1)


SEARCHY = (
  (CONTROL.search_start, 6.0),
  (CONTROL.search_end, 4.0),
  (CONTROL.answer_start, 4.0),
  (CONTROL.answer_end, 4.0),
)


def prompts():
  rows = [
    render_for_completion(TOKENIZER, {"messages": [{"role": "user", "content": q}]}, COMPACT) for q in QUESTIONS * 4
  ]
  width = max(map(len, rows))
  return jnp.asarray([row + [CONTROL.pad] * (width - len(row)) for row in rows]), jnp.asarray(
    [len(row) for row in rows]
  )


BODIES = [document_body(TOKENIZER, document) for document in DOCUMENTS]
X = max(map(len, BODIES))
TOKENS = jnp.asarray([body + [0] * (X - len(body)) for body in BODIES])
LENGTHS = jnp.asarray([len(body) for body in BODIES])


def slots_of(queries, hop, k):
  """A retriever that depends on query and hop, and sometimes finds less than k."""
  first = (queries.sum(axis=1) + hop) % 4
  return jnp.stack([jnp.where(first + j < 3, first + j, -1) for j in range(k)], axis=1).astype(jnp.int32)


def questions() -> Queries:
  """The questions as queries, longer and shorter than those of a policy may be."""
  asked = [TOKENIZER.encode(question) for question in QUESTIONS * 4]
  return Queries(*map(jnp.asarray, pad_rows(asked, 10)))


def device_rollout(p: Policy, key=0, read=1, repeats=1, seen=None):
  """Roll out `read` copies of every prompt, `repeats` times each."""

  def retrieve(queries, mask, hop):
    k = p.config.documents_per_search(0 if seen is None else seen.shape[1])
    slots = slots_of(jnp.where(mask, queries, 0), hop, k)
    return RetrievedDocuments(
      TOKENS[jnp.maximum(slots, 0)], jnp.where(slots >= 0, LENGTHS[jnp.maximum(slots, 0)], 0), slots
    )

  def run(params, key):
    flat = Policy(p.model, unstack(p.model, params), p.config, p.control)
    copies = lambda tree: jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), read, axis=0), tree)
    asked = copies((*prompts(), questions()))
    return rollout(flat, *asked[:2], retrieve, X, key, asked[2], repeats, seen)

  return jax.device_get(jax.jit(run)(p.params, jax.random.key(key)))


def host_rollout(p: Policy, key=0):
  def retrieve(queries, hop):
    slots = slots_of(jnp.asarray([[sum(query)] for query in queries]), hop, p.config.documents_per_search())
    return [[(int(slot), BODIES[slot]) for slot in row if slot >= 0] for row in np.asarray(slots)]

  flat = Policy(p.model, unstack(p.model, p.params), p.config, p.control)
  return jax.device_get(rollout_on_host(flat, *prompts(), retrieve, X, jax.random.key(key), questions()))


@pytest.mark.parametrize("first", ["policy", "question"])
def test_rows_of_one_question_whose_prompt_is_read_once_are_those_of_separate_prompts(first):
  p = policy(RolloutConfig(2, 1, 4, 3, SamplingConfig(1.0), first), "TM", SEARCHY)
  once, each = device_rollout(p, repeats=3), device_rollout(p, read=3)
  for name in ("tokens", "sampled", "lengths", "prompt_lengths", "slots", "searches", "refused"):
    np.testing.assert_array_equal(getattr(once, name), getattr(each, name), err_msg=name)
  np.testing.assert_allclose(once.log_probs, each.log_probs, atol=1e-5)
  assert len(once.tokens) == 3 * len(prompts()[0])
  rows = once.tokens.reshape(-1, 3, once.tokens.shape[1])
  assert (rows != rows[:, :1]).any()  # each row draws its own tokens


@pytest.mark.parametrize(
  ("pattern", "k", "hops", "temperature", "first", "distinct", "search_for"),
  [
    ("TM", 1, 2, 0.0, "policy", False, "query"),
    ("TM", 2, 0, 1.0, "policy", True, "question_and_query"),
    ("MT", 3, 1, 1.0, "policy", False, "question_and_query"),
    ("TM", 2, 2, 1.0, "question", False, "query"),
    ("MM", 1, 3, 1.0, "question", True, "question_and_query"),
  ],
)
def test_device_mode_equals_host_mode(pattern, k, hops, temperature, first, distinct, search_for):
  p = policy(RolloutConfig(hops, k, 4, 3, SamplingConfig(temperature), first, distinct, search_for), pattern, SEARCHY)
  device, host = device_rollout(p), host_rollout(p)
  for name in ("tokens", "sampled", "lengths", "slots", "searches", "refused"):
    np.testing.assert_array_equal(getattr(device, name), getattr(host, name), err_msg=name)
  np.testing.assert_allclose(device.log_probs, host.log_probs, atol=1e-5)


def test_a_distinct_search_shows_the_best_of_what_the_row_has_not_seen(monkeypatch):
  """Every query finds the documents 1, 2 and 0, in this order."""
  order = np.array([1, 2, 0, *[-1] * 9])
  monkeypatch.setattr(
    sys.modules[__name__], "slots_of", lambda queries, hop, k: jnp.asarray(np.tile(order[:k], (len(queries), 1)))
  )
  seen = jnp.ones((len(QUESTIONS * 4), 1), jnp.int32)  # every prompt shows document 1

  def found(distinct, seen=None):
    bounds = RolloutConfig(3, 1, 4, 3, SamplingConfig(1.0), "question", distinct)
    return device_rollout(policy(bounds, "MT", SEARCHY), seen=seen).slots[..., 0]

  again, new, without = found(False), found(True), found(True, seen)
  assert (again[:, 1] == 1).any()  # some rows ask a second time
  for slots, best in ((again, [1, 1, 1]), (new, [1, 2, 0]), (without, [2, 0, -1])):
    np.testing.assert_array_equal(slots, np.where(slots >= 0, best, -1))
    assert (slots[:, 0] == best[0]).all()
  assert (new[:, 1] == 2).any()


@pytest.mark.parametrize("first", ["policy", "question"])
def test_a_search_by_the_policy_can_look_for_the_question_and_its_query(first):
  """A row that does not search has no query."""
  newline, asked = (TOKENIZER.encode("of")[0],), []
  bounds = RolloutConfig(2, 1, 4, 3, SamplingConfig(1.0), first, search_for="question_and_query")
  p = policy(bounds, "TM", SEARCHY)
  p = p.replace(control=CONTROL._replace(newline=newline), params=unstack(p.model, p.params))
  retrieve = lambda queries, hop: asked.append(queries) or [()] * len(queries)
  r = jax.device_get(rollout_on_host(p, *prompts(), retrieve, X, jax.random.key(0), questions()))
  looked_for = [[] for _ in asked]
  for row, transcript in enumerate(read_transcripts(r, CONTROL)):
    question = TOKENIZER.encode((QUESTIONS * 4)[row])
    for hop in range(len(asked)):
      query = transcript.queries[hop] if hop < len(transcript.queries) else ()
      by_rule = first == "question" and hop == 0
      looked_for[hop].append([*question] if by_rule else [*question, *newline, *query] if query else [])
  assert asked == looked_for
  assert any(map(len, asked[-1]))


def test_an_empty_query_searches_for_nothing_rather_than_for_the_question():
  queries, inside = jnp.asarray([[7, 8, 0], [0, 0, 0]]), jnp.asarray([[True, True, False], [False] * 3])
  asked = Queries(jnp.asarray([[1, 2], [3, 0]]), jnp.asarray([2, 1]))
  tokens, mask = searched_for(RolloutConfig(search_for="question_and_query"), CONTROL, queries, inside, asked)
  assert [row[kept].tolist() for row, kept in zip(np.asarray(tokens), np.asarray(mask), strict=True)] == [
    [1, 2, 7, 8],
    [],
  ]


def test_the_question_must_be_there_to_be_searched_for():
  for setting in ({"search_for": "question_and_query"}, {"first_query": "question"}):
    [(name, value)] = setting.items()
    p = policy(RolloutConfig(**setting), biases=SEARCHY)
    p = p.replace(params=unstack(p.model, p.params))
    with pytest.raises(ValueError, match=f"{name} = '{value}' needs the questions"):
      rollout_on_host(p, *prompts(), lambda queries, hop: [()] * len(queries), X, jax.random.key(0))


def test_unseen_documents_keep_their_order_and_their_texts():
  found = RetrievedDocuments(np.arange(12).reshape(1, 4, 3), np.array([[1, 2, 3, 0]]), np.array([[5, 7, 2, -1]]))
  tokens, lengths, slots = unseen(found, np.array([[-1, 5]]), 2)
  assert (slots.tolist(), lengths.tolist()) == ([[7, 2]], [[2, 3]])
  assert tokens.tolist() == [[[3, 4, 5], [6, 7, 8]]]
  assert unseen(found, np.array([[2, 5, 7]]), 2).slots.tolist() == [[-1, -1]]


@pytest.fixture(scope="module")
def formatted() -> Policy:
  """A policy that has seen enough random demonstrations to keep the format."""
  task, p = TwoHopSearch(), policy(RolloutConfig(2, 1, 4, 2), seed=1)
  config = SFTConfig(
    steps=60, batch_size=32, max_tokens=64, demonstrations="random", optimizer=OptimizerConfig(learning_rate=5e-3)
  )
  mesh = make_mesh(1, 1, 1, jax.devices()[:1])
  phase = SFT("sft", task, p.model, config, max_hops=2, mesh=mesh, seed=0, params=p.params, evaluate=lambda _: {})
  state = phase.initial_state()
  for batch in phase.batches(0):
    state, metrics = phase.step(state, batch)
  assert float(metrics["loss"]) < 1.5
  return p.replace(params=state.params)


def test_a_rollout_is_what_the_chat_renderer_writes(formatted):
  """Rebuild each valid rollout as a conversation, render it, and compare ids and masks."""
  p, seen = formatted, {"search": 0, "refused": 0, "missed": 0}
  for key in range(4):
    r = device_rollout(p, key)
    for row, transcript in enumerate(read_transcripts(r, CONTROL)):
      if not transcript.valid:
        continue
      parts, slots = [], r.slots[row]
      for hop, query in enumerate(transcript.queries):
        parts.append({"type": "search", "text": TOKENIZER.decode(query)})
        refused = hop >= p.config.max_hops
        found = {"text": NOTICE} if refused else {"documents": [DOCUMENTS[slot] for slot in slots[hop] if slot >= 0]}
        seen["missed"] += found == {"documents": []}
        parts.append({"type": "retrieval", **found})
      parts.append({"type": "answer", "text": TOKENIZER.decode(transcript.answer)})
      seen["refused" if r.refused[row] else "search"] += 1
      messages = [{"role": "user", "content": (QUESTIONS * 4)[row]}, {"role": "assistant", "content": parts}]
      ids, mask = render_conversation(TOKENIZER, {"messages": messages}, COMPACT)
      n = r.lengths[row]
      assert r.tokens[row, :n].tolist() == ids[:-1]  # the rollout stops before the end-of-turn token
      expected = np.asarray(mask[:-1], bool)
      if r.refused[row]:  # the answer was opened by force
        expected[np.flatnonzero(r.tokens[row, :n] == CONTROL.answer_start)] = False
      np.testing.assert_array_equal(r.sampled[row, :n], expected)
      assert not r.sampled[row, n:].any()
      assert (r.tokens[row, n:] == CONTROL.pad).all()
  assert min(seen.values()) > 0, seen


def test_a_rule_can_write_the_first_query():
  """The rows begin with their question as a search: it counts, is well formed, and none of its tokens is sampled."""
  r = device_rollout(policy(RolloutConfig(2, 1, 4, 3, SamplingConfig(1.0), "question"), biases=SEARCHY))
  asked = questions()
  np.testing.assert_array_equal(r.slots[:, 0], slots_of(jnp.where(asked.mask, asked.tokens, 0), 0, 1))
  assert r.searches.min() >= 1
  for row, transcript in enumerate(read_transcripts(r, CONTROL)):
    start, question = r.prompt_lengths[row], TOKENIZER.encode((QUESTIONS * 4)[row])
    found = [] if r.slots[row, 0, 0] < 0 else [DOCUMENTS[r.slots[row, 0, 0]]]
    written = [CONTROL.search_start, *question, CONTROL.search_end, *render_documents(TOKENIZER, found)]
    assert r.tokens[row, start : start + len(written)].tolist() == written
    assert not r.sampled[row, start : start + len(written)].any()
    assert transcript.queries[0] == tuple(question)
  answered = np.array([*written, CONTROL.answer_start, *question[:1], CONTROL.answer_end])
  by_policy = np.arange(len(answered)) >= len(written)
  assert read_transcript(answered, by_policy, CONTROL).valid
  assert not read_transcript(answered, by_policy | (answered == CONTROL.search_start), CONTROL).valid


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("float64", 1e-10)])
@pytest.mark.parametrize(
  ("pattern", "first"), [("TT", "policy"), ("MM", "policy"), ("TM", "policy"), ("TM", "question")]
)
def test_log_probs_are_those_of_the_full_forward(pattern, first, dtype, most):
  """The update, in packed rows, sees the probabilities that were sampled from, behind retrieved and forced tokens."""
  with jax.enable_x64(dtype == "float64"):
    p = policy(RolloutConfig(2, 1, 4, 3, SamplingConfig(0.7), first), pattern, SEARCHY)
    model = dataclasses.replace(p.model, dtype=dtype, param_dtype=dtype)
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), p.params)
    runs = [device_rollout(Policy(model, params, p.config, p.control), key) for key in range(2)]
    r = jax.tree.map(lambda *rows: np.concatenate(rows), *runs)
    ones = np.ones(len(r.tokens))
    rows = packed([Trajectories.of(r, ones, ones > 0, None)], len(ones), 1)
    log_probs = lambda p: sequence_log_probs(model, p, rows.tokens, rows.segment_ids, temperature=0.7, chunk=16)
    gap = np.abs(np.asarray(jax.jit(log_probs)(params)) - rows.log_probs)[rows.rewarded]
    assert rows.log_probs.dtype == dtype
    assert gap.max() <= most
    after = np.roll(~rows.rewarded, 1, axis=1) & rows.rewarded  # the first of a turn, after documents or forced tokens
    assert after.sum() > 20
    assert rows.rewarded.sum() == r.sampled.sum() > 50
    assert rows.segment_ids.max() > 1


def test_lengths_are_bounded_and_long_turns_are_closed_by_force():
  stubborn = policy(
    RolloutConfig(1, 1, 3, 2), biases=((CONTROL.search_start, 9.0),)
  )  # opens queries and never closes one
  r = device_rollout(stubborn)
  longest = capacity(stubborn.config, CONTROL, prompts()[0].shape[1], X)
  assert r.lengths.max() == longest  # the longest prompt, query, document, refused query and answer
  for row, transcript in enumerate(read_transcripts(r, CONTROL)):
    ends = np.flatnonzero(np.isin(r.tokens[row, : r.lengths[row]], [CONTROL.search_end, CONTROL.answer_end]))
    forced = ends[~r.sampled[row, ends]]
    if len(forced):
      assert not transcript.valid
    assert all(len(query) <= 3 for query in transcript.queries)
  assert any(~r.sampled[row, n - 1] for row, n in enumerate(r.lengths))


def test_document_block_equals_the_renderer():
  config = RolloutConfig(documents_per_hop=3)
  slots = jnp.asarray([[0, 2, -1], [-1, -1, -1], [1, 0, 2]])
  safe = jnp.maximum(slots, 0)
  found = RetrievedDocuments(TOKENS[safe], LENGTHS[safe], slots)
  tokens, lengths = document_block(found, CONTROL, block_width(config, CONTROL, X))
  for row, n, chosen in zip(tokens, lengths, slots, strict=True):
    assert row[:n].tolist() == render_documents(TOKENIZER, [DOCUMENTS[slot] for slot in chosen if slot >= 0])


@pytest.mark.parametrize(
  "wrong", [{"max_hops": -1}, {"documents_per_hop": 17}, {"documents_per_hop": 0}, {"max_query_tokens": 0}]
)
def test_impossible_bounds_are_refused(wrong):
  with pytest.raises(ValueError, match=next(iter(wrong))):
    RolloutConfig(**wrong)


def test_compact_keeps_order_and_cuts_at_the_width():
  tokens, lengths = compact(jnp.arange(1, 9).reshape(2, 4), jnp.asarray([[True, False, True, True], [False] * 4]), 2)
  np.testing.assert_array_equal(tokens, [[1, 3], [0, 0]])
  np.testing.assert_array_equal(lengths, [2, 0])


def test_all_hops_are_one_program_without_host_callbacks():
  p = policy(RolloutConfig(2, 1, 4, 3))
  flat = Policy(p.model, unstack(p.model, p.params), p.config, p.control)
  retrieve = lambda queries, mask, hop: RetrievedDocuments(
    TOKENS[:1][None].repeat(12, 0), LENGTHS[:1][None].repeat(12, 0), jnp.zeros((12, 1), jnp.int32)
  )
  text = jax.jit(lambda key: rollout(flat, *prompts(), retrieve, X, key)).lower(jax.random.key(0)).compile().as_text()
  assert " while(" in text
  # nothing that leaves the device: no call of Python, no feed, no transfer
  for operation in (
    'custom_call_target="xla_python',
    'custom_call_target="xla_ffi_python',
    " infeed(",
    " outfeed(",
    " send(",
    " recv(",
  ):
    assert operation not in text


def test_model_forward_is_used_for_prompts_of_any_length():
  """Prompts of different lengths in one batch are continued as they would be alone."""
  p = policy(RolloutConfig(1, 1, 4, 3, SamplingConfig(0.0)))
  r = device_rollout(p)
  rows, n = np.arange(12), r.prompt_lengths
  assert len(set(n)) == 3
  np.testing.assert_array_equal(r.tokens[rows, n], greedy_next(p, r.tokens)[rows, n - 1])


def test_a_turn_that_the_policy_closes_at_the_bound_is_its_own(formatted):
  """Queries have three tokens: a bound of three leaves room for the closing token only, and none is forced."""
  p = formatted.replace(config=RolloutConfig(1, 1, 3, 1, SamplingConfig(0.0)))
  r = device_rollout(p)
  wanted = np.pad(greedy_next(p, r.tokens), ((0, 0), (1, 0)))[:, :-1]  # what the policy would write here
  closing = np.isin(r.tokens, [CONTROL.search_end, CONTROL.answer_end])
  np.testing.assert_array_equal(r.sampled[closing], (wanted == r.tokens)[closing])
  assert r.sampled[closing].mean() > 0.5

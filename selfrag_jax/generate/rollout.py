"""Multi-hop rollouts: decode until every row has stopped, search for its query, extend the caches by the documents.

All hops of a batch are one XLA program, a loop over hops with the retrieval inside; `generate/host_rollout.py` runs the
same steps around any Python retriever. A row is in one of three states:

  RUNNING    the row writes; its turn starts at `turn_start`
  SEARCHING  the row closed a query and waits for documents
  DONE       the row closed its answer, ran out of tokens or wrote an end of turn
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from selfrag_jax.checked import Checked, Count, Natural, Range
from selfrag_jax.generate.control import ControlTokens
from selfrag_jax.generate.documents import RetrievedDocuments, compact, document_block, notice_block, unseen
from selfrag_jax.generate.sampling import SamplingConfig, sample
from selfrag_jax.generate.step import Position, begin, next_logits, read
from selfrag_jax.mesh import constrain
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.likelihood import token_log_probs
from selfrag_jax.ragged import length_mask
from selfrag_jax.text.special import MAX_DOCUMENTS
from selfrag_jax.typing import Array, Params, PRNGKey

RUNNING, SEARCHING, DONE = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class RolloutConfig(Checked):
  """The bounds of a rollout. Lengths are in tokens, without the opening and closing tokens.

  `first_query`: who writes the first search, the policy, or a rule that searches for the question as it is. `distinct`:
  a search shows the best documents that no earlier one of its row has shown. `search_for`: what a search by the policy
  looks for, its query alone, or the question and its query: a query that names what was found does not say what is
  asked of it.
  """

  max_hops: Natural = 2
  documents_per_hop: Annotated[int, Range(1, MAX_DOCUMENTS)] = 1
  max_query_tokens: Count = 8
  max_answer_tokens: Count = 8
  sampling: SamplingConfig = SamplingConfig()
  first_query: Literal["policy", "question"] = "policy"
  distinct: bool = False
  search_for: Literal["query", "question_and_query"] = "query"

  def documents_per_search(self, seen: int = 0) -> int:
    """Return how many documents a retriever must give, where a row may have `seen` some before it began."""
    return self.documents_per_hop * max(self.max_hops, 1) + seen if self.distinct else self.documents_per_hop


class Queries(NamedTuple):
  """Questions as queries, which no policy wrote: tokens int32 [B, W], right-padded, and lengths [B], at least 1."""

  tokens: Array | np.ndarray
  lengths: Array | np.ndarray

  @property
  def mask(self) -> Array:
    """Return where there is a token, bool [B, W]."""
    return length_mask(self.lengths, self.tokens.shape[1], jnp)


@struct.dataclass
class Rollout:
  """A batch of rollouts; all arrays have fixed shapes and are padded.

  `tokens`, `sampled` (True where the policy chose the token, False on prompt, retrieved and forced tokens) and
  `log_probs` are [B, S]; `lengths` and `prompt_lengths` [B]; `slots` [B, hops, k], -1 where nothing was found;
  `searches` [B] counts the searches within the budget; `refused` bool [B]: a search beyond the budget was refused.
  """

  tokens: Array
  sampled: Array
  log_probs: Array
  lengths: Array
  prompt_lengths: Array
  slots: Array
  searches: Array
  refused: Array


@struct.dataclass
class _State:
  tokens: Array
  sampled: Array
  log_probs: Array
  position: Position
  status: Array
  turn_start: Array
  searches: Array
  refused: Array

  @property
  def lengths(self) -> Array:
    return self.position.cache.lengths


def first_queries(config: RolloutConfig, questions: Queries | None) -> Queries | None:
  """Return the questions if they are the first queries and the bounds allow a search.

  Raises ValueError without questions where they are.
  """
  if config.first_query == "policy" or not config.max_hops:
    return None
  if questions is None:
    raise ValueError("first_query = 'question' needs the questions")
  return questions


def searched_for(
  config: RolloutConfig, control: ControlTokens, queries_BxQ: Array, mask_BxQ: Array, questions: Queries | None
) -> tuple[Array, Array]:
  """Return what the queries of the policy search for, right-padded tokens [B, W] and their mask; an empty one: nothing.

  Raises ValueError without questions where they belong to it.
  """
  if config.search_for == "query":
    return queries_BxQ, mask_BxQ
  if questions is None:
    raise ValueError("search_for = 'question_and_query' needs the questions")
  batch, searching = len(queries_BxQ), mask_BxQ.any(axis=1, keepdims=True)
  newline = jnp.broadcast_to(jnp.asarray(control.newline, jnp.int32), (batch, len(control.newline)))
  tokens = jnp.concatenate([questions.tokens, newline, queries_BxQ], axis=1)
  inside = jnp.concatenate([questions.mask, jnp.ones(newline.shape, bool), mask_BxQ], axis=1) & searching
  tokens, lengths = compact(tokens, inside, tokens.shape[1])
  return tokens, length_mask(lengths, tokens.shape[1], jnp)


def block_width(config: RolloutConfig, control: ControlTokens, document_tokens: int) -> int:
  """Return the most tokens that one search can put into the context."""
  return max(_documents_width(config, document_tokens), len(control.notice) + 3)


def _documents_width(config: RolloutConfig, document_tokens: int) -> int:
  return 2 + config.documents_per_hop * (document_tokens + 2)


def capacity(
  config: RolloutConfig,
  control: ControlTokens,
  prompt_tokens: int,
  document_tokens: int,
  questions: Queries | None = None,
) -> int:
  """Return the most tokens that a rollout can have: prompt, searches within the budget, one beyond it, and answer."""
  query, answer = 2 + config.max_query_tokens, 2 + config.max_answer_tokens
  refused = query + len(control.notice) + 2
  searches = searches_width(config, document_tokens, questions, config.max_hops)
  return prompt_tokens + searches + refused + answer


def searches_width(config: RolloutConfig, document_tokens: int, questions: Queries | None, n: int) -> int:
  """Return the most tokens of the first `n` searches with the documents that they find."""
  query, first = config.max_query_tokens, first_queries(config, questions)
  longer = 0 if first is None or not n else max(first.tokens.shape[1] - query, 0)
  return longer + n * (2 + query + _documents_width(config, document_tokens))


@struct.dataclass
class Policy:
  """The model, parameters and bounds of a rollout; all static but the parameters, which are `unstack`ed."""

  model: ModelConfig = struct.field(pytree_node=False)
  params: Params
  config: RolloutConfig = struct.field(pytree_node=False)
  control: ControlTokens = struct.field(pytree_node=False)

  def read(self, position: Position, tokens_BxT: Array, lengths_B: Array) -> Position:
    return read(self.model, self.params, position, tokens_BxT, lengths_B)


def start(policy: Policy, prompts_BxT: Array, lengths_B: Array, size: int) -> _State:
  """Read the prompts (right-padded) into fresh caches of `size` tokens."""
  batch, time = prompts_BxT.shape
  with jax.named_scope("prefill"):
    position = policy.read(begin(policy.model, batch, size), prompts_BxT, lengths_B)
  real = length_mask(lengths_B, time, jnp)
  tokens = jnp.full((batch, size), policy.control.pad, jnp.int32)
  zeros = jnp.zeros((batch,), jnp.int32)
  # left to itself, the compiler may keep what starts as zeros whole on every device, and gather it for every token
  by_rows = lambda x: constrain(x, "batch", "time")
  return _State(
    tokens=by_rows(tokens.at[:, :time].set(jnp.where(real, prompts_BxT, policy.control.pad))),
    sampled=by_rows(jnp.zeros((batch, size), bool)),
    log_probs=by_rows(jnp.zeros((batch, size), jnp.promote_types(policy.model.dtype, jnp.float32))),
    position=position,
    status=zeros,
    turn_start=lengths_B,
    searches=zeros,
    refused=jnp.zeros((batch,), bool),
  )


def _write(array_BxS: Array, positions_BxT: Array, values_BxT: Array) -> Array:
  rows = jnp.arange(array_BxS.shape[0])[:, None]
  return array_BxS.at[rows, positions_BxT].set(values_BxT, mode="drop")


def decode(policy: Policy, state: _State, key: PRNGKey) -> _State:
  """Decode in every running row until it searches or is done. A turn that is too long is closed by force."""
  config, control = policy.config, policy.control
  size = state.tokens.shape[1]

  def step(carry: tuple[_State, PRNGKey]) -> tuple[_State, PRNGKey]:
    state, key = carry
    key, sample_key = jax.random.split(key)
    with jax.named_scope("sample"):
      logits = constrain(next_logits(policy.model, policy.params, state.position), "batch", None)
      token = sample(sample_key, logits, config.sampling)
    at = state.lengths
    first = jnp.take_along_axis(state.tokens, jnp.minimum(state.turn_start, size - 1)[:, None], axis=1)[:, 0]
    in_query = (at > state.turn_start) & (first == control.search_start)
    bound = 1 + jnp.where(in_query, config.max_query_tokens, config.max_answer_tokens)
    closing = jnp.where(in_query, control.search_end, control.answer_end)
    forced = (at - state.turn_start >= bound) & (token != closing)
    token = jnp.where(forced, closing, token)
    log_prob = token_log_probs(logits, token, config.sampling.temperature)

    running = state.status == RUNNING
    position = jnp.where(running, at, size)[:, None]
    with jax.named_scope("decode"):
      after = policy.read(state.position, token[:, None], running.astype(jnp.int32))
    searching = in_query & (token == control.search_end)
    done = (token == control.answer_end) | (token == control.end)
    status = jnp.where(searching, SEARCHING, jnp.where(done, DONE, RUNNING))
    state = state.replace(
      tokens=_write(state.tokens, position, token[:, None]),
      sampled=_write(state.sampled, position, ~forced[:, None]),
      log_probs=_write(state.log_probs, position, log_prob[:, None].astype(state.log_probs.dtype)),
      position=after,
      status=jnp.where(running, status, state.status),
    )
    return state, key

  return jax.lax.while_loop(lambda carry: (carry[0].status == RUNNING).any(), step, (state, key))[0]


def ask(policy: Policy, state: _State, queries: Queries) -> _State:
  """Search for given queries behind the prompts, in every row; none of these tokens is sampled."""
  batch, width = queries.tokens.shape
  edge = lambda token: jnp.full((batch, 1), token, jnp.int32)
  control, always = policy.control, jnp.ones((batch, 1), bool)
  turn = jnp.concatenate([edge(control.search_start), queries.tokens, edge(control.search_end)], axis=1)
  block, lengths = compact(turn, jnp.concatenate([always, queries.mask, always], axis=1), width + 2)
  return _read(policy, state, block, lengths).replace(status=jnp.full((batch,), SEARCHING))


def read_queries(policy: Policy, state: _State) -> tuple[Array, Array]:
  """Return the queries of the searching rows, tokens int32 [B, Q] and mask bool [B, Q]; the other rows are empty."""
  width = policy.config.max_query_tokens
  position = state.turn_start[:, None] + 1 + jnp.arange(width)[None, :]
  inside = (position < state.lengths[:, None] - 1) & (state.status == SEARCHING)[:, None]
  tokens = jnp.take_along_axis(state.tokens, jnp.minimum(position, state.tokens.shape[1] - 1), axis=1)
  return jnp.where(inside, tokens, policy.control.pad), inside


def append(policy: Policy, state: _State, found: RetrievedDocuments, over_budget: Array) -> _State:
  """Extend the caches of the searching rows by the found documents, or by the notice that the budget is spent."""
  batch = state.tokens.shape[0]
  width = block_width(policy.config, policy.control, found.tokens.shape[2])
  documents, document_lengths = document_block(found, policy.control, width)
  notice, notice_lengths = notice_block(policy.control, batch, width)
  searching = state.status == SEARCHING
  block = jnp.where(over_budget, notice, documents)
  lengths = jnp.where(searching, jnp.where(over_budget, notice_lengths, document_lengths), 0)
  state = _read(policy, state, block, lengths)
  return state.replace(
    status=jnp.where(searching, RUNNING, state.status),
    # the forced opening of the answer is the first token of its turn
    turn_start=jnp.where(searching, state.lengths - jnp.asarray(over_budget, jnp.int32), state.turn_start),
    searches=state.searches + jnp.asarray(searching & ~over_budget, jnp.int32),
    refused=state.refused | (searching & over_budget),
  )


def _read(policy: Policy, state: _State, block_BxW: Array, lengths_B: Array) -> _State:
  """Extend the caches of the rows by their blocks of tokens, which are not sampled; a length of 0 changes nothing."""
  steps = jnp.arange(block_BxW.shape[1])[None, :]
  at = jnp.where(steps < lengths_B[:, None], state.lengths[:, None] + steps, state.tokens.shape[1])
  with jax.named_scope("read"):
    position = policy.read(state.position, block_BxW, lengths_B)
  return state.replace(tokens=_write(state.tokens, at, block_BxW), position=position)


def finish(state: _State, lengths_B: Array, slots: Array) -> Rollout:
  """Return the rollout of a batch whose rows are done; `lengths_B` are those of the prompts."""
  return Rollout(
    state.tokens, state.sampled, state.log_probs, state.lengths, lengths_B, slots, state.searches, state.refused
  )


Retrieve = Callable[[Array, Array, Array], RetrievedDocuments]


def rollout(
  policy: Policy,
  prompts_QxT: Array,
  lengths_Q: Array,
  retrieve: Retrieve,
  document_tokens: int,
  key: PRNGKey,
  questions: Queries | None = None,
  repeats: int = 1,
  seen_QxN: Array | None = None,
) -> Rollout:
  """Run all hops of a batch as one traced program (jit the caller).

  Every question (Q) has `repeats` rows that are neighbours (B = Q * repeats); their common prompt is read once.

  `retrieve(queries int32 [B, W], mask bool [B, W], hop int32 []) -> RetrievedDocuments` is traced too: an encoder, a
  search and a gather of documents of `document_tokens` tokens. A row with an empty mask does not search; its result is
  unused. It gives `config.documents_per_search` documents. `questions` are searched for as the bounds say; `seen` are
  the slots that the prompts show (-1: none).
  """
  config, batch = policy.config, len(prompts_QxT) * repeats
  size = capacity(config, policy.control, prompts_QxT.shape[1], document_tokens, questions)
  to_rows = lambda tree: jax.tree.map(lambda x: jnp.repeat(x, repeats, axis=0), tree)

  shown = jnp.full((batch, 0), -1, jnp.int32) if seen_QxN is None else to_rows(seen_QxN)
  questions = None if questions is None else Queries(*to_rows(tuple(questions)))

  def find(state: _State, slots: Array, i: Array, given: Queries | None = None) -> tuple[_State, Array]:
    if given is None:
      queries, mask = searched_for(config, policy.control, *read_queries(policy, state), questions)
    else:
      queries, mask = jnp.asarray(given.tokens), given.mask
    with jax.named_scope("retrieve"):
      found = RetrievedDocuments(*map(jnp.asarray, retrieve(queries, mask, i)))
      if config.distinct:
        seen = jnp.concatenate([shown, slots.reshape(batch, -1)], axis=1)
        found = unseen(found, seen, config.documents_per_hop)
    searching = (state.status == SEARCHING)[:, None]
    return append(policy, state, found, i >= config.max_hops), jnp.where(searching, found.slots, -1)

  def hop(carry: tuple[_State, Array, Array]) -> tuple[_State, Array, Array]:
    state, slots, i = carry
    state = decode(policy, state, jax.random.fold_in(key, i))
    nothing = lambda state, slots, i: (state, jnp.full((batch, config.documents_per_hop), -1, jnp.int32))
    # after the last turns no row searches: reading empty blocks would cost hardly less than the longest documents
    state, found = jax.lax.cond((state.status == SEARCHING).any(), find, nothing, state, slots, i)
    return state, slots.at[:, i].set(found, mode="drop"), i + 1

  # one hop more than the budget allows, for the notice
  slots = jnp.full((batch, config.max_hops + 1, config.documents_per_hop), -1, jnp.int32)
  carry = to_rows(start(policy, prompts_QxT, lengths_Q, size)), slots, jnp.zeros((), jnp.int32)
  if (first := first_queries(config, questions)) is not None:
    state, found = find(ask(policy, carry[0], first), *carry[1:], first)
    carry = state, slots.at[:, 0].set(found), carry[2] + 1
  state, slots, _ = jax.lax.while_loop(lambda carry: (carry[0].status == RUNNING).any(), hop, carry)
  return finish(state, to_rows(lengths_Q), slots[:, : config.max_hops])

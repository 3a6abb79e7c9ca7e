"""Multi-hop rollouts around any Python retriever: the steps of `generate/rollout.py`, a compiled program each."""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from selfrag_jax.generate.documents import RetrievedDocuments, unseen
from selfrag_jax.generate.rollout import (
  SEARCHING,
  Policy,
  Queries,
  Rollout,
  append,
  ask,
  capacity,
  decode,
  finish,
  first_queries,
  read_queries,
  searched_for,
  start,
)
from selfrag_jax.typing import Array, PRNGKey

Document = tuple[int, Sequence[int]]  # its slot and the token ids of its body
HostRetrieve = Callable[[Sequence[list[int]], int], Sequence[Sequence[Document]]]


def pad_documents(rows: Sequence[Sequence[Document]], k: int, width: int) -> RetrievedDocuments:
  """Pad each row's at most `k` documents to `width` tokens, in host arrays. Raises ValueError for a longer one."""
  shape = (len(rows), k)
  found = RetrievedDocuments(
    np.zeros((*shape, width), np.int32), np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
  )
  for i, documents in enumerate(rows):
    for j, (slot, body) in enumerate(documents):
      if len(body) > width:
        raise ValueError(f"document {slot} has {len(body)} tokens, the rollout has room for {width}")
      found.tokens[i, j, : len(body)] = body
      found.lengths[i, j], found.slots[i, j] = len(body), slot
  return found


def rollout_on_host(
  policy: Policy,
  prompts_BxT: Array,
  lengths_B: Array,
  retrieve: HostRetrieve,
  document_tokens: int,
  key: PRNGKey,
  questions: Queries | None = None,
) -> Rollout:
  """Run the same hops around a Python retriever: decode a turn, search, append, once per hop.

  `retrieve(queries, hop)` gets the token ids of one query per row (empty: the row does not search) and returns, for
  each query, at most `documents_per_search` pairs `(slot, body token ids)`; `questions` as in `rollout`. Raises
  ValueError for a body of more than `document_tokens` tokens: cut documents when you chunk them.
  """
  config = policy.config
  size = capacity(config, policy.control, prompts_BxT.shape[1], document_tokens, questions)
  first = first_queries(config, questions)
  state = _start_jit(policy, prompts_BxT, lengths_B, size)
  slots = np.full((len(lengths_B), config.max_hops, config.documents_per_hop), -1, np.int32)
  for hop in itertools.count():
    given = first if hop == 0 else None
    state = (
      _decode_jit(policy, state, jax.random.fold_in(key, hop)) if given is None else _ask_jit(policy, state, given)
    )
    searching = np.asarray(state.status) == SEARCHING
    if not searching.any():
      break
    written = _queries_jit(policy, state, questions) if given is None else (given.tokens, given.mask)
    queries, mask = map(np.asarray, written)
    over_budget = hop >= config.max_hops
    texts = [query[inside].tolist() for query, inside in zip(queries, mask, strict=True)]
    results = [()] * len(texts) if over_budget else retrieve(texts, hop)
    most = config.documents_per_search()
    found = pad_documents([row[:most] for row in results], most, document_tokens)
    if config.distinct:
      found = unseen(found, slots.reshape(len(slots), -1), config.documents_per_hop)
    state = _append_jit(policy, state, found, np.asarray(over_budget))
    if not over_budget:
      slots[:, hop] = np.where(searching[:, None], found.slots, -1)
  return finish(state, lengths_B, jnp.asarray(slots))


_start_jit = jax.jit(start, static_argnames="size")
_decode_jit = jax.jit(decode)
_ask_jit = jax.jit(ask)
_queries_jit = jax.jit(
  lambda policy, state, questions: searched_for(policy.config, policy.control, *read_queries(policy, state), questions)
)
_append_jit = jax.jit(append)

"""The protocol of search tasks: batches of questions with the documents to search, and demonstrations."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from selfrag_jax.text.chat import ChatTemplate
from selfrag_jax.text.tokenizer import Tokenizer

Indices = Sequence[int] | np.ndarray


SPLITS = ("train", "sft", "valid", "test")
STRATEGIES = ("random", "gold")  # of demonstrations
NOTICE = "No more searches."
OVERRUN_RATE = 0.25  # of random demonstrations: a policy that never saw the notice falls apart when it does


class Corpus(NamedTuple):
  """Documents in the order of their slots: index keys int32 [C, Xk], bodies int32 [C, X], lengths, group ids [C]."""

  keys: np.ndarray
  key_lengths: np.ndarray
  tokens: np.ndarray
  lengths: np.ndarray
  group_ids: np.ndarray


class SearchBatch(NamedTuple):
  """Questions and the documents to search for their answers, in host arrays.

  `indices` [Q] name the questions within their split. Prompts int32 [Q, T] are right-padded, `lengths` [Q]; so are the
  questions alone, int32 [Q, W], which a rule can search for; gold slots
  int32 [Q, G] (-1: none); group ids [Q]; `first_slots` int32 [Q]: the first slot of each question's group.
  """

  indices: np.ndarray
  prompts: np.ndarray
  lengths: np.ndarray
  questions: np.ndarray
  question_lengths: np.ndarray
  gold: np.ndarray
  group_ids: np.ndarray
  first_slots: np.ndarray
  answers: Sequence[tuple[str, ...]]
  corpus: Corpus


def taken(batch: SearchBatch, rows: np.ndarray) -> SearchBatch:
  """Return some questions of a batch, with the documents of all."""
  arrays = {name: column[rows] for name, column in batch._asdict().items() if name not in ("answers", "corpus")}
  return batch._replace(**arrays, answers=[batch.answers[row] for row in rows])


def permuted(batch: SearchBatch, order: np.ndarray) -> SearchBatch:
  """Give question i the answers and the gold documents of question `order[i]`, but within its own group of documents.

  This is a causal control of a reward: the permuted reward cannot teach how to answer.
  """
  gold, first = batch.gold[order], batch.first_slots
  moved = np.where(gold >= 0, gold - first[order][:, None] + first[:, None], -1)
  return batch._replace(gold=moved, answers=[batch.answers[i] for i in order])


def search_turn(
  queries: Iterable[str],
  documents: Iterable[Sequence[Mapping[str, str]]],
  answer: str,
  max_hops: int,
  first_query: Literal["policy", "question"] = "policy",
) -> dict[str, Any]:
  """Write the assistant's message: each query shows its documents, or NOTICE beyond `max_hops`; then the answer.

  The first query is not the assistant's own where the question is the `first_query`.
  """
  parts: list[dict[str, Any]] = []
  for hop, (query, shown) in enumerate(zip(queries, documents, strict=True)):
    found = {"documents": [*shown]} if hop < max_hops else {"text": NOTICE}
    by_rule = {"by_rule": True} if hop == 0 and first_query == "question" else {}
    parts += [{"type": "search", "text": query, **by_rule}, {"type": "retrieval", **found}]
  return {"role": "assistant", "content": [*parts, {"type": "answer", "text": answer}]}


class SearchTask(Protocol):
  """A task whose questions are answered by searching.

  Everything is a function of (split, index), so that the order of the data is a function of seed, step and row.
  """

  @property
  def tokenizer(self) -> Tokenizer: ...

  @property
  def template(self) -> ChatTemplate: ...

  @property
  def notice(self) -> str:
    """The text that answers a search beyond the budget."""
    ...

  @property
  def chance(self) -> float:
    """The exact match of the best guess without searching."""
    ...

  @property
  def document_tokens(self) -> int:
    """The tokens of the longest document."""
    ...

  def size(self, split: str) -> int | None:
    """Return the number of different questions, None if they never end; indices of `sft` and `train` may go beyond."""
    ...

  def batch(self, split: str, indices: Indices) -> SearchBatch:
    """Make the batch of these questions; if all questions share one corpus, every batch holds the same object."""
    ...

  def demonstration(self, split: str, index: int, strategy: str, max_hops: int) -> dict[str, Any]:
    """Return a conversation that shows how a question is answered (`gold`), or only the format (`random`)."""
    ...


class ShuffledEpochs:
  """An endless sequence of `items`, shuffled anew in every epoch as a function of the seed and the epoch."""

  def __init__(self, items: Sequence[Any], *seed: int):
    self._items, self._seed = items, seed
    self._order = functools.lru_cache(2)(self._shuffled)

  def __getitem__(self, position: int) -> Any:
    epoch, offset = divmod(int(position), len(self._items))
    return self._items[self._order(epoch)[offset]]

  def _shuffled(self, epoch: int) -> np.ndarray:
    return np.random.default_rng([*self._seed, epoch]).permutation(len(self._items))

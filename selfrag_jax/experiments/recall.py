"""Recall by depth: the scores of a reader on paired questions that differ only in the place of the needed fact."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from selfrag_jax.mesh import fetch
from selfrag_jax.metrics.position import describe
from selfrag_jax.metrics.statistics import bootstrap_difference
from selfrag_jax.tasks.context_batch import ContextBatch, of_facts
from selfrag_jax.tasks.facts import Facts
from selfrag_jax.train.memory_reader import MemoryReader, Visibility, is_found, visible_slots
from selfrag_jax.typing import Params

_retrieve = jax.jit(lambda reader, *args: reader.retrieve(*args).slots, static_argnums=0)
_read = jax.jit(MemoryReader.read, static_argnums=0)
_embed = jax.jit(lambda reader, params, batch: reader.remember(params, batch)[1], static_argnums=0)


class Curve(NamedTuple):
  """The scores of one condition.

  Of each question at each depth, [N, depths]: `loss`; `right`, whether the answer was right; `first`, whether the fact
  that moves was the first of the chunks seen; `found`, whether all needed facts were seen. `budget` and `budget_tokens`
  are the numbers of facts and of tokens that may be seen.
  """

  loss: np.ndarray
  right: np.ndarray
  first: np.ndarray
  found: np.ndarray
  budget: int
  budget_tokens: int

  def report(self) -> dict[str, Any]:
    """Describe the curve as JSON."""
    by_depth = lambda hits: hits.mean(axis=0).tolist()
    return {
      **describe(self.right),
      "recall_by_depth": by_depth(self.found),
      "recall_at_1_by_depth": by_depth(self.first),
      "loss_by_depth": by_depth(self.loss),
      "budget": self.budget,
      "budget_tokens": self.budget_tokens,
    }


class Scored(NamedTuple):
  """Answers to N questions: mean loss and whether right, [N], and the slots of the chunks seen, [N, k]."""

  loss: np.ndarray
  right: np.ndarray
  slots: np.ndarray


def measure(
  reader: MemoryReader,
  params: Params,
  task: Facts,
  visibility: Visibility,
  *,
  questions: int,
  depths: int,
  tokens: int = 16_384,
  changed: bool = False,
) -> Curve:
  """Ask `questions` test questions at each depth, about `tokens` tokens in a batch.

  `changed`: the needed fact states another value, and that value is the right answer.
  """
  places = task.depths(depths)
  at = lambda depth: of_facts(task.episodes("test", range(questions), [depth] * questions, changed=changed))
  batch = ContextBatch(*(np.concatenate(column) for column in zip(*map(at, places), strict=True)))
  scored = score(reader, params, batch, visibility, tokens=tokens)
  gold = batch.gold[:, 0]
  columns = (scored.loss, scored.right, scored.slots[:, 0] == gold[:, 0], is_found(scored.slots, gold))
  scores = (np.asarray(column).reshape(depths, questions).T for column in columns)
  budget = task.n_facts if visibility == "full" else reader.config.top_k
  return Curve(*scores, budget=budget, budget_tokens=budget * (batch.chunks.shape[2] + 1) + 1)


def score(
  reader: MemoryReader,
  params: Params,
  batch: ContextBatch,
  visibility: Visibility,
  *,
  tokens: int = 16_384,
  seed: int = 0,
) -> Scored:
  """Answer the question of each context; `seed` draws the chunks of the visibility `random`."""
  slots = _slots(reader, params, batch, visibility, tokens, seed)
  width = batch.chunks.shape[2] + 1  # [MEM] stands before each chunk
  return Scored(*_answer(reader, params, batch, slots, tokens // (slots.shape[1] * width)), slots)


def recall_among(reader: MemoryReader, params: Params, task: Facts) -> np.ndarray:
  """Return for each fact of a test list whether a question about it finds it first, bool [n_facts]."""
  batch = of_facts(task.lists("test", [0], task.n_facts))
  slots = _retrieve(reader, params, batch, np.zeros(task.n_facts, bool))
  return fetch(slots)[:, 0] == batch.gold[0, :, 0]


def _slots(
  reader: MemoryReader, params: Params, batch: ContextBatch, visibility: Visibility, tokens: int, seed: int
) -> np.ndarray:
  """Return the chunks of its own context that each question sees, as their places in it, int [N, k]; -1: none."""
  n = batch.chunks.shape[1]
  if visibility in ("memory", "deleted"):
    embedded, parts = _embedded(reader, params, batch, tokens), []
    for rows in _parts(len(batch.chunks), tokens // n):
      part = ContextBatch(*(column[rows] for column in batch))
      forgotten = np.zeros((len(rows), n), bool)
      if visibility == "deleted":
        np.put_along_axis(forgotten, part.gold[:, 0], True, axis=1)
      parts.append(fetch(_retrieve(reader, params, part, forgotten.reshape(-1), embedded(rows))))
    slots = np.concatenate(parts)[: len(batch.chunks)]
  else:
    slots = visible_slots(visibility, batch, reader.config.top_k, np.random.default_rng(seed))
  return np.where(slots >= 0, slots % n, -1)


def _embedded(
  reader: MemoryReader, params: Params, batch: ContextBatch, tokens: int
) -> Callable[[np.ndarray], np.ndarray]:
  """Embed every distinct chunk once, since contexts share facts; return the function from contexts to embeddings."""
  n, width = batch.chunks.shape[1:]
  rows = np.concatenate([batch.chunks.reshape(-1, width), batch.chunk_lengths.reshape(-1, 1)], axis=1)
  distinct, of_chunk = np.unique(rows, axis=0, return_inverse=True)
  of_chunk = of_chunk.reshape(-1, n)
  one = lambda column, of: column[of][:, None]
  parts = []
  for of in _parts(len(distinct), tokens // width):
    alone = batch._replace(chunks=one(distinct[:, :-1], of), chunk_lengths=one(distinct[:, -1], of))
    parts.append(fetch(_embed(reader, params, alone)))
  embedded = np.concatenate(parts)[: len(distinct)]
  return lambda contexts: embedded[of_chunk[contexts]].reshape(-1, embedded.shape[1])


def _answer(
  reader: MemoryReader, params: Params, batch: ContextBatch, slots: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
  """Answer with the chunks at `slots`, `size` questions at once. Returns mean losses and whether right, each [N].

  The compiled program gets these chunks alone, so that one program serves contexts of every length.
  """
  k = slots.shape[1]
  order = np.argsort(np.where(slots >= 0, slots, batch.chunks.shape[1]), axis=1, kind="stable")  # in reading order
  shown = np.take_along_axis(slots, order, axis=1)
  at = np.maximum(shown, 0)
  narrow = batch._replace(
    chunks=np.take_along_axis(batch.chunks, at[:, :, None], axis=1),
    chunk_lengths=np.where(shown >= 0, np.take_along_axis(batch.chunk_lengths, at, axis=1), 0),
  )
  places = np.where(slots >= 0, np.argsort(order, axis=1), -1)
  parts = []
  for rows in _parts(len(slots), size):
    first = np.arange(len(rows))[:, None] * k
    local = np.where(places[rows] >= 0, first + places[rows], -1)
    read: Any = _read(reader, params, ContextBatch(*(column[rows] for column in narrow)), local)
    parts.append(fetch(read))
  log_probs, hits, counted = (np.concatenate(column)[: len(slots)] for column in zip(*parts, strict=True))
  loss = -np.where(counted, log_probs, 0).sum(axis=1) / counted.sum(axis=1)
  return loss, np.all(hits | ~counted, axis=1)


def _parts(n: int, size: int) -> Iterator[np.ndarray]:
  """Yield 0..n-1 in parts of one size; the last part is padded with n - 1, so that one program serves all parts."""
  size = max(1, min(size, n))
  for start in range(0, n, size):
    yield np.minimum(np.arange(start, start + size), n - 1)


def variance_change(before: Curve, after: Curve) -> dict[str, Any]:
  """Return the variance of the mean loss over depths before and after, and the interval of its difference."""
  over_depth = lambda losses: float(np.var(losses.mean(axis=0)))
  interval = bootstrap_difference(after.loss, before.loss, over_depth)
  return {"before": over_depth(before.loss), "after": over_depth(after.loss), "interval": list(interval)}

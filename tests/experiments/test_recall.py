"""Recall by depth: each condition shows the right chunks, and parts and narrowed contexts change no answer."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from selfrag_jax.experiments.recall import measure, recall_among, score, variance_change
from selfrag_jax.generate.augment import memory_tokens
from selfrag_jax.model.config import ModelConfig
from selfrag_jax.model.lm import LM, init_params
from selfrag_jax.self_rag import SelfRAGConfig
from selfrag_jax.tasks.context_batch import of_facts
from selfrag_jax.tasks.facts import Facts
from selfrag_jax.train.memory_reader import MemoryReader, gold_slots, visible_slots

TASK = Facts("two_fact", 12)  # two chunks are needed
MODEL = ModelConfig(
  vocab_size=TASK.tokenizer.vocab_size, d_model=32, n_layers=1, n_heads=2, block_pattern="T",
  init_scale=0.2,
)  # fmt: skip
READER = MemoryReader(MODEL, SelfRAGConfig(top_k=4, chunk_size=16, order="position"), memory_tokens(TASK.tokenizer))
PARAMS = nn.unbox(init_params(MODEL, jax.random.key(0)))
ASK = {"questions": 6, "depths": 4, "tokens": 400}  # parts of two or three contexts


def episodes(depth):
  return of_facts(TASK.episodes("test", range(6), [depth] * 6))


@pytest.mark.parametrize(
  ("visibility", "expected"),
  [
    ("tail", [8, 9, 10, 11]),
    ("head_tail", [0, 1, 10, 11]),
    ("full", list(range(12))),
    ("none", [-1] * 4),
  ],
)
def test_what_is_seen_without_a_search(visibility, expected):
  slots = visible_slots(visibility, episodes(3), 4)
  np.testing.assert_array_equal(np.where(slots >= 0, slots - 12 * np.arange(6)[:, None], -1), [expected] * 6)


def test_the_oracle_shows_what_is_needed_and_random_never_does():
  batch = episodes(5)
  gold = np.asarray(gold_slots(batch))
  np.testing.assert_array_equal(visible_slots("oracle", batch, 4)[:, :2], gold)
  assert (visible_slots("oracle", batch, 4)[:, 2:] == -1).all()
  drawn = np.concatenate([visible_slots("random", batch, 4, np.random.default_rng(i)) for i in range(50)], axis=1)
  assert not (drawn[:, :, None] == gold[:, None, :]).any()
  for row in range(6):  # each of the ten others, about equally often
    counts = np.unique(drawn[row], return_counts=True)[1]
    assert len(counts) == 10
    assert counts.max() < 2.5 * counts.min()


@pytest.mark.parametrize("visibility", ["memory", "deleted", "head_tail", "oracle", "full"])
def test_a_curve_is_what_reading_whole_contexts_gives(visibility):
  curve = measure(READER, PARAMS, TASK, visibility, **ASK)
  assert curve.loss.shape == curve.right.shape == curve.found.shape == (6, 4)
  for column, depth in enumerate(TASK.depths(4)):
    batch = episodes(depth)
    gold = np.asarray(gold_slots(batch))
    if visibility in ("memory", "deleted"):
      forgotten = np.zeros(72, bool)
      forgotten[gold.reshape(-1)] = visibility == "deleted"
      slots = np.asarray(READER.retrieve(PARAMS, batch, forgotten).slots)
    else:
      slots = visible_slots(visibility, batch, 4)
    log_probs, hits, counted = map(np.asarray, READER.read(PARAMS, batch, slots))
    np.testing.assert_allclose(curve.loss[:, column], -log_probs[counted], atol=1e-5)
    np.testing.assert_array_equal(curve.right[:, column], hits[counted])
    np.testing.assert_array_equal(curve.first[:, column], slots[:, 0] == gold[:, 0])
    both = [set(needed) <= set(row) for needed, row in zip(gold.tolist(), slots.tolist(), strict=True)]
    np.testing.assert_array_equal(curve.found[:, column], both)
  if visibility == "deleted":
    assert not curve.found.any()
  if visibility in ("oracle", "full"):
    assert curve.found.all()


def test_changed_facts_expect_the_other_answer():
  before, after = (measure(READER, PARAMS, TASK, "oracle", **ASK, changed=changed) for changed in (False, True))
  assert (before.loss != after.loss).all()


def test_the_variance_over_depths_is_compared_with_its_interval():
  curve = measure(READER, PARAMS, TASK, "tail", **ASK)
  rng = np.random.default_rng(0)
  uneven = curve._replace(loss=np.linspace(1, 2, 4)[None] + 0.01 * rng.normal(size=(6, 4)))
  even = curve._replace(loss=1 + 0.01 * rng.normal(size=(6, 4)))
  change = variance_change(uneven, even)
  assert change["before"] == pytest.approx(np.var([1, 4 / 3, 5 / 3, 2]), rel=0.1)
  assert change["interval"][1] < 0
  assert variance_change(even, even)["interval"] == [0, 0]


def test_without_marks_a_whole_context_is_plain_text():
  batch = episodes(3)
  bare = score(READER._replace(ids=None), PARAMS, batch, "full")
  model = LM(MODEL)
  for row in range(6):
    facts = [token for ids, n in zip(batch.chunks[row], batch.chunk_lengths[row], strict=True) for token in ids[:n]]
    asked = batch.inputs[row, 0, : batch.lengths[row, 0]]
    tokens = jnp.asarray([[*facts, *asked]])
    log_probs = jax.nn.log_softmax(model.apply(PARAMS, model.apply(PARAMS, tokens)[0, -2], method="logits"))
    np.testing.assert_allclose(bare.loss[row], -log_probs[asked[-1]], atol=1e-5)
    assert bare.right[row] == (log_probs.argmax() == asked[-1])


def test_facts_are_told_from_each_other_by_their_embeddings():
  task = Facts("kv", 48)
  model = dataclasses.replace(MODEL, vocab_size=task.tokenizer.vocab_size)
  reader = READER._replace(model=model, config=dataclasses.replace(READER.config, embed_pooling="last"))
  params = nn.unbox(init_params(reader.model, jax.random.key(1)))
  found = recall_among(reader, params, task)
  batch = of_facts(task.lists("test", [0], 48))
  unit = lambda x: np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))
  chunks, queries = unit(reader.remember(params, batch)[1]), unit(reader.ask(params, batch))
  np.testing.assert_array_equal(found, (queries @ chunks.T).argmax(axis=1) == batch.gold[0, :, 0])
  assert 0 < found.mean() < 1
